"""What the graph tests share: tools that keep a diary, a LangChain chat model that replays a script, checks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from caddie_sdk import Session
from caddie_sdk.messages import profile, wire
from caddie_sdk.testing import ScriptedCritic, calls, check_wire, tool_call

THREAD: dict[str, Any] = {"configurable": {"thread_id": "1"}}


def thread(name: object) -> dict[str, Any]:
    return {"configurable": {"thread_id": str(name)}}


def search(query: str) -> str:
    """Search the archive."""
    return f"found: {query}"


def look(query: str = "Ada") -> dict[str, Any]:
    """The assistant's turn that calls `search`."""
    return calls(tool_call("search", {"query": query}))


def asks() -> dict[str, Any]:
    """The assistant's turn that calls the critic."""
    return calls(tool_call("call_critic"))


def critic() -> ScriptedCritic:
    return ScriptedCritic(lambda state: (f"analysis at {state.step}", f"advice at {state.step}"))


Invoke = Callable[[Any, Any, Any], dict[str, Any]]
SYNC: Invoke = lambda agent, said, config: agent.invoke(said, config)  # noqa: E731
ASYNC: Invoke = lambda agent, said, config: asyncio.run(agent.ainvoke(said, config))  # noqa: E731
WAYS = {"sync": SYNC, "async": ASYNC}


def contents(output: dict[str, Any], role: str) -> list[str]:
    return [message["content"] for message in output["messages"] if message["role"] == role]


def only_json(value: Any) -> Any:
    """`value`, if it consists of nothing but what JSON knows; tuples and subclasses do not pass."""
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    _walk(value)
    return value


def _walk(value: Any) -> None:
    assert value is None or type(value) in (dict, list, str, int, float, bool), f"{type(value)} is not JSON"
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _walk(item)


def session_of(agent: Any, config: Any) -> Session:
    return Session.load(agent.get_state(config).values["session"])


def check_thread(agent: Any, config: Any) -> Session:
    """The session of a thread, whose history the strictest server would take."""
    session = session_of(agent, config)
    # The answer that ends a turn is no request; what would be sent next is the history with a user's word after it.
    check_wire(
        wire([*session.transcript(), {"role": "user", "content": "next"}], profile("compatible")), alternating=True
    )
    return session


class FakeChat(BaseChatModel):
    """A LangChain chat model that replays a script of texts, `AIMessage`s and exceptions, word by word if streamed."""

    script: list[Any]
    seen: list[list[BaseMessage]] = []  # noqa: RUF012 - pydantic copies it
    asked: list[dict[str, Any]] = []  # noqa: RUF012 - pydantic copies it

    @property
    def _llm_type(self) -> str:
        return "fake"

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Any:
        return self.bind(tools=list(tools), **({"tool_choice": tool_choice} if tool_choice else {}))

    def _next(self, messages: list[BaseMessage], kwargs: dict[str, Any]) -> AIMessage:
        self.seen.append(messages)
        self.asked.append(kwargs)
        said = self.script.pop(0)
        if isinstance(said, BaseException):
            raise said
        return AIMessage(said) if isinstance(said, str) else said

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self._next(messages, kwargs))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        answer = self._next(messages, kwargs)
        words = str(answer.content).split(" ")
        for number, word in enumerate(words):
            chunk = AIMessageChunk(word if number == len(words) - 1 else word + " ")
            if number == len(words) - 1 and answer.tool_calls:
                chunk.tool_call_chunks = [
                    {
                        "name": c["name"],
                        "args": json.dumps(c["args"]),
                        "id": c["id"],
                        "index": i,
                        "type": "tool_call_chunk",
                    }
                    for i, c in enumerate(answer.tool_calls)
                ]
            if run_manager:
                run_manager.on_llm_new_token(word, chunk=ChatGenerationChunk(message=chunk))
            yield ChatGenerationChunk(message=chunk)
