"""Items of the Responses API, read as chat messages.

A turn of the assistant is several items there: reasoning, messages, function calls. They are one message here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from caddie_sdk.messages import Message, canonical, dump_json
from caddie_sdk.relay.adopt import Said, Unadopted

CALL, RESULT = "function_call", "function_call_output"
CALLS = (CALL, "custom_tool_call", "computer_call", "local_shell_call", "shell_call", "apply_patch_call")
"""Items that wait for a result of the caller's; each result's type is that of its call with `_output` behind it."""
_RESULTS = tuple(f"{kind}_output" for kind in CALLS)
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


def kind_of(item: Mapping[str, Any]) -> str:
    """The type of an item; messages may leave it out."""
    return str(item.get("type") or "message")


def open_calls(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The calls among a turn's items whose results are the caller's to give; a server that runs a call itself has
    put its result beside it."""
    answered = [item.get("call_id") for item in items if kind_of(item).endswith("_output")]
    return [item for item in items if kind_of(item) in CALLS and item.get("call_id") not in answered]


def _by_assistant(item: Mapping[str, Any]) -> bool:
    kind = kind_of(item)
    if kind == "message":
        return item.get("role") == "assistant"
    if kind == "item_reference":
        raise Unadopted("the input refers to items that only the server knows")
    return not kind.endswith("_output")


def _message(item: Mapping[str, Any]) -> Message:
    if kind_of(item) == "message":
        return canonical({"role": item.get("role"), "content": _content(item.get("content"))})
    if kind_of(item) not in _RESULTS:
        raise Unadopted(f"the input holds an item of type {item['type']!r}")
    output = item.get("output")
    if output is None:
        output = item.get("status")
    return canonical({"role": "tool", "tool_call_id": item.get("call_id"), "content": _result(output)})


def _result(output: Any) -> Any:
    """A result's content: text and parts as they are, anything else (a shell's output, a screenshot) as its JSON."""
    parts = output if isinstance(output, list) else [output]
    if all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in parts):
        return _content(parts)
    return output if isinstance(output, str) else dump_json(output)


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [_part(part) for part in content]


def _part(part: Any) -> Any:
    if isinstance(part, Mapping) and part.get("type") in _TEXTS:
        return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
    return part


def assistant_turn(items: Sequence[Mapping[str, Any]]) -> Message:
    """The items of one assistant turn as one message; what is neither text nor a call for the caller is left out."""
    texts = []
    for item in items:
        if kind_of(item) == "message":
            text = canonical({"role": "assistant", "content": _content(item.get("content"))})["content"]
            texts.append(text if isinstance(text, str) else dump_json(text))
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(text for text in texts if text)}
    calls = [{"id": item.get("call_id"), "function": _function(item)} for item in open_calls(items)]
    return canonical({**message, "tool_calls": calls} if calls else message)


def _function(item: Mapping[str, Any]) -> dict[str, Any]:
    if kind_of(item) == CALL:
        return {"name": item.get("name"), "arguments": item.get("arguments")}
    given = {name: item[name] for name in ("input", "action", "actions", "operation") if name in item}
    return {"name": item.get("name") or kind_of(item), "arguments": dump_json(given)}


def is_function(tool: Any) -> bool:
    """Whether a tool of a request is a function of the caller's."""
    return isinstance(tool, Mapping) and tool.get("type") == "function"


def chat_tools(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """The function tools of a request in chat form, which sessions know them by."""
    chosen = []
    for tool in tools:
        if is_function(tool):
            function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
            chosen.append({"type": "function", "function": function})
    return chosen


def flat_tool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A chat tool schema in the form of the Responses API."""
    return {"type": "function", **schema["function"]}
