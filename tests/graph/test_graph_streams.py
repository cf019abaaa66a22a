"""Streaming: updates, values, custom events, and the tokens of a LangChain model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from graph_kit import THREAD, FakeChat, critic, look, only_json, search
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver

from caddie_sdk import create_caddie_agent
from caddie_sdk.testing import ScriptedModel, calls, tool_call

Stream = Callable[..., list[Any]]


def _stream(agent: Any, said: Any, config: Any, mode: Any) -> list[Any]:
    return list(agent.stream(said, config, stream_mode=mode))


def _astream(agent: Any, said: Any, config: Any, mode: Any) -> list[Any]:
    async def collect() -> list[Any]:
        return [item async for item in agent.astream(said, config, stream_mode=mode)]

    return asyncio.run(collect())


@pytest.fixture(params=[_stream, _astream], ids=["sync", "async"])
def stream(request: pytest.FixtureRequest) -> Stream:
    return request.param  # type: ignore[no-any-return]


TURNS = [
    calls(tool_call("search", {"query": "a"}, "one"), tool_call("call_critic", {}, "two"), text="let me see"),
    "",
    calls(tool_call("search", {"query": "b"}, "three"), tool_call("search", {"query": "c"}, "four")),
    "Paris",
]


def agent(**settings: Any) -> Any:
    return create_caddie_agent(ScriptedModel(TURNS), [search], critic=critic(), **settings)


def test_updates_name_the_nodes_in_order(stream: Stream) -> None:
    updates = stream(agent(), {"messages": "Where?"}, {}, "updates")
    assert [next(iter(update)) for update in updates] == [
        "intake", "agent", "critic", "tools", "agent", "agent", "tool", "tool", "tools", "agent"
    ]  # fmt: skip
    # Calls side by side are LangGraph tasks, so each shows its own result as soon as it is there.
    assert sorted(update["tool"]["content"] for update in updates[6:8]) == ["found: b", "found: c"]
    for update in updates:
        only_json(update)
    assert updates[-1]["agent"]["answer"] == "Paris"


def test_values_end_with_what_invoke_returns(stream: Stream) -> None:
    values = stream(agent(), {"messages": "Where?"}, {}, "values")
    last = agent().invoke({"messages": "Where?"})
    for key in ("messages", "answer", "reason", "usage"):
        assert values[-1][key] == last[key]
    assert all(not value.get("answer") for value in values[:-1])


def test_custom_events(stream: Stream) -> None:
    events = stream(agent(), {"messages": "Where?"}, {}, "custom")
    assert [event["event"] for event in events] == [
        "reply", "consultation", "tools", "observations", "reply", "reply", "tools", "observations", "reply"
    ]  # fmt: skip
    for event in events:
        only_json(event)
    reply, consultation, tools, observations = events[:4]
    assert reply["message"]["content"] == "let me see"
    assert [call["id"] for call in reply["message"]["tool_calls"]] == ["one", "two"]
    assert (consultation["control"], consultation["trigger"], consultation["step"]) == ("call_critic", "self-call", 0)
    assert consultation["critique"]["advice"] == "advice at 0"
    assert tools["calls"] == [{"name": "search", "arguments": '{"query": "a"}'}]
    assert observations["results"] == [{"id": "one", "content": "found: a", "is_error": False}]
    assert [result["content"] for result in events[7]["results"]] == ["found: b", "found: c"]
    assert events[-1]["message"]["content"] == "Paris"


def test_several_modes_at_once(stream: Stream) -> None:
    items = stream(agent(), {"messages": "Where?"}, {}, ["updates", "custom", "values"])
    modes = [mode for mode, _ in items]
    assert {mode: modes.count(mode) for mode in set(modes)} == {"updates": 10, "custom": 9, "values": 9}
    first_reply = next(i for i, (mode, item) in enumerate(items) if mode == "custom" and item["event"] == "reply")
    its_update = next(i for i, (mode, item) in enumerate(items) if mode == "updates" and "agent" in item)
    assert first_reply < its_update  # events come while a node works, not after it


def test_event_comes_before_the_tools_are_done() -> None:
    """Whoever watches sees what is about to run while it runs."""
    seen: list[str] = []

    def slow(query: str) -> str:
        """Slow."""
        seen.append("ran")
        return "done"

    watched = create_caddie_agent(ScriptedModel([calls(tool_call("slow", {"query": "x"})), "Paris"]), [slow])
    order = []
    for event in watched.stream({"messages": "Where?"}, stream_mode="custom"):
        order.append((event["event"], list(seen)))
    assert order[1] == ("tools", []) or order[1][0] == "tools"
    assert [name for name, _ in order] == ["reply", "tools", "observations", "reply"]
    assert order[2] == ("observations", ["ran"])


def _answer(text: str, **call: Any) -> AIMessage:
    made = [{"name": name, "args": args, "id": f"id {name}"} for name, args in call.items()]
    return AIMessage(text, tool_calls=made)


def test_tokens_of_a_langchain_model(stream: Stream) -> None:
    model = FakeChat(script=[_answer("let me look", search={"query": "Ada"}), "It is Paris I think"])
    watched = create_caddie_agent(model, [search])
    items = stream(watched, {"messages": "Where?"}, {}, "messages")
    texts = [chunk.content for chunk, _ in items]
    assert "".join(texts) == "let me look" + "It is Paris I think"
    assert len([text for text in texts if text]) == 3 + 5
    assert {metadata["langgraph_node"] for _, metadata in items} == {"agent"}


def test_streamed_replies_give_the_same_transcript(stream: Stream) -> None:
    def script() -> list[Any]:
        return [_answer("let me look", search={"query": "Ada"}, call_critic={}), "It is Paris"]

    streamed = create_caddie_agent(FakeChat(script=script()), [search], critic=critic(), checkpointer=InMemorySaver())
    stream(streamed, {"messages": "Where?"}, THREAD, "messages")
    plain = create_caddie_agent(FakeChat(script=script()), [search], critic=critic()).invoke({"messages": "Where?"})
    values = streamed.get_state(THREAD).values
    assert values["messages"] == plain["messages"]
    assert values["answer"] == "It is Paris"


def test_events_of_threads_side_by_side_do_not_mix() -> None:
    async def watch(number: int) -> list[Any]:
        own = create_caddie_agent(ScriptedModel([look(str(number)), f"answer {number}"]), [search])
        return [event async for event in own.astream({"messages": "Where?"}, stream_mode="custom")]

    async def all_of_them() -> list[list[Any]]:
        return list(await asyncio.gather(*(watch(number) for number in range(10))))

    for number, events in enumerate(asyncio.run(all_of_them())):
        assert events[2]["results"][0]["content"] == f"found: {number}"
        assert events[-1]["message"]["content"] == f"answer {number}"


def test_astream_events_name_the_graph() -> None:
    """LangChain's own event stream (what LangSmith and UIs read) works on the graph."""

    async def collect() -> list[Any]:
        model = FakeChat(script=[_answer("", search={"query": "Ada"}), "Paris"])
        watched = create_caddie_agent(model, [search], name="helper")
        return [event async for event in watched.astream_events({"messages": "Where?"}, version="v2")]

    events = asyncio.run(collect())
    names = [event["name"] for event in events if event["event"] == "on_chain_start"]
    assert names[0] == "helper"
    assert [event["name"] for event in events if event["event"] == "on_tool_start"] == ["search"]
    assert sum(event["event"] == "on_chat_model_end" for event in events) == 2
