"""Addresses and sockets that the server listens on."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address

from paged_kv.arguments import shown
from paged_kv.errors import ContractError

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to the addresses of `host`, all to one port, which is then taken; they do not listen yet.

    Raises:
        ContractError: another program has the port, or this user may not, or `host` is no address of this machine.
    """
    if not 0 <= port <= 65535:
        raise ContractError(f"--port: expected 0 to 65535, got {shown(port)}")
    bound: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, kind, protocol, _, address in dict.fromkeys(
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ):
            opened = None
            try:
                opened = socket.socket(family, kind, protocol)
                if family == socket.AF_INET6:
                    opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                _bind(opened, (address[0], bound[0].getsockname()[1] if bound else port, *address[2:]))
                bound.append(opened)
            except OSError as error:
                if opened is not None:
                    opened.close()
                if error.errno not in _NOT_HERE:
                    raise
                missing = error  # as ::1 of localhost, where there is no IPv6
        if missing is not None and not bound:
            raise missing
    except OSError as error:
        for opened in bound:
            opened.close()
        raise ContractError(f"--host {host} --port {port}: {error.strerror or error}") from error
    return bound


def url_of(host: str, port: int) -> str:
    """Return how a program on this machine reaches the server."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether every address of `host` is reached from this machine alone; False where it has none."""
    try:
        addresses = {str(address[0]) for *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def _bind(opened: socket.socket, address: tuple[object, ...]) -> None:
    """Bind without SO_REUSEADDR: with it another program could bind the port too until this one listens."""
    try:
        opened.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # Connections of a server that has ended may still time out; with this option both have the port.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
