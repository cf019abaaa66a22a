"""What the user chose on the command line, made into a model, a critic and an agent."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caddie_sdk.actions import action_format
from caddie_sdk.budget import Budget
from caddie_sdk.cli.terminal import tell
from caddie_sdk.endpoint import ChatEndpoint
from caddie_sdk.errors import ConfigError
from caddie_sdk.intervention import parse_protocol

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph

    from caddie_critics.checkpoint import PackSource
    from caddie_sdk.critic import Critic
    from caddie_sdk.tools import Tool

EMBEDDED = "embedded"
DEFAULT_PACK = "search"
DEFAULT_KEY_ENV = "OPENAI_API_KEY"
REPLY_TOKENS = 256
EMBEDDED_TEMPERATURE = 0.0


@dataclass(frozen=True)
class Choices:
    """The options of `caddie ask`; `caddie demo` fills them in itself."""

    model: str = EMBEDDED
    base_url: str | None = None
    api_key_env: str = DEFAULT_KEY_ENV
    critic: str = "self"
    critic_key_env: str | None = None
    pack: str | None = None
    protocol: str = "self-call"
    format: str | None = None
    max_steps: int = 8
    min_searches: int = 1
    max_uses: int = 3
    timeout: float = 60.0
    temperature: float | None = None
    seed: int = 0
    allow_mismatch: bool = False

    @property
    def embedded(self) -> bool:
        """Whether the agent is the embedded model."""
        return self.model == EMBEDDED and self.base_url is None

    @property
    def action_format(self) -> str:
        """The action format asked for, or the one that suits the model."""
        return self.format or ("caddie" if self.embedded else "tool-calls")

    @property
    def budget(self) -> Budget:
        """The limits asked for.

        Raises:
            ConfigError: one is impossible.
        """
        return Budget(
            max_uses=self.max_uses,
            max_tokens=REPLY_TOKENS,
            timeout=self.timeout,
            max_steps=self.max_steps,
            min_steps=min(self.min_searches, self.max_steps),
        )

    def check(self) -> None:
        """Make sure of what can be told without starting anything: a typo should not cost the start of a server.

        Raises:
            ConfigError: with one line on what to mend.
        """
        parse_protocol(self.protocol)
        action_format(self.action_format)
        _ = self.budget
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature must be 0 or more, not {self.temperature:g}")


@dataclass
class Cast:
    """Who takes part: the agent's model, and the critic behind each control tool."""

    choices: Choices
    model: ChatEndpoint
    critic: Critic | None = None
    feedback: Critic | None = None

    def agent(self, tools: list[Tool]) -> CompiledStateGraph[Any, Any, Any, Any]:
        """The LangGraph agent for one search question."""
        from caddie_evals.search_qa import EXAMPLES, SYSTEM
        from caddie_sdk.shells.graph import create_caddie_agent

        wanted = self.choices
        return create_caddie_agent(
            self.model,
            tools,
            critic=self.critic,
            feedback=self.feedback,
            system=SYSTEM,
            examples=EXAMPLES if wanted.embedded and wanted.action_format == "caddie" else (),
            protocol=wanted.protocol,
            action_format=wanted.action_format,
            budget=wanted.budget,
            seed=wanted.seed,
        )


def cast(choices: Choices, stack: ExitStack) -> Cast:
    """Start or reach everyone who takes part; servers started here end with the stack.

    Raises:
        ConfigError, EndpointError, PackError, ServeError: with one line on what to mend.
    """
    choices.check()
    if choices.embedded and choices.action_format == "tool-calls":
        tell("note: the embedded model knows no function calling, so it will hardly act; --format caddie suits it")
    model = _agent_model(choices)
    ready = Cast(choices, model)
    if choices.critic == "self":
        from caddie_critics import SelfCritic

        ready.feedback = SelfCritic(model, pack=choices.pack or DEFAULT_PACK, temperature=None, top_p=None)
    elif choices.critic not in ("off", "none"):
        ready.critic = outside_critic(choices, stack)
    return ready


def _agent_model(choices: Choices) -> ChatEndpoint:
    if choices.model == EMBEDDED and choices.base_url is None:
        return _embedded(choices)
    if choices.base_url is None:
        raise ConfigError(f"--model {choices.model} needs --base-url, the server it is served at")
    params: dict[str, Any] = {"seed": choices.seed}
    if choices.temperature is not None:
        params["temperature"] = choices.temperature
    name = None if choices.model == EMBEDDED else choices.model
    key = _key("--api-key-env", choices.api_key_env)
    endpoint = ChatEndpoint(choices.base_url, name, api_key=key, params=params, grammar="auto")
    endpoint.check()
    return endpoint


def _key(option: str, variable: str | None) -> str | None:
    key = os.environ.get(variable) if variable else None
    if variable and key is None and variable != DEFAULT_KEY_ENV:
        raise ConfigError(f"{option} {variable}: there is no such environment variable")
    return key


def _embedded(choices: Choices) -> ChatEndpoint:
    from caddie_critics.serve import embedded_server

    temperature = EMBEDDED_TEMPERATURE if choices.temperature is None else choices.temperature
    params = {"temperature": temperature, "seed": choices.seed, "max_tokens": REPLY_TOKENS}
    return ChatEndpoint(params=params, **embedded_server().settings)


def outside_critic(choices: Choices, stack: ExitStack) -> Critic:
    """The critic that `choices.critic` names: a served one, a checkpoint to serve, or the embedded model.

    Raises:
        ConfigError, EndpointError, PackError, ServeError: with one line on what to mend.
    """
    from caddie_critics import EndpointCritic
    from caddie_critics.checkpoint import parse_served_id

    url, pack = _critic_server(choices, stack)
    settings: dict[str, Any] = {
        "api_key": _key("--critic-key-env", choices.critic_key_env),
        "seed": choices.seed,
        "temperature": 1.0 if choices.temperature is None else choices.temperature,
        "allow_mismatch": choices.allow_mismatch,
    }
    critic = EndpointCritic(url, pack=pack, **settings)
    model = critic.check().model
    if pack == "auto" and parse_served_id(model) is None:  # it was trained with no pack
        critic = EndpointCritic(url, model=model, pack=DEFAULT_PACK, **settings)
    return critic


def _critic_server(choices: Choices, stack: ExitStack) -> tuple[str, PackSource]:
    """Where the critic is served, and the pack to ask it with; `auto` leaves that to the server."""
    ref = choices.critic
    if ref == EMBEDDED:
        from caddie_critics.serve import embedded_server

        return embedded_server().url, choices.pack or DEFAULT_PACK
    if ref.startswith(("http://", "https://")):
        return ref, choices.pack or "auto"
    if ref and Path(ref).exists():
        from caddie_critics.serve import serve

        served = stack.enter_context(serve(ref, pack=choices.pack, allow_mismatch=choices.allow_mismatch))
        return served.url, served.pack
    raise ConfigError(
        f"--critic {ref}: neither off, self, embedded, a URL that starts with http://, nor a checkpoint on disk"
    )
