"""The listening socket, bound before anything is loaded: a taken port is known at once, and by whom."""

from __future__ import annotations

import errno
import os
import socket

import psutil

from edgeserve.errors import UsageError

_NUM_TRIED_PORTS = 100


class PortTakenError(UsageError):
    """Another program listens there; the message names it where the system tells, the hint a free port."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes any free one. Raises UsageError, or PortTakenError."""
    family, address = _resolve(host, port)
    try:
        return _bind(family, address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(host, port) from None
        raise UsageError(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from None


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError, OverflowError):
        raise UsageError(f"{host} is not an address of this machine.") from None
    # "localhost" may mean both families; most clients try IPv4 first or only.
    family, _, _, _, address = min(found, key=lambda item: item[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


def _bind(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    # asyncio switches Nagle's algorithm off only on sockets that say they are TCP. With it, whatever follows
    # a first small write waits for the client's delayed acknowledgement: 40 ms for every answer and token.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            # On Windows it would let two servers share the port; here it skips the wait after a restart.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Without listening, a second socket could be bound to the same port.
        sock.listen(socket.SOMAXCONN)
    except OSError:
        sock.close()
        raise
    return sock


def _taken(host: str, port: int) -> PortTakenError:
    free = next((other for other in range(port + 1, port + _NUM_TRIED_PORTS) if _is_free(host, other)), None)
    hint = f"Stop it, or use --port {free}, which is free." if free else "Use another --port."
    return PortTakenError(f"Port {port} on {host} is taken by {occupant(port)}.", hint)


def _is_free(host: str, port: int) -> bool:
    if port > 65535:
        return False
    try:
        _bind(*_resolve(host, port)).close()
    except OSError:
        return False
    return True


def occupant(port: int) -> str:
    """The program that listens on a port, as far as the system says."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and _port(connection.laddr) == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return "another program"


def _port(address: object) -> int | None:
    """An address without a peer or a name is an empty tuple."""
    port = getattr(address, "port", None)
    return port if isinstance(port, int) else None
