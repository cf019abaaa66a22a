"""How the commands that serve HTTP take their port, announce themselves and end.

Needs uvicorn: import it where a missing one can be told with the extra that brings it.
"""

from __future__ import annotations

import signal
import socket
from typing import Any

import uvicorn

from caddie_sdk.cli.terminal import tell
from caddie_sdk.errors import ServeError

_BACKLOG = 1024


def claim(host: str, port: int) -> socket.socket:
    """Take an address, before slow work whose result nobody could then reach; `run` opens it to callers.

    Args:
        host: anything but a loopback address gets a warning on standard error.
        port: 0 takes a free one.

    Raises:
        ServeError: the address is taken, or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol spelled out asyncio turns Nagle's algorithm off; it would cost 40 ms an answer.
    claimed = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        claimed.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        claimed.bind((host, port))
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a host name
        claimed.close()
        raise _taken(f"{host}:{port}", error) from error
    if not host.startswith("127.") and host not in ("localhost", "::1"):
        tell(f"warning: {host} is open to the network, and this server asks nobody who they are")
    return claimed


def run(app: Any, claimed: socket.socket, *, path: str = "", drain: int | None = None) -> None:
    """Serve an ASGI application until SIGINT or SIGTERM; prints its URL, a line on standard output, when it is ready.

    Args:
        claimed: from `claim`.
        path: ends the URL that is printed.
        drain: seconds that requests under way may still take then; None waits for them.

    Raises:
        ServeError: another server has opened the address meanwhile.
    """
    host, port = claimed.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    try:
        claimed.listen(_BACKLOG)
    except OSError as error:
        raise _taken(f"{shown}:{port}", error) from error
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain,
        server_header=False,
        backlog=_BACKLOG,
    )
    server = _Announcing(config, f"http://{shown}:{port}{path}")

    def leave(number: int, frame: Any) -> None:
        server.should_exit = True

    # uvicorn raises the signal again once it has drained; by default that would kill us before what the caller holds
    # open, such as a critic's server, is closed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    server.run(sockets=[claimed])


def _taken(address: str, error: OSError | UnicodeError) -> ServeError:
    problem = getattr(error, "strerror", None) or error
    return ServeError(f"cannot listen on {address}: {problem}; choose another --port, or another --host")


class _Announcing(uvicorn.Server):
    """Prints its URL when it is ready, for whoever started it with port 0."""

    def __init__(self, config: uvicorn.Config, url: str) -> None:
        super().__init__(config)
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._url, flush=True)
