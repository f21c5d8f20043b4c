"""Python client, without torch: `Client` for threads, `AsyncClient` for coroutines.

See docs/client.md.
"""

from npu_gr.client.async_client import AsyncClient
from npu_gr.client.blocking import Client, RelayCall
from npu_gr.client.relay import AsyncRelayCall
from npu_gr.client.wire import Behaviours, Features, FoundItems, Item, Ranked
from npu_gr.core.tls import ClientTlsConfig

__all__ = [
    "AsyncClient",
    "AsyncRelayCall",
    "Behaviours",
    "Client",
    "ClientTlsConfig",
    "Features",
    "FoundItems",
    "Item",
    "Ranked",
    "RelayCall",
]
