"""What a page of another site can make a browser send is rejected.

What is no browser, and our own page, is not.
"""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from npu_gr.core.errors import Forbidden
from npu_gr.server.auth.rules import is_loopback_name, reject_foreign_pages


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "127.0.0.1:8081"},
        {"Host": "localhost:8081"},
        {"Host": "[::1]:8081"},
        {"Host": "127.9.9.9"},
        {
            "Host": "localhost:8081",
            "Origin": "http://localhost:8081",
            "Sec-Fetch-Site": "same-origin",
        },
        {"Host": "localhost:8081", "sec-fetch-site": "none"},
    ],
)
def test_no_page_of_another_site(headers: dict[str, str]) -> None:
    reject_foreign_pages(CIMultiDict(headers), is_loopback=True)


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"Host": "localhost:8081", "Origin": "https://evil.example"}, "Origin"),
        ({"Host": "localhost:8081", "Origin": "null"}, "Origin"),
        # another program's page
        ({"Host": "localhost:8081", "Origin": "http://localhost:3000"}, "Origin"),
        ({"Host": "localhost:8081", "Origin": "http://[::1"}, "Origin"),
        ({"Host": "localhost:8081", "Origin": ""}, "Origin"),
        ({"Host": "localhost:8081", "sec-fetch-site": "cross-site"}, "Sec-Fetch-Site"),
        ({"Host": "localhost:8081", "Sec-Fetch-Site": "same-site"}, "Sec-Fetch-Site"),
        ({"Host": "evil.example"}, "Host"),
        # DNS rebinding
        ({"Host": "evil.example:8081", "Origin": "http://evil.example:8081"}, "Host"),
        ({"Host": "127.0.0.1.evil.example"}, "Host"),
        ({"Host": "[::1].evil.example:8081"}, "Host"),
        ({"Host": "localhost.evil.example:8081"}, "Host"),
    ],
)
def test_a_page_of_another_site(headers: dict[str, str], named: str) -> None:
    with pytest.raises(Forbidden, match=f"^{named}: "):
        reject_foreign_pages(CIMultiDict(headers), is_loopback=True)


def test_any_name_may_mean_a_public_address() -> None:
    reject_foreign_pages({"Host": "rank.shop.example"}, is_loopback=False)


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST.", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_names(name: str) -> None:
    assert is_loopback_name(name)


@pytest.mark.parametrize(
    "name", ["", "0.0.0.0", "10.0.0.1", "::", "evil.localhost.example", "127.1"]
)
def test_other_names(name: str) -> None:
    assert not is_loopback_name(name)
