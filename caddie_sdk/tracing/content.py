"""Messages in the form in which the GenAI conventions record them: a role and typed parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from caddie_sdk.errors import MessageError
from caddie_sdk.messages import canonical, parse_arguments, text_of


def input_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a model is asked."""
    return [{"role": message.get("role"), "parts": _parts(message)} for message in messages]


def output_message(message: Any, *, truncated: bool = False, finish_reasons: Sequence[str] = ()) -> dict[str, Any]:
    """What a model answered, in any form that `messages.canonical` reads, with the reason why it ended."""
    try:
        reply: Mapping[str, Any] = canonical(message)
    except MessageError:
        reply = {"role": "assistant", "content": ""}
    reason = finish_reasons[0] if finish_reasons else "length" if truncated else None
    if reason is None:
        reason = "tool_call" if reply.get("tool_calls") else "stop"
    return {"role": "assistant", "parts": _parts(reply), "finish_reason": reason}


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if message.get("role") == "tool":
        return [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}]
    parts: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    if text := text_of({"role": message.get("role"), "content": content or ""}):
        parts.append({"type": "text", "content": text})
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        raw = function.get("arguments") or ""
        arguments = parse_arguments(raw)
        told = raw if arguments is None else arguments
        parts.append({"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": told})
    return parts
