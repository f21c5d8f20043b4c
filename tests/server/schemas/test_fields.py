"""What a column may hold, and how a field that does not exist is told of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_gr.core.errors import Unprocessable
from npu_gr.core.text_format import full_match
from npu_gr.server.schemas import CODECS
from npu_gr.server.schemas.admin import CatalogueItemsBody
from npu_gr.server.schemas.events import PRINTABLE
from npu_gr.server.schemas.fields import History, parse_events
from npu_gr.server.schemas.media import JSON, decode
from tests.server.fake import FakeNames

INGEST: Any = CODECS["ingest"].body
RECOMMEND: Any = CODECS["recommend"].body


class Nameless(FakeNames):
    """No model names its actions."""

    def actions(self, version: str | None) -> Any:
        return None


def indices(actions: list[Any]) -> list[int]:
    num = len(actions)
    history = History(items=list(range(num)), actions=actions, timestamps=[1] * num)
    return list(parse_events(history, "history", 100, Nameless()).actions.tolist())


@given(st.lists(st.integers(0, 2**15 - 1), max_size=20), st.data())
def test_indices_are_numbers_in_any_spelling(numbers: list[int], data: st.DataObject) -> None:
    spelled = [data.draw(st.sampled_from([one, float(one), str(one)])) for one in numbers]
    assert indices(spelled) == numbers


@pytest.mark.parametrize(
    "action",
    [
        2**15,
        2**63 - 1,
        -1,
        3.9999999,
        1e300,
        -0.5,
        "32768",
        "000000999999",
        "0000001234567890123456789",
        "9" * 400,
        "-1",
        "+1",
        "1.0",
        "\u0663",
        " 1",
        "1\n",
        "",
        "view",
    ],
)
def test_what_is_no_index_is_rejected_in_words(action: Any) -> None:
    with pytest.raises(
        Unprocessable,
        match=r"^history\.actions: .* at index 1: no model names "
        r"actions here",
    ):
        indices([1, action])


@pytest.mark.parametrize(
    ("cls", "body", "message"),
    [
        (
            INGEST,
            {"users": [{"usr_id": 1}]},
            r"^unknown field users\[0\]\.usr_id; did you mean "
            r"user_id\?$",
        ),
        (INGEST, {"users": [{"itms": 1}]}, r"^unknown field users\[0\]\.itms$"),
        (
            INGEST,
            {"users": [{"user_id": 1, "events": {"itms": 1}}]},
            r"^unknown field users\[0\]\.events\.itms; did you mean items\?$",
        ),
        (INGEST, {"usrs": []}, r"^unknown field usrs; did you mean users\?$"),
        (
            RECOMMEND,
            {"history": {"itms": 1}},
            r"^unknown field history\.itms; did you mean "
            r"items\?$",
        ),
        (
            CatalogueItemsBody,
            {"add": [{"titlex": "a"}]},
            r"^unknown field add\[0\]\.titlex; did "
            r"you mean title\?$",
        ),
    ],
)
def test_an_unknown_field_is_told_of_by_the_names_of_its_place(
    cls: Any, body: Any, message: str
) -> None:
    with pytest.raises(Unprocessable, match=message):
        decode(msgspec.json.encode(body), JSON, cls)


@pytest.mark.parametrize("key", ["k" * 129, "k\n", "\n", "", "a\nb", "\x7f"])
def test_a_key_in_a_body_is_what_one_in_a_header_may_be(key: str) -> None:
    one = {"user_id": 1, "events": {"items": [], "actions": [], "timestamps": []}}
    decode(msgspec.json.encode({"users": [one | {"idempotency_key": "k" * 128}]}), JSON, INGEST)
    with pytest.raises(Unprocessable, match=r"^users\[0\]\.idempotency_key: "):
        decode(msgspec.json.encode({"users": [one | {"idempotency_key": key}]}), JSON, INGEST)
    assert full_match(PRINTABLE).endswith("$")  # of the schema: `\\Z` means nothing there
