"""What the user chose on the command line, made into a model, a critic and an agent."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caddie_sdk.budget import Budget
from caddie_sdk.endpoint import ChatEndpoint
from caddie_sdk.errors import ConfigError
from caddie_sdk.intervention import parse_protocol

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph

    from caddie_critics.checkpoint import PackSource
    from caddie_sdk.critic import Critic
    from caddie_sdk.tools import Tool

EMBEDDED = "embedded"
REPLY_TOKENS = 256
EMBEDDED_TEMPERATURE = 0.0


@dataclass(frozen=True)
class Choices:
    """The options of `caddie ask`; `caddie demo` fills them in itself."""

    model: str = EMBEDDED
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    critic: str = "self"
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
        budget = Budget(
            max_uses=wanted.max_uses,
            max_tokens=REPLY_TOKENS,
            timeout=wanted.timeout,
            max_steps=wanted.max_steps,
            min_steps=min(wanted.min_searches, wanted.max_steps),
        )
        return create_caddie_agent(
            self.model,
            tools,
            critic=self.critic,
            feedback=self.feedback,
            system=SYSTEM,
            examples=EXAMPLES if wanted.embedded and wanted.action_format == "caddie" else (),
            protocol=wanted.protocol,
            action_format=wanted.action_format,
            budget=budget,
            seed=wanted.seed,
        )


def cast(choices: Choices, stack: ExitStack) -> Cast:
    """Start or reach everyone who takes part; servers started here end with the stack.

    Raises:
        ConfigError, EndpointError, PackError, ServeError: with one line on what to mend.
    """
    parse_protocol(choices.protocol)  # a typo should not cost the start of a server
    model = _agent_model(choices)
    ready = Cast(choices, model)
    if choices.critic == "self":
        from caddie_critics import SelfCritic

        ready.feedback = SelfCritic(model, pack=choices.pack or "search", temperature=None, top_p=None)
    elif choices.critic not in ("off", "none"):
        ready.critic = _outside_critic(choices, stack)
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
    key = os.environ.get(choices.api_key_env)
    endpoint = ChatEndpoint(choices.base_url, name, api_key=key, params=params, grammar="auto")
    endpoint.check()
    return endpoint


def _embedded(choices: Choices) -> ChatEndpoint:
    from caddie_critics.serve import embedded_server

    temperature = EMBEDDED_TEMPERATURE if choices.temperature is None else choices.temperature
    params = {"temperature": temperature, "seed": choices.seed, "max_tokens": REPLY_TOKENS}
    return ChatEndpoint(params=params, **embedded_server().settings)


def _outside_critic(choices: Choices, stack: ExitStack) -> Critic:
    from caddie_critics import EndpointCritic

    ref = choices.critic
    pack: PackSource = choices.pack or "auto"
    if ref == EMBEDDED:
        from caddie_critics.serve import embedded_server

        url, pack = embedded_server().url, choices.pack or "search"
    elif ref.startswith(("http://", "https://")):
        url = ref
    elif Path(ref).exists():
        from caddie_critics.serve import serve

        served = stack.enter_context(serve(ref, pack=choices.pack, allow_mismatch=choices.allow_mismatch))
        url, pack = served.url, served.pack
    else:
        raise ConfigError(
            f"--critic {ref}: neither off, self, embedded, a URL that starts with http://, nor a checkpoint on disk"
        )
    temperature = 1.0 if choices.temperature is None else choices.temperature
    critic = EndpointCritic(
        url, pack=pack, seed=choices.seed, temperature=temperature, allow_mismatch=choices.allow_mismatch
    )
    critic.check()
    return critic
