"""The API console: one HTML text without data. It reads the OpenAPI document with the reader's key, and loads nothing.

Browsers may not call the public address from a page of the admin address, so for its routes the page makes the `curl`
call; those of its own address it sends.
"""

from __future__ import annotations

from importlib import resources


def console(endpoint: str) -> str:
    """Make the page; `endpoint` is the path of the OpenAPI document on the same server."""
    text = resources.files("npu_gr.metrics").joinpath("console.html").read_text()
    return text.replace("{{endpoint}}", endpoint)
