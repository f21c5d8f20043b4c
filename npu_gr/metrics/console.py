"""The API console: one HTML text without data. It reads the OpenAPI document with the reader's key, and loads nothing.

Browsers may not call the public address from a page of the admin address, so for its routes the page makes the `curl`
call; those of its own address it sends.
"""

from __future__ import annotations

from importlib import resources


def console(endpoint: str, scheme: str, port: int) -> str:
    """Make the page.

    Args:
        endpoint: path of the OpenAPI document on the same server.
        scheme: http or https, of the public address.
        port: of the public address, which has the host of the page unless its reader says otherwise.
    """
    text = resources.files("npu_gr.metrics").joinpath("console.html").read_text()
    for name, value in (("endpoint", endpoint), ("scheme", scheme), ("port", str(port))):
        text = text.replace("{{" + name + "}}", value)
    return text
