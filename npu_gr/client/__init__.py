"""Call a service from Python, without torch: `Client` for threads, `AsyncClient` for coroutines. docs/client.md."""

from npu_gr.access.tls import ClientTlsConfig
from npu_gr.client.answers import Found, Item, Ranked
from npu_gr.client.async_client import AsyncClient
from npu_gr.client.blocking import Client, Relay
from npu_gr.client.columns import History
from npu_gr.client.relay import AsyncRelay

__all__ = ["AsyncClient", "AsyncRelay", "Client", "ClientTlsConfig", "Found", "History", "Item", "Ranked", "Relay"]
