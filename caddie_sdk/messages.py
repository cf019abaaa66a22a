"""Chat messages: one canonical form inside, and a wire copy for the server at hand.

The canonical form is what a session stores and never rewrites. What a particular server needs (strict
role alternation, no `reasoning_content`, no `strict` flag) is applied to a copy by `wire()`, steered by a
`Profile` (SPEC §4, rules 1 and 3).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Required, TypedDict, cast

from caddie_sdk.errors import ConfigError, MessageError

Role = Literal["system", "user", "assistant", "tool"]


class FunctionCall(TypedDict):
    """Name and raw JSON text of the arguments, as the model wrote them."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call of an assistant message, in OpenAI form."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict, total=False):
    """A chat message in canonical form. Plain JSON."""

    role: Required[Role]
    content: Required[str | list[dict[str, Any]]]
    tool_calls: list[ToolCall]
    tool_call_id: str
    reasoning_content: str


_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def clean(text: str) -> str:
    """Replace lone surrogates, which no UTF-8 encoder accepts, by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text


def canonical(message: Any) -> Message:
    """Bring a chat message into canonical form.

    Accepts a mapping in OpenAI form or an object with `model_dump()` (the openai client's own types).
    `developer` becomes `system`; a list of text parts becomes one string; `None` content becomes "";
    `reasoning` becomes `reasoning_content`; keys without meaning for a conversation are dropped.

    Raises:
        MessageError: unknown role, content of an unknown type, or a tool call without a function.
    """
    raw = _as_mapping(message)
    role = _ROLES.get(str(raw.get("role")))
    if role is None:
        raise MessageError(f"unknown message role {raw.get('role')!r}: use system, user, assistant or tool")
    result: Message = {"role": role, "content": _content(raw.get("content"))}
    if role == "assistant":
        calls = raw.get("tool_calls")
        if calls:
            if not isinstance(calls, list | tuple):
                raise MessageError("tool_calls must be a list")
            result["tool_calls"] = [_tool_call(call) for call in calls]
        reasoning = raw.get("reasoning_content") or raw.get("reasoning")
        if isinstance(reasoning, str):
            result["reasoning_content"] = clean(reasoning)
    if role == "tool":
        result["tool_call_id"] = clean(str(raw.get("tool_call_id") or ""))
    return result


def _as_mapping(message: Any) -> Mapping[str, Any]:
    if type(message) is dict:
        return message
    if hasattr(message, "model_dump"):
        message = message.model_dump()
    if not isinstance(message, Mapping):
        raise MessageError(f"a message must be a mapping with 'role' and 'content', not {type(message).__name__}")
    return message


def _content(content: Any) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    if isinstance(content, list | tuple):
        parts = [_part(part) for part in content]
        if all(part.get("type") == "text" for part in parts):
            return "\n".join(part["text"] for part in parts)
        return parts
    raise MessageError(f"message content must be text or a list of parts, not {type(content).__name__}")


def _part(part: Any) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        return {"type": "text", "text": clean(str(part))}
    if part.get("type") == "text":
        return {**part, "text": clean(str(part.get("text") or ""))}
    return dict(part)


def _tool_call(call: Any) -> ToolCall:
    raw = _as_mapping(call)
    function = raw.get("function")
    if not isinstance(function, Mapping):
        raise MessageError("a tool call must carry a 'function' with 'name' and 'arguments'")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = dump_json(arguments)
    return {
        "id": clean(str(raw.get("id") or "")),
        "type": "function",
        "function": {"name": clean(str(function.get("name") or "")), "arguments": clean(arguments)},
    }


def dump_json(value: Any) -> str:
    """Compact, UTF-8 safe JSON; what cannot be encoded is written as its text."""
    return clean(_ENCODE(value))


def parse_arguments(raw: str) -> dict[str, Any] | None:
    """The arguments object of a tool call, or None when the text is not a JSON object.

    An empty text means no arguments. NaN and Infinity are not JSON and are refused.
    """
    if not raw.strip():
        return {}
    try:
        value = _DECODE(raw)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Made once: `json.dumps` and `json.loads` make a new one for every call that differs from their defaults.
_ENCODE = json.JSONEncoder(ensure_ascii=False, default=str).encode
_DECODE = json.JSONDecoder(parse_constant=_refuse_constant).decode


@lru_cache(maxsize=1024)
def wire_arguments(raw: str) -> str:
    """Arguments text that a strict server accepts: always one JSON object.

    A valid object passes as written, so that prefix caches hit; anything else is wrapped, so that the model
    still sees what it wrote.
    """
    if raw.strip() and parse_arguments(raw) is not None:
        return raw
    return dump_json({"invalid_arguments": raw}) if raw.strip() else "{}"


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; parts that are not text are named in brackets."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content or []
    return "\n".join(str(p["text"]) if p.get("type") == "text" else f"[{p.get('type', 'part')}]" for p in parts)


@dataclass(frozen=True, slots=True)
class Profile:
    """What a model's server needs on the wire.

    Attributes:
        name: how to ask for it (`profile("strict")`).
        merge_same_role: join neighbouring user (or plain assistant) messages; templates that demand strict
            alternation need it and it harms nobody.
        keep_reasoning: send `reasoning_content` of earlier turns back.
        system_role: False folds the system prompt into the first user message.
        empty_text: stands in for an empty assistant or user message, which strict servers refuse.
    """

    name: str = "compatible"
    merge_same_role: bool = True
    keep_reasoning: bool = False
    system_role: bool = True
    empty_text: str = "(empty)"


PROFILES: dict[str, Profile] = {
    p.name: p
    for p in (
        Profile(),
        Profile("openai", merge_same_role=False),
        Profile("reasoning", keep_reasoning=True),
        Profile("no-system", system_role=False),
    )
}

# Families whose servers are known to want something else than the default.
_FAMILIES = (
    ("deepseek-reasoner", "reasoning"),
    ("kimi-k", "reasoning"),
    ("minimax-m", "reasoning"),
    ("gemma", "no-system"),
)


def profile(name: str) -> Profile:
    """A profile by its name.

    Raises:
        ConfigError: no profile has that name.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise ConfigError(f"unknown message profile {name!r}: choose one of {', '.join(PROFILES)}") from None


def profile_for(model: str) -> Profile:
    """The profile for a model by its name; the default when the family is not known."""
    lowered = model.lower()
    return PROFILES[next((name for family, name in _FAMILIES if family in lowered), "compatible")]


def wire(messages: Iterable[Message], profile: Profile) -> list[dict[str, Any]]:
    """The copy of a history that goes to a server. The input is left untouched."""
    sent = [_wire_one(message, profile) for message in messages]
    if not profile.system_role and sent and sent[0]["role"] == "system":
        sent = _fold_system(sent)
    return _merged(sent) if profile.merge_same_role else sent


def _wire_one(message: Message, profile: Profile) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    copy: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        copy["tool_call_id"] = message["tool_call_id"]
        return copy
    calls = message.get("tool_calls")
    if calls:
        copy["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": wire_arguments(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
        copy["content"] = content or None
    elif not content or (isinstance(content, str) and not content.strip()):
        copy["content"] = profile.empty_text
    if profile.keep_reasoning and message.get("reasoning_content"):
        copy["reasoning_content"] = message["reasoning_content"]
    return copy


def _fold_system(sent: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    head, rest = sent[0], list(sent[1:])
    if rest and rest[0]["role"] == "user" and isinstance(rest[0]["content"], str):
        rest[0] = {**rest[0], "content": f"{head['content']}\n\n{rest[0]['content']}"}
        return rest
    return [{**head, "role": "user"}, *rest]


def _merged(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for message in sent:
        last = merged[-1] if merged else None
        if last is not None and _mergeable(last, message):
            merged[-1] = {**last, "content": _joined(last["content"], message["content"])}
        else:
            merged.append(message)
    return merged


def _mergeable(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return (
        first["role"] == second["role"]
        and first["role"] in ("user", "assistant")
        and "tool_calls" not in first
        and "tool_calls" not in second
    )


def _joined(first: Any, second: Any) -> Any:
    """Two contents as one: text under text, or a list of parts when either has parts that are not text."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [
        content if isinstance(content, list) else [{"type": "text", "text": content}] for content in (first, second)
    ]
    return [*parts[0], *parts[1]]


def wire_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool schemas without `strict`, which many compatible servers refuse."""
    sent = []
    for tool in tools:
        copy, function = dict(tool), tool.get("function")
        if isinstance(function, Mapping) and "strict" in function:
            copy["function"] = {k: v for k, v in function.items() if k != "strict"}
        sent.append(copy)
    return sent
