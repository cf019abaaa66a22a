"""`caddie proxy`: start the proxy and run it until it is told to stop."""

from __future__ import annotations

import logging
import signal
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caddie_sdk.budget import Budget
from caddie_sdk.cli.choices import Choices, outside_critic
from caddie_sdk.cli.terminal import tell
from caddie_sdk.config import CALL_CRITIC
from caddie_sdk.errors import ConfigError, MissingExtra, ServeError


@dataclass(frozen=True)
class ProxyChoices:
    """The options of `caddie proxy` beside those of its critic."""

    upstream: str
    host: str
    port: int
    protocol: str
    max_uses: int
    max_tokens: int
    timeout: float
    ledger: Path | None
    advice: bool
    traces: Path | None
    max_body_mb: int
    idle: float
    total: float
    drain: int


def run_proxy(choices: ProxyChoices, critic: Choices) -> None:
    """Serve until SIGINT or SIGTERM; streams under way are let finish.

    Raises:
        ConfigError, EndpointError, PackError, ServeError: with one line on what to mend.
    """
    try:
        import uvicorn

        from caddie_sdk.shells.proxy import Limits, create_app
    except ImportError as error:
        raise error if isinstance(error, MissingExtra) else MissingExtra("the proxy", "proxy") from error
    from caddie_sdk.shells.wrap import make_relay

    if critic.critic == "self":
        raise ConfigError("--critic self: the proxy's critic needs a server of its own; give its URL, or off")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    with ExitStack() as stack:
        critics = {} if critic.critic in ("off", "none") else {CALL_CRITIC: outside_critic(critic, stack)}
        budget = Budget(max_uses=choices.max_uses, max_tokens=choices.max_tokens, timeout=choices.timeout)
        relay = make_relay(
            critics,
            protocol=choices.protocol,
            budget=budget,
            ledger=choices.ledger,
            advice=choices.advice,
            traces=choices.traces,
        )
        limits = Limits(choices.max_body_mb * 2**20, idle=choices.idle, total=choices.total)
        app = create_app(choices.upstream, critics, relay, limits=limits, on_shutdown=relay.close)
        listening = _listen(choices.host, choices.port)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=choices.drain, server_header=False
        )
        server = _announcing(config, listening)

        def leave(number: int, frame: Any) -> None:
            server.should_exit = True

        # uvicorn raises the signal again once it has drained; by default that would kill us before the critic's server
        # is stopped.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)
        server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol spelled out asyncio turns Nagle's algorithm off; it would cost 40 ms an answer.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        raise ServeError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from error
    if not host.startswith("127.") and host not in ("localhost", "::1"):
        tell(f"warning: {host} is open to the network, and the proxy asks nobody who they are")
    return listening


def _announcing(config: Any, listening: socket.socket) -> Any:
    """A server that prints its URL when it is ready, for whoever started it with port 0."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = listening.getsockname()[:2]
            print(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)

    return Server(config)
