"""The smallest time budget wins; a spent one is a 504; a header that cannot be read is a 400."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from npu_gr.core.errors import BadRequest, DeadlineExceeded
from npu_gr.server.http import accepted_media, budget_s
from npu_gr.server.schemas.media import JSON, MSGPACK


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 1.0),
        ({"X-Request-Timeout-Ms": "250"}, 0.25),
        ({"X-Request-Timeout-Ms": "0.5"}, 0.0005),
        ({"grpc-timeout": "50m"}, 0.05),
        ({"grpc-timeout": "2H"}, 30.0),
        (
            {
                "x-envoy-expected-rq-timeout-ms": "70",
                "X-Request-Timeout-Ms": "90",
                "grpc-timeout": "80000u",
            },
            0.07,
        ),
        ({"X-Request-Timeout-Ms": "999999999"}, 30.0),
    ],
    ids=str,
)
def test_the_smallest_wins(headers: dict[str, str], seconds: float) -> None:
    assert budget_s(headers, default_s=1.0, max_s=30.0) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "x", "-1", "1e3", "nan", "inf", "1" * 20])
def test_what_cannot_be_read(value: str) -> None:
    for name in ("X-Request-Timeout-Ms", "x-envoy-expected-rq-timeout-ms", "grpc-timeout"):
        with pytest.raises(BadRequest, match=name):
            budget_s({name: value}, 1.0, 30.0)


@pytest.mark.parametrize("headers", [{"X-Request-Timeout-Ms": "0"}, {"grpc-timeout": "0n"}])
def test_what_is_spent(headers: dict[str, str]) -> None:
    with pytest.raises(DeadlineExceeded):
        budget_s(headers, 1.0, 30.0)


@pytest.mark.parametrize(
    ("accept", "media"),
    [
        ([], JSON),
        ([""], JSON),
        (["*/*"], JSON),
        (["text/html"], JSON),
        (["application/msgpack"], MSGPACK),
        (["Application/MsgPack ; q=1.0"], MSGPACK),
        (["application/msgpack, */*;q=0.1"], MSGPACK),
        (["application/msgpack, application/json"], MSGPACK),
        (["application/json, application/msgpack"], JSON),
        (["application/json;q=0.5, application/msgpack"], MSGPACK),
        (["application/json;q=0.5", "application/msgpack;q=0.7"], MSGPACK),
        (["application/json;q=0, */*"], MSGPACK),
        (["application/json;q=0"], JSON),
        (["application/msgpack;q=0"], JSON),
        (["application/msgpack;q=0.0, text/html"], JSON),
        (["application/msgpack;q=0.5, application/json"], JSON),
        (["application/msgpack;q=0.5, application/*"], JSON),
        (["application/msgpack;q=x"], JSON),
        (["application/msgpack;q=nan"], JSON),
        (["application/msgpacked"], JSON),
        (["application/json;q=0.5, , "], JSON),
    ],
    ids=str,
)
def test_accept_is_read_by_quality(accept: list[str], media: str) -> None:
    headers = CIMultiDict([("Accept", text) for text in accept])
    assert accepted_media(make_mocked_request("GET", "/", headers=headers)) == media
