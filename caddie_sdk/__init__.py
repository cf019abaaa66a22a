"""Caddie: let any OpenAI-compatible agent consult a trained critic while it works.

    from caddie_sdk import create_caddie_agent
    from caddie_critics import EndpointCritic

    agent = create_caddie_agent(
        "qwen3-4b", [search], base_url="http://127.0.0.1:8000/v1", critic=EndpointCritic("http://127.0.0.1:8001/v1")
    )
    agent.invoke({"messages": "Who founded the observatory on the island where Ada Vance was born?"})["answer"]

Names are loaded on first use, so that importing the package costs neither langgraph nor openai.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caddie_sdk.budget import Budget as Budget
    from caddie_sdk.commands import CallModel as CallModel
    from caddie_sdk.commands import Command as Command
    from caddie_sdk.commands import Consult as Consult
    from caddie_sdk.commands import Finish as Finish
    from caddie_sdk.commands import Reject as Reject
    from caddie_sdk.commands import RunTools as RunTools
    from caddie_sdk.commands import ToolResult as ToolResult
    from caddie_sdk.config import SessionConfig as SessionConfig
    from caddie_sdk.critic import ConsultState as ConsultState
    from caddie_sdk.critic import Critic as Critic
    from caddie_sdk.critique import Critique as Critique
    from caddie_sdk.endpoint import ChatEndpoint as ChatEndpoint
    from caddie_sdk.errors import CaddieError as CaddieError
    from caddie_sdk.intervention import Guarded as Guarded
    from caddie_sdk.intervention import Never as Never
    from caddie_sdk.intervention import Probabilistic as Probabilistic
    from caddie_sdk.intervention import Scheduled as Scheduled
    from caddie_sdk.intervention import SelfCall as SelfCall
    from caddie_sdk.intervention import Windowed as Windowed
    from caddie_sdk.intervention import parse_protocol as parse_protocol
    from caddie_sdk.model import ChatModel as ChatModel
    from caddie_sdk.model import Reply as Reply
    from caddie_sdk.render import CriticPrompt as CriticPrompt
    from caddie_sdk.session import Session as Session
    from caddie_sdk.shells.graph import create_caddie_agent as create_caddie_agent
    from caddie_sdk.shells.loop import arun as arun
    from caddie_sdk.shells.loop import run as run
    from caddie_sdk.shells.middleware import CriticMiddleware as CriticMiddleware
    from caddie_sdk.shells.wrap import wrap as wrap
    from caddie_sdk.tools import Tool as Tool
    from caddie_sdk.tracing import TraceSink as TraceSink
    from caddie_sdk.usage import Usage as Usage

__version__ = "0.1.0"

_HOMES = {
    "Budget": "budget",
    "CallModel": "commands",
    "Command": "commands",
    "Consult": "commands",
    "Finish": "commands",
    "Reject": "commands",
    "RunTools": "commands",
    "ToolResult": "commands",
    "SessionConfig": "config",
    "ConsultState": "critic",
    "Critic": "critic",
    "Critique": "critique",
    "ChatEndpoint": "endpoint",
    "CaddieError": "errors",
    "Guarded": "intervention",
    "Never": "intervention",
    "Probabilistic": "intervention",
    "Scheduled": "intervention",
    "SelfCall": "intervention",
    "Windowed": "intervention",
    "parse_protocol": "intervention",
    "ChatModel": "model",
    "Reply": "model",
    "CriticPrompt": "render",
    "Session": "session",
    "create_caddie_agent": "shells.graph",
    "arun": "shells.loop",
    "run": "shells.loop",
    "CriticMiddleware": "shells.middleware",
    "wrap": "shells.wrap",
    "Tool": "tools",
    "TraceSink": "tracing",
    "Usage": "usage",
}

__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605 - the names are those of the table above


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'caddie_sdk' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"caddie_sdk.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
