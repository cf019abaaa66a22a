"""The agent: the shop's policy, its tools, and a critic before what cannot be undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from langgraph.graph.state import CompiledStateGraph

from caddie_sdk import Budget, Guarded, create_caddie_agent
from caddie_sdk.critic import Critic
from caddie_sdk.model import ChatModel
from examples.support_bot.tools import IRREVERSIBLE

POLICY = (Path(__file__).parent / "policy.md").read_text("utf-8")
MAX_STEPS = 20
CRITIC_SECONDS = 20.0


def create_support_agent(
    model: ChatModel,
    tools: Sequence[Callable[..., Any]],
    *,
    critic: Critic | None = None,
    checkpointer: Any = None,
    policy: str = POLICY,
    irreversible: Sequence[str] = IRREVERSIBLE,
    critic_seconds: float = CRITIC_SECONDS,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """A support agent as a LangGraph graph.

    Args:
        model: answers the customer.
        tools: what it can do; yours, or `shop_tools`.
        critic: consulted before each irreversible tool and whenever the model asks; None works without.
        checkpointer: keeps the threads.
        policy: the system prompt.
        irreversible: names of the tools that wait for advice.
        critic_seconds: after so long the agent goes on without advice.

    Raises:
        ConfigError: a setting is wrong; the message says which.
    """
    return create_caddie_agent(
        model,
        tools,
        critic=critic,
        system=policy,
        protocol=Guarded(irreversible=tuple(irreversible)),
        budget=Budget(max_steps=MAX_STEPS, timeout=critic_seconds),
        checkpointer=checkpointer,
        name="support",
    )
