"""`caddie mcp`: run the MCP server, over standard input and output or over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from caddie_sdk.budget import Budget
from caddie_sdk.cli.choices import Choices, outside_critic
from caddie_sdk.cli.terminal import tell
from caddie_sdk.critic import ConsultState, Critic
from caddie_sdk.critique import Critique
from caddie_sdk.errors import ConfigError, EndpointError, EndpointRefused, MissingExtra

TRANSPORTS = ("stdio", "http")


@dataclass(frozen=True)
class McpChoices:
    """The options of `caddie mcp` beside those of its critic."""

    proxy: str | None = None
    proxy_key_env: str | None = None
    transport: str = "stdio"
    host: str = "127.0.0.1"
    port: int = 0
    max_uses: int = 3
    max_tokens: int = 512
    timeout: float = 60.0
    max_body_mb: int = 4


def run_mcp(choices: McpChoices, critic: Choices) -> None:
    """Serve until the client closes standard input, or until SIGINT or SIGTERM.

    Raises:
        ConfigError, EndpointError, PackError, ServeError: with one line on what to mend.
    """
    from caddie_sdk.shells.mcp import make_server

    if choices.transport not in TRANSPORTS:
        raise ConfigError(f"--transport {choices.transport}: choose one of {', '.join(TRANSPORTS)}")
    if critic.critic == "self":
        raise ConfigError("--critic self: the critic needs a server of its own; give its URL, or off with --proxy")
    # Standard output belongs to the protocol.
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    budget = Budget(max_uses=choices.max_uses, max_tokens=choices.max_tokens, timeout=choices.timeout)
    key = os.environ.get(choices.proxy_key_env) if choices.proxy_key_env else None
    if choices.proxy_key_env and key is None:
        raise ConfigError(f"--proxy-key-env {choices.proxy_key_env}: there is no such environment variable")
    limit = choices.max_body_mb * 2**20
    with ExitStack() as stack:
        asked = None if critic.critic in ("off", "none") else _critic(critic, stack)
        server = make_server(asked, budget=budget, proxy=choices.proxy, api_key=key, max_bytes=limit)
        if choices.transport == "stdio":
            server.run("stdio")
        else:
            _serve(server, choices, limit)


def _serve(server: Any, choices: McpChoices, limit: int) -> None:
    try:
        from caddie_sdk.cli.serving import claim, run
    except ImportError as error:
        raise MissingExtra("--transport http", "mcp") from error
    # Every call carries all it is about, so that nothing has to be kept for a client between two of them.
    app = server.streamable_http_app(
        host=choices.host, stateless_http=True, json_response=True, max_request_body_size=limit + 2**16
    )
    run(app, claim(choices.host, choices.port), path="/mcp")


def _critic(choices: Choices, stack: ExitStack) -> Critic:
    """The critic, or one that is looked for again at each call while its server is down."""
    try:
        return outside_critic(choices, stack)
    except EndpointRefused:
        raise
    except EndpointError as error:
        tell(f"caddie: {error}; calls are answered with status unavailable until it is there")
        return _Later(choices, stack)


class _Later:
    """A critic whose server was not there at the start."""

    def __init__(self, choices: Choices, stack: ExitStack) -> None:
        self._choices, self._stack = choices, stack
        self._found: Critic | None = None
        self._looking = asyncio.Lock()

    def critique(self, state: ConsultState) -> Critique:
        """Blocking twin of `acritique`."""
        return asyncio.run(self.acritique(state))

    async def acritique(self, state: ConsultState) -> Critique:
        """Look for the server; ask it when it is there."""
        try:
            async with self._looking:
                if self._found is None:
                    self._found = await asyncio.to_thread(outside_critic, self._choices, self._stack)
        except EndpointError as error:
            return Critique(status="unavailable", detail=str(error))
        return await self._found.acritique(state)
