"""`caddie proxy`: start the proxy and run it until it is told to stop."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from caddie_sdk.budget import Budget
from caddie_sdk.cli.choices import Choices, outside_critic
from caddie_sdk.config import CALL_CRITIC
from caddie_sdk.errors import ConfigError, MissingExtra


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
        from caddie_sdk.cli.serving import claim, run
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
        run(app, claim(choices.host, choices.port), path="/v1", drain=choices.drain)
