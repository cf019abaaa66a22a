"""Many runs on one graph: nothing of one shows in another."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from graph_kit import contents, thread
from langgraph.checkpoint.memory import InMemorySaver

from caddie_sdk import CallModel, Critique, Reply, create_caddie_agent
from caddie_sdk.critic import ConsultState
from caddie_sdk.messages import text_of
from caddie_sdk.testing import calls, tool_call

RUNS = 20


class Model:
    """Answers by what it is shown, after a random pause."""

    async def acomplete(self, call: CallModel) -> Reply:
        await asyncio.sleep(random.random() / 50)
        task = text_of(call.messages[-1]) if call.messages[-1]["role"] == "user" else ""
        told = [text_of(message) for message in call.messages if message["role"] == "tool"]
        if task:
            turn = calls(
                tool_call("search", {"query": task}), tool_call("asearch", {"query": task}), tool_call("call_critic")
            )
            return Reply(turn)  # type: ignore[arg-type]
        return Reply({"role": "assistant", "content": " / ".join(told[-3:])})

    def complete(self, call: CallModel) -> Reply:
        raise AssertionError("the graph has its own way to block")


class Adviser:
    async def acritique(self, state: ConsultState) -> Critique:
        await asyncio.sleep(random.random() / 50)
        return Critique("", f"advice on {state.events[-2].text}")

    def critique(self, state: ConsultState) -> Critique:
        raise AssertionError("the graph has its own way to block")


def search(query: str) -> str:
    """Search, blocking."""
    threading.Event().wait(random.random() / 50)
    return f"found: {query}"


async def asearch(query: str) -> str:
    """Search."""
    await asyncio.sleep(random.random() / 50)
    return f"also found: {query}"


def check(number: int, output: dict[str, Any], turns: int) -> None:
    asked = [f"question {number}.{turn}" for turn in range(turns)]
    assert contents(output, "user") == asked
    assert [record["critique"]["advice"] for record in output["consultations"]] == [f"advice on {q}" for q in asked]
    assert output["answer"].startswith(f"found: {asked[-1]} / also found: {asked[-1]} / Critic feedback:")
    told = [message["content"] for message in output["messages"]]
    assert not [text for text in told if "question" in text and f"question {number}." not in text]


@pytest.fixture(params=[None, InMemorySaver], ids=["bare", "threads"])
def agent(request: pytest.FixtureRequest) -> Any:
    saver = request.param() if request.param else None
    return create_caddie_agent(Model(), [search, asearch], critic=Adviser(), checkpointer=saver)


def test_gathered(agent: Any) -> None:
    turns = 2 if agent.checkpointer else 1

    async def one(number: int) -> dict[str, Any]:
        for turn in range(turns):
            output = await agent.ainvoke({"messages": f"question {number}.{turn}"}, thread(number))
        return output  # type: ignore[no-any-return]

    async def gathered() -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(one(number) for number in range(RUNS))))

    for number, output in enumerate(asyncio.run(gathered())):
        check(number, output, turns)


def test_threads_of_the_operating_system(agent: Any) -> None:
    turns = 2 if agent.checkpointer else 1

    def one(number: int) -> dict[str, Any]:
        for turn in range(turns):
            output = agent.invoke({"messages": f"question {number}.{turn}"}, thread(number))
        return output  # type: ignore[no-any-return]

    with ThreadPoolExecutor(RUNS) as pool:
        for number, output in enumerate(pool.map(one, range(RUNS))):
            check(number, output, turns)


def test_batch(agent: Any) -> None:
    inputs = [{"messages": f"question {number}.0"} for number in range(RUNS)]
    outputs = agent.batch(inputs, [thread(number) for number in range(RUNS)])
    for number, output in enumerate(outputs):
        check(number, output, 1)


def test_two_event_loops_in_two_threads(agent: Any) -> None:
    def one(number: int) -> dict[str, Any]:
        return asyncio.run(agent.ainvoke({"messages": f"question {number}.0"}, thread(number)))

    with ThreadPoolExecutor(4) as pool:
        for number, output in enumerate(pool.map(one, range(8))):
            check(number, output, 1)


def test_blocking_call_inside_a_running_loop(agent: Any) -> None:
    """As in a notebook: `invoke` where a loop is already running must not fail or hang."""

    async def cell() -> dict[str, Any]:
        return agent.invoke({"messages": "question 3.0"}, thread(3))  # type: ignore[no-any-return]

    check(3, asyncio.run(cell()), 1)
