"""The socket of a server; imports no torch, so that an address in use is reported at once."""

from __future__ import annotations

import socket

from outpace.core import OutpaceError

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        OutpaceError: the address is not available.
    """
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
        )
    except (OSError, OverflowError) as error:
        raise OutpaceError(
            f"cannot listen on {host}:{port}: {error}; choose another --port or --host"
        ) from error
