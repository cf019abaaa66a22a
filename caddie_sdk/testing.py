"""Fakes for users' own tests: a scripted model, a scripted critic, and a check of wire histories.

No network, no clock, no randomness: what goes in is what comes out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from caddie_sdk.commands import CallModel
from caddie_sdk.critic import ConsultState
from caddie_sdk.critique import Critique
from caddie_sdk.messages import Message, canonical, parse_arguments
from caddie_sdk.model import Reply
from caddie_sdk.usage import Usage

Scripted = str | Mapping[str, Any] | BaseException


def tool_call(name: str, arguments: Mapping[str, Any] | str | None = None, id: str = "") -> dict[str, Any]:
    """One tool call in OpenAI form. A string is sent as it is, to play a model that writes bad JSON."""
    text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments or {}))
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def calls(*tool_calls: Mapping[str, Any], text: str = "") -> dict[str, Any]:
    """An assistant message with tool calls."""
    return {"role": "assistant", "content": text, "tool_calls": [dict(call) for call in tool_calls]}


class ScriptedModel:
    """A model that says what it is told to say, in order.

    Args:
        replies: texts, assistant messages, or exceptions to raise; or a function of the call.
        usage: what each call is said to cost.

    Attributes:
        seen: the calls so far, for assertions.
    """

    def __init__(
        self, replies: Iterable[Scripted] | Callable[[CallModel], Scripted], usage: Usage | None = None
    ) -> None:
        self._next = replies if callable(replies) else _from_list(list(replies), "ScriptedModel")
        self._usage = usage or Usage(prompt_tokens=10, completion_tokens=5, calls=1)
        self.seen: list[CallModel] = []

    def complete(self, call: CallModel) -> Reply:
        """The next reply of the script."""
        self.seen.append(call)
        said = self._next(call)
        if isinstance(said, BaseException):
            raise said
        message: Message = canonical({"role": "assistant", "content": said} if isinstance(said, str) else said)
        return Reply(message, self._usage, "scripted")

    async def acomplete(self, call: CallModel) -> Reply:
        """The next reply of the script."""
        return self.complete(call)


class ScriptedCritic:
    """A critic that gives prepared critiques, in order.

    Args:
        critiques: (analysis, advice) pairs, ready `Critique`s, or exceptions to raise; or a function of the
            state.

    Attributes:
        seen: the states so far, for assertions.
    """

    def __init__(
        self,
        critiques: Iterable[tuple[str, str] | Critique | BaseException]
        | Callable[[ConsultState], tuple[str, str] | Critique | BaseException],
    ) -> None:
        self._next = critiques if callable(critiques) else _from_list(list(critiques), "ScriptedCritic")
        self.seen: list[ConsultState] = []

    def critique(self, state: ConsultState) -> Critique:
        """The next critique of the script."""
        self.seen.append(state)
        said = self._next(state)
        if isinstance(said, BaseException):
            raise said
        if isinstance(said, Critique):
            return said
        analysis, advice = said
        return Critique(analysis, advice, raw=f"Analysis: {analysis}\nAdvices for next steps: {advice}")

    async def acritique(self, state: ConsultState) -> Critique:
        """The next critique of the script."""
        return self.critique(state)


def _from_list(items: Sequence[Any], who: str) -> Callable[[Any], Any]:
    rest = iter(items)

    def take(_: Any) -> Any:
        try:
            return next(rest)
        except StopIteration:
            raise AssertionError(f"{who}: the script of {len(items)} entries is used up") from None

    return take


def check_wire(messages: Sequence[Mapping[str, Any]], *, alternating: bool = False) -> None:
    """Check a wire history the way the strictest OpenAI-compatible servers do.

    Args:
        messages: the `messages` of a chat-completions request.
        alternating: also demand that no two user messages follow each other.

    Raises:
        AssertionError: with the rule that is broken and where.
    """
    json.dumps(list(messages), allow_nan=False, ensure_ascii=False).encode("utf-8")
    waiting: list[str] = []
    known: set[str] = set()
    for index, message in enumerate(messages):
        where, role = f"message {index} ({message.get('role')})", message.get("role")
        assert role in ("system", "user", "assistant", "tool"), f"{where}: unknown role"
        assert role != "system" or index == 0, f"{where}: a system message after the first"
        if role == "tool":
            assert waiting, f"{where}: a tool result that no call is waiting for"
            assert message.get("tool_call_id") == waiting.pop(0), f"{where}: results out of order"
            assert isinstance(message.get("content"), str), f"{where}: content is not text"
            continue
        assert not waiting, f"{where}: call {waiting[0]!r} has no result"
        if alternating and index and role == messages[index - 1].get("role") == "user":
            raise AssertionError(f"{where}: two user messages in a row")
        waiting = _check_calls(message, where, known)
    assert not waiting, f"the history ends with call {waiting[0]!r} unanswered" if waiting else ""
    assert not messages or messages[-1].get("role") != "assistant", "the history ends with the assistant's own turn"


def _check_calls(message: Mapping[str, Any], where: str, known: set[str]) -> list[str]:
    ids: list[str] = []
    if "tool_calls" in message:
        assert message["role"] == "assistant", f"{where}: tool calls outside an assistant message"
        assert message["tool_calls"], f"{where}: an empty list of tool calls"
    for call in message.get("tool_calls", ()):
        assert call["id"], f"{where}: an empty tool call id"
        assert call["id"] not in known, f"{where}: tool call id {call['id']!r} is used twice"
        known.add(call["id"])
        ids.append(call["id"])
        arguments = parse_arguments(call["function"]["arguments"])
        assert arguments is not None, f"{where}: arguments are not a JSON object"
    content = message.get("content")
    assert content or ids, f"{where}: neither content nor tool calls"
    return ids
