"""The listening sockets of front workers: at each address one for each worker, all held by the supervisor.

The kernel spreads connections over them (SO_REUSEPORT), each with a queue of its own. What is in the queue of a worker
that died waits for the next one: the socket is the supervisor's as well, so nothing is reset.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from npu_gr.core.errors import ConfigError
from npu_gr.server.config import ServerConfig

Addresses = list[list[socket.socket]]  # the sockets of one worker: for each address that it listens at


def bind(config: ServerConfig, num_workers: int) -> list[Addresses]:
    """Bind the sockets of every worker: callers' address first, then the operators', or one for both.

    Args:
        config: names the addresses. A port of 0 is any free one, the same for all workers.
        num_workers: so many.

    Raises:
        ConfigError: an address cannot be bound, or another process is there.
    """
    places = [("", config.host, config.port)]
    if not config.has_one_address:
        places.append(("admin_", config.admin_host, config.admin_port))
    by_place = []
    for field, host, port in places:
        try:
            by_place.append(_bind(host, port, num_workers))
        except OSError as error:
            for one in (sock for place in by_place for group in place for sock in group):
                one.close()
            raise ConfigError(
                f"server.{field}host, server.{field}port: cannot listen on {host}:{port}: {error}"
            ) from error
    return [[place[number] for place in by_place] for number in range(num_workers)]


def hold(config: ServerConfig) -> list[socket.socket]:
    """Bind the port of gRPC, where no other process may be: the workers' servers open it themselves, and share it.

    Raises:
        ConfigError: it cannot be bound, or another process is there.
    """
    if config.grpc_port is None:
        return []
    try:
        return _bind(config.host, config.grpc_port, 1)[0]
    except OSError as error:
        where = f"{config.host}:{config.grpc_port}"
        raise ConfigError(f"server.host, server.grpc_port: cannot listen on {where}: {error}") from error


def _bind(host: str, port: int, num_workers: int) -> list[list[socket.socket]]:
    """Bind for each worker one socket at each address that a host has."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = list(dict.fromkeys((family, address[:2]) for family, _, _, _, address in found))
    made: list[list[socket.socket]] = [[] for _ in range(num_workers)]
    try:
        for family, address in addresses:
            # without SO_REUSEPORT: whoever is there already would else share its connections with us, unasked
            with _open(family) as probe:
                probe.bind(address)
                chosen = (address[0], probe.getsockname()[1])
            for sockets in made:
                sockets.append(one := _open(family))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                one.bind(chosen)
    except OSError:
        close(made)
        raise
    return made


def _open(family: int) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    one.setblocking(False)
    return one


def close(groups: Sequence[Sequence[socket.socket]]) -> None:
    """Close sockets."""
    for group in groups:
        for one in group:
            one.close()
