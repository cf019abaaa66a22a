"""What a session asks of its shell, one command at a time, and what the shell hands back for tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from caddie_sdk.actions import Call
from caddie_sdk.critic import ConsultState
from caddie_sdk.errors import SessionError
from caddie_sdk.messages import Message, canonical, text_of

Reason = str
"""Why a trajectory ended: `answer`, `max_steps`, `malformed`, `stuck` (only refused consultations), or what
`stop()` was given (`context_overflow`, `error`, `cancelled`, ...)."""


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask the agent's model. `messages` and `tools` are the wire copies; `grammar` is for servers that take one."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    tool_choice: Literal["auto", "none", "required"] = "auto"
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class RunTools:
    """Run these calls; answer each id once. `message` is the agent's turn without the control tools."""

    calls: tuple[Call, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class Consult:
    """Ask the critic that stands behind `state.control`."""

    state: ConsultState


@dataclass(frozen=True, slots=True)
class Finish:
    """The trajectory is over. `answer` is the best one so far, None when there was none at all."""

    answer: str | None
    reason: Reason


@dataclass(frozen=True, slots=True)
class Reject:
    """The reply was no legal action. The agent has been told `observation`; go on with `proceed()`."""

    observation: str


Command = CallModel | RunTools | Consult | Finish | Reject


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The observation of one call."""

    id: str
    content: str
    is_error: bool = False

    @classmethod
    def read(cls, item: ToolResult | Mapping[str, Any]) -> ToolResult:
        """From a mapping with `id` (or `tool_call_id`), `content` and optionally `is_error`.

        Raises:
            SessionError: there is no id.
        """
        if isinstance(item, ToolResult):
            return item
        call_id = item.get("id") or item.get("tool_call_id")
        if not isinstance(call_id, str):
            raise SessionError("a tool result needs the 'id' of its call")
        content = text_of(canonical({"role": "tool", "content": item.get("content")}))
        return cls(call_id, content, bool(item.get("is_error")))
