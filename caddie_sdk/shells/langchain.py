"""LangChain at the edges: its chat models, tools and messages in Caddie's terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages, convert_to_openai_messages
from langchain_core.tools import BaseTool
from langchain_core.tools import tool as make_tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import SecretStr

from caddie_sdk import _blocking
from caddie_sdk.commands import CallModel
from caddie_sdk.endpoint import translate
from caddie_sdk.errors import ConfigError, ContextOverflow, MessageError
from caddie_sdk.messages import Message, canonical, dump_json
from caddie_sdk.model import Reply
from caddie_sdk.tools import Tool
from caddie_sdk.usage import Usage


def to_tool(tool: Tool | BaseTool | Callable[..., Any]) -> Tool:
    """A Caddie tool from a LangChain tool or from a plain function with type hints and a docstring.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(tool, Tool):
        return tool
    if not isinstance(tool, BaseTool):
        if not callable(tool):
            raise ConfigError(f"a tool must be a caddie_sdk.Tool, a LangChain tool or a function, not {tool!r}")
        try:
            tool = make_tool(tool)
        except ValueError as error:
            raise ConfigError(f"cannot make a tool of {tool!r}: {error}") from error
    function = convert_to_openai_tool(tool)["function"]
    langchain_tool = tool

    async def run(**arguments: Any) -> str:
        call = {"type": "tool_call", "id": "call", "name": langchain_tool.name, "args": arguments}
        result = await langchain_tool.ainvoke(call)
        content = result.content if isinstance(result, BaseMessage) else result
        return content if isinstance(content, str) else dump_json(content)

    return Tool(
        function["name"],
        function.get("description", ""),
        function.get("parameters") or {"type": "object", "properties": {}},
        run,
    )


def to_canonical(messages: Any) -> list[Message]:
    """Canonical messages from what LangChain users pass: a text, dicts, tuples or message objects, one or many.

    Raises:
        MessageError: it is none of these.
    """
    pair = isinstance(messages, tuple) and len(messages) == 2 and all(isinstance(item, str) for item in messages)
    if pair or not isinstance(messages, list | tuple):
        messages = [messages]
    return [item for message in messages for item in _canonical_one(message)]


def _canonical_one(message: Any) -> list[Message]:
    if isinstance(message, dict) and "role" in message:
        return [canonical(message)]
    try:
        converted = convert_to_openai_messages(convert_to_messages([message]))
    except (NotImplementedError, TypeError, ValueError) as error:
        raise MessageError(
            "a message must be a text, a dict with 'role' and 'content', a (role, text) pair or a LangChain message, "
            f"not this {type(message).__name__}"
        ) from error
    return [canonical(item) for item in converted]


class LangChainModel:
    """A LangChain chat model as a `ChatModel`."""

    def __init__(self, model: BaseChatModel) -> None:
        self.model = model

    def complete(self, call: CallModel) -> Reply:
        """Continue the chat, blocking."""
        return _blocking.run(self.acomplete(call))

    async def acomplete(self, call: CallModel) -> Reply:
        """Continue the chat. Errors of the openai client become ours; others pass through."""
        runnable: Any = self.model
        if call.tools:
            choice = {} if call.tool_choice == "auto" else {"tool_choice": call.tool_choice}
            runnable = self.model.bind_tools(call.tools, **choice)
        try:
            answer = await runnable.ainvoke(convert_to_messages(call.messages))
        except Exception as error:
            url = str(getattr(self.model, "openai_api_base", None) or "the model's server")
            if isinstance(error, ContextOverflowError):
                raise ContextOverflow(f"{url}: the prompt does not fit the model's context", url=url) from error
            # langchain-openai raises its own subclasses of the client's errors.
            if any(base.__module__.split(".")[0] == "openai" for base in type(error).__mro__):
                key = getattr(self.model, "openai_api_key", None)
                secret = key.get_secret_value() if isinstance(key, SecretStr) else ""
                raise translate(error, url, getattr(self.model, "model_name", None), secret) from error
            raise
        return read_reply(answer)


def read_reply(answer: AIMessage) -> Reply:
    """What a LangChain model said, with its calls as it wrote them and what it cost."""
    calls: list[tuple[Any, Any, str]] = [(c["id"], c["name"], dump_json(c["args"])) for c in answer.tool_calls]
    # Calls whose JSON is broken are kept: the session turns them into errors the model can read.
    calls += [(c.get("id"), c.get("name"), c.get("args") or "") for c in answer.invalid_tool_calls]
    # Some models answer in blocks; their reasoning and tool calls are not part of what they say.
    said = answer.content if isinstance(answer.content, str) else str(answer.text)
    raw: dict[str, Any] = {"role": "assistant", "content": said}
    if calls:
        raw["tool_calls"] = [{"id": i, "function": {"name": name, "arguments": args}} for i, name, args in calls]
    reasoning = answer.additional_kwargs.get("reasoning_content")
    if reasoning:
        raw["reasoning_content"] = reasoning
    metadata = answer.response_metadata or {}
    return Reply(
        canonical(raw),
        _usage(answer),
        str(metadata.get("model_name", "")),
        metadata.get("finish_reason") == "length",
    )


def _usage(answer: AIMessage) -> Usage:
    spent = answer.usage_metadata
    if spent is None:
        return Usage(calls=1)
    cached = (spent.get("input_token_details") or {}).get("cache_read") or 0
    return Usage(spent["input_tokens"], spent["output_tokens"], cached, 1)


def to_tools(tools: Sequence[Any]) -> list[Tool]:
    """`to_tool` over a list."""
    return [to_tool(tool) for tool in tools]
