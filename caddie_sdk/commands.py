"""What a session asks of its shell, one command at a time, and what the shell hands back for tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from caddie_sdk.actions import Call
from caddie_sdk.critic import ConsultState
from caddie_sdk.errors import SessionError
from caddie_sdk.messages import Message, canonical, text_of

Reason = str
"""Why a trajectory ended: `answer`, `max_steps`, `malformed`, `stuck` (only refused consultations), or what
`stop()` was given (`context_overflow`, `error`, `cancelled`, ...)."""


class CallModel:
    """Ask the agent's model.

    Building a wire copy costs time in proportion to the history, and many commands are only looked at, so both
    large fields are made on first use.

    Attributes:
        messages: the history as the server wants it.
        tools: tool schemas to offer; empty in the text formats.
        tool_choice: `required` while no answer is accepted yet, `none` when only an answer is.
        grammar: GBNF of the allowed forms, for servers that take one.
    """

    def __init__(
        self,
        messages: list[dict[str, Any]] | Callable[[], list[dict[str, Any]]],
        tools: list[dict[str, Any]] | None = None,
        tool_choice: Literal["auto", "none", "required"] = "auto",
        grammar: str | Callable[[], str] | None = None,
    ) -> None:
        self._messages, self._grammar = messages, grammar
        self.tools = tools or []
        self.tool_choice = tool_choice

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history as the server wants it."""
        if callable(self._messages):
            self._messages = self._messages()
        return self._messages

    @property
    def grammar(self) -> str | None:
        """GBNF of the allowed forms."""
        return self._grammar() if callable(self._grammar) else self._grammar

    def _key(self) -> tuple[Any, ...]:
        return self.messages, self.tools, self.tool_choice, self.grammar

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallModel) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        names = [tool["function"]["name"] for tool in self.tools]
        return f"CallModel({len(self.messages)} messages, tools={names}, tool_choice={self.tool_choice!r})"


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
