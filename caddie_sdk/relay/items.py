"""Items of the Responses API, read as chat messages.

A turn of the assistant is several items there: reasoning, messages, function calls. They are one message here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from caddie_sdk.messages import Message, canonical, dump_json
from caddie_sdk.relay.adopt import Said, Unadopted

CALL, RESULT = "function_call", "function_call_output"
_TEXTS = ("input_text", "output_text", "text", "refusal")


def read_items(items: str | Sequence[Any]) -> list[Said]:
    """The `input` of a request, or the items of an agent's run, as a history.

    Raises:
        Unadopted: an item is of no kind that can be told.
        MessageError: a message has an unknown role or content.
    """
    if isinstance(items, str):
        return [Said({"role": "user", "content": items}, ({"role": "user", "content": items},))]
    said: list[Said] = []
    turn: list[Mapping[str, Any]] = []
    for item in items:
        if not isinstance(item, Mapping):
            raise Unadopted(f"an input item is a {type(item).__name__}, not an object")
        if _by_assistant(item):
            turn.append(item)
            continue
        if turn:
            said.append(Said(assistant_turn(turn), tuple(turn)))
            turn = []
        said.append(Said(_message(item), (item,)))
    if turn:
        said.append(Said(assistant_turn(turn), tuple(turn)))
    return said


def _by_assistant(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    if kind == "message":
        return item.get("role") == "assistant"
    if kind == "item_reference":
        raise Unadopted("the input refers to items that only the server knows")
    return not str(kind).endswith("_output")


def _message(item: Mapping[str, Any]) -> Message:
    if item.get("type", "message") == "message":
        return canonical({"role": item.get("role"), "content": _content(item.get("content"))})
    if item["type"] != RESULT:
        raise Unadopted(f"the input holds an item of type {item['type']!r}")
    output = item.get("output")
    content = output if isinstance(output, str) else _content(output)
    return canonical({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_part(part) for part in content]


def _part(part: Any) -> Any:
    if isinstance(part, Mapping) and part.get("type") in _TEXTS:
        return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
    return part


def assistant_turn(items: Iterable[Mapping[str, Any]]) -> Message:
    """The items of one assistant turn as one message; what is neither text nor a function call is left out."""
    texts, calls = [], []
    for item in items:
        if item.get("type", "message") == "message":
            text = canonical({"role": "assistant", "content": _content(item.get("content"))})["content"]
            texts.append(text if isinstance(text, str) else dump_json(text))
        elif item.get("type") == CALL:
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(text for text in texts if text)}
    return canonical({**message, "tool_calls": calls} if calls else message)


def chat_tools(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """The function tools of a request in chat form, which sessions know them by."""
    chosen = []
    for tool in tools:
        if isinstance(tool, Mapping) and tool.get("type") == "function":
            function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
            chosen.append({"type": "function", "function": function})
    return chosen


def flat_tool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A chat tool schema in the form of the Responses API."""
    return {"type": "function", **schema["function"]}
