"""`interrupt()` inside tools, static breakpoints, and turns with sibling calls (SPEC §4, rule 4)."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypedDict

import pytest
from graph_kit import THREAD, WAYS, Invoke, asks, check_thread, contents, critic, look, search, session_of
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from caddie_sdk import create_caddie_agent
from caddie_sdk.testing import ScriptedModel, calls, tool_call
from caddie_sdk.tools import Tool


@pytest.fixture(params=WAYS)
def invoke(request: pytest.FixtureRequest) -> Invoke:
    return WAYS[request.param]


def call(name: str, text: str) -> dict[str, Any]:
    return tool_call(name, {"text": text})


class Desk:
    """Tools that ask a human, and tools that do not, with a note of what ran; `pause` seconds before each ends."""

    def __init__(self, pause: float = 0.0) -> None:
        self.ran: list[str] = []
        desk = self

        def approve(text: str) -> str:
            """Ask a human, blocking."""
            desk.ran.append(f"approve {text}")
            return f"{text}: {interrupt({'approve': text})}"

        async def aapprove(text: str) -> str:
            """Ask a human."""
            desk.ran.append(f"aapprove {text}")
            return f"{text}: {interrupt({'approve': text})}"

        @tool
        def lapprove(text: str) -> str:
            """Ask a human, from a LangChain tool."""
            desk.ran.append(f"lapprove {text}")
            return f"{text}: {interrupt({'approve': text})}"

        def twice(text: str) -> str:
            """Ask a human two things."""
            return f"{text}: {interrupt({'approve': text + ' 1'})} {interrupt({'approve': text + ' 2'})}"

        def work(text: str) -> str:
            """Work, blocking."""
            time.sleep(pause)
            desk.ran.append(f"work {text}")
            return f"worked on {text}"

        async def awork(text: str) -> str:
            """Work."""
            await asyncio.sleep(pause)
            desk.ran.append(f"awork {text}")
            return f"worked on {text}"

        schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        self.tools = [Tool("capprove", "Ask a human, from a Caddie tool.", schema, approve)]
        self.tools += [approve, aapprove, lapprove, twice, work, awork]  # type: ignore[list-item]

    def agent(self, *turns: Any, **settings: Any) -> Any:
        return create_caddie_agent(
            ScriptedModel(turns), self.tools, **{"checkpointer": InMemorySaver(), "critic": critic(), **settings}
        )


def questions(output: dict[str, Any]) -> list[str]:
    return [asked.value["approve"] for asked in output["__interrupt__"]]


@pytest.mark.parametrize("name", ["approve", "aapprove", "lapprove", "capprove"])
def test_one_tool_asks(name: str, invoke: Invoke) -> None:
    desk = Desk()
    agent = desk.agent(calls(call(name, "refund 7")), "Done")
    paused = invoke(agent, {"messages": "Pay me back"}, THREAD)
    assert questions(paused) == ["refund 7"]
    assert session_of(agent, THREAD).phase == "tools"
    output = invoke(agent, Command(resume="yes"), THREAD)
    assert contents(output, "tool") == ["refund 7: yes"]
    assert (output["answer"], output["reason"]) == ("Done", "answer")
    check_thread(agent, THREAD)


def test_one_tool_asks_two_things(invoke: Invoke) -> None:
    agent = Desk().agent(calls(call("twice", "refund 7")), "Done")
    assert questions(invoke(agent, {"messages": "Pay me back"}, THREAD)) == ["refund 7 1"]
    assert questions(invoke(agent, Command(resume="yes"), THREAD)) == ["refund 7 2"]
    assert contents(invoke(agent, Command(resume="no"), THREAD), "tool") == ["refund 7: yes no"]


@pytest.mark.parametrize("pause", [0.0, 0.2], ids=["fast sibling", "slow sibling"])
@pytest.mark.parametrize("order", [0, 1], ids=["asks first", "asks last"])
@pytest.mark.parametrize("names", [("approve", "work"), ("aapprove", "awork"), ("lapprove", "awork")], ids="-".join)
def test_sibling_of_an_interrupt_runs_once(names: tuple[str, str], order: int, pause: float, invoke: Invoke) -> None:
    desk = Desk(pause)
    turn = [call(names[0], "refund 7"), call(names[1], "mail")]
    agent = desk.agent(calls(*(reversed(turn) if order else turn)), "Done")
    assert questions(invoke(agent, {"messages": "Pay me back"}, THREAD)) == ["refund 7"]
    assert desk.ran.count(f"{names[1]} mail") == 1
    output = invoke(agent, Command(resume="yes"), THREAD)
    expected = ["refund 7: yes", "worked on mail"]
    assert contents(output, "tool") == (expected[::-1] if order else expected)
    assert desk.ran.count(f"{names[1]} mail") == 1
    assert desk.ran.count(f"{names[0]} refund 7") == 2


def test_siblings_that_interrupt_are_shown_together(invoke: Invoke) -> None:
    """One answer by id settles both; a bare answer, which could meet the wrong one, is refused by LangGraph."""
    desk = Desk(0.1)
    agent = desk.agent(calls(call("approve", "A"), call("work", "mail"), call("aapprove", "B")), "Done")
    paused = invoke(agent, {"messages": "Pay me back"}, THREAD)
    assert sorted(questions(paused)) == ["A", "B"]
    with pytest.raises(RuntimeError, match="multiple pending interrupts"):
        invoke(agent, Command(resume="yes"), THREAD)
    answers = {asked.id: f"yes to {asked.value['approve']}" for asked in paused["__interrupt__"]}
    output = invoke(agent, Command(resume=answers), THREAD)
    assert contents(output, "tool") == ["A: yes to A", "worked on mail", "B: yes to B"]
    assert desk.ran.count("work mail") == 1


def test_siblings_that_interrupt_answered_one_by_one(invoke: Invoke) -> None:
    agent = Desk().agent(calls(call("approve", "A"), call("approve", "B")), "Done")
    paused = invoke(agent, {"messages": "Pay me back"}, THREAD)
    second = next(asked for asked in paused["__interrupt__"] if asked.value["approve"] == "B")
    paused = invoke(agent, Command(resume={second.id: "yes to B"}), THREAD)
    assert questions(paused) == ["A"]
    output = invoke(agent, Command(resume={paused["__interrupt__"][0].id: "yes to A"}), THREAD)
    assert contents(output, "tool") == ["A: yes to A", "B: yes to B"]


def test_sibling_runs_once_under_the_checkpointer_of_a_graph_around(invoke: Invoke) -> None:
    """The agent inside another graph has no checkpointer of its own; its siblings are as safe."""

    class Outer(TypedDict, total=False):
        question: str
        answer: str

    desk = Desk()
    inner = desk.agent(calls(call("work", "mail"), call("approve", "A")), "Done", checkpointer=None)

    def node(state: Outer) -> Outer:
        return {"answer": inner.invoke({"messages": state["question"]})["answer"]}

    async def anode(state: Outer) -> Outer:
        return {"answer": (await inner.ainvoke({"messages": state["question"]}))["answer"]}

    builder = StateGraph(Outer)
    builder.add_node("inner", anode if invoke is WAYS["async"] else node)
    builder.add_edge(START, "inner")
    builder.add_edge("inner", END)
    outer = builder.compile(checkpointer=InMemorySaver())
    paused = invoke(outer, {"question": "Pay me back"}, THREAD)
    # LangGraph lists the interrupt of a nested task once for each level; it is one, with one id.
    assert set(questions(paused)) == {"A"}
    assert len({asked.id for asked in paused["__interrupt__"]}) == 1
    assert invoke(outer, Command(resume="yes"), THREAD)["answer"] == "Done"
    assert desk.ran == ["work mail", "approve A", "approve A"] or desk.ran == ["approve A", "work mail", "approve A"]


def test_interrupt_without_a_checkpointer_is_no_silent_approval(invoke: Invoke) -> None:
    agent = Desk().agent(calls(call("approve", "refund 7")), "Done", checkpointer=None)
    output = invoke(agent, {"messages": "Pay me back"}, {})
    assert questions(output) == ["refund 7"]
    assert output.get("answer") is None


def test_failing_sibling_of_an_interrupt_is_an_observation(invoke: Invoke) -> None:
    desk = Desk()
    agent = desk.agent(calls(tool_call("work", {"txt": "?"}), call("approve", "A")), "Done")
    invoke(agent, {"messages": "Pay me back"}, THREAD)
    output = invoke(agent, Command(resume="yes"), THREAD)
    first, second = contents(output, "tool")
    assert first.startswith("The tool failed: ")
    assert second == "A: yes"


def test_an_interrupt_beside_a_consultation(invoke: Invoke) -> None:
    """Mixed turn: the critic is asked first and once, although the tools node runs twice."""
    asked = critic()
    desk = Desk()
    agent = desk.agent(
        calls(tool_call("call_critic"), call("approve", "A"), call("work", "mail")), "Done", critic=asked
    )
    invoke(agent, {"messages": "Pay me back"}, THREAD)
    output = invoke(agent, Command(resume="yes"), THREAD)
    assert len(asked.seen) == 1
    assert desk.ran.count("work mail") == 1
    first, second, third = contents(output, "tool")
    assert first.startswith("Critic feedback:\nAnalysis: analysis at 0")
    assert (second, third) == ("A: yes", "worked on mail")


def test_guarded_sibling_is_held_and_the_others_run(invoke: Invoke) -> None:
    desk, asked = Desk(), critic()
    turn = calls(call("work", "mail"), call("approve", "refund 7"), call("awork", "letter"))
    agent = desk.agent(turn, calls(call("approve", "refund 7")), "Done", critic=asked, protocol="guarded:approve")
    paused = invoke(agent, {"messages": "Pay me back"}, THREAD)
    assert sorted(desk.ran) == ["approve refund 7", "awork letter", "work mail"]
    assert [state.trigger for state in asked.seen] == ["guarded"]
    assert [action.name for action in asked.seen[0].events[-1].actions] == ["work", "approve", "awork"]
    assert questions(paused) == ["refund 7"]
    output = invoke(agent, Command(resume="yes"), THREAD)
    told = contents(output, "tool")
    assert told[:3] == [
        "worked on mail",
        "Not run yet: read the critic's advice first, then decide.",
        "worked on letter",
    ]
    assert told[3].startswith("Critic feedback:")
    assert told[4] == "refund 7: yes"


def test_siblings_run_side_by_side(invoke: Invoke) -> None:
    agent = Desk(0.3).agent(calls(*(call(name, str(n)) for n, name in enumerate(["work", "awork"] * 3))), "Done")
    started = time.monotonic()
    output = invoke(agent, {"messages": "All of it"}, THREAD)
    assert contents(output, "tool") == [f"worked on {n}" for n in range(6)]
    assert time.monotonic() - started < 1.2


# ------------------------------------------------------------------ breakpoints


@pytest.mark.parametrize("where", ["interrupt_before", "interrupt_after"])
@pytest.mark.parametrize("node", ["agent", "tools", "critic"])
def test_breakpoints(where: str, node: str, invoke: Invoke) -> None:
    turns = [look("a"), calls(tool_call("search", {"query": "b"}), tool_call("call_critic")), "Paris"]
    agent = create_caddie_agent(
        ScriptedModel(turns), [search], critic=critic(), checkpointer=InMemorySaver(), **{where: [node]}
    )
    output = invoke(agent, {"messages": "Where?"}, THREAD)
    stops = []
    while agent.get_state(THREAD).next:
        snapshot = agent.get_state(THREAD)
        stops.append(snapshot.next[0])
        output = invoke(agent, None, THREAD)
    expected = {
        ("interrupt_before", "agent"): ["agent", "agent", "agent"],
        ("interrupt_before", "tools"): ["tools", "tools"],
        ("interrupt_before", "critic"): ["critic"],
        ("interrupt_after", "agent"): ["tools", "critic"],
        ("interrupt_after", "tools"): ["agent", "agent"],
        ("interrupt_after", "critic"): ["tools"],
    }
    assert stops == expected[where, node]
    unbroken = create_caddie_agent(ScriptedModel(turns), [search], critic=critic()).invoke({"messages": "Where?"})
    assert output["messages"] == unbroken["messages"]
    assert output["answer"] == "Paris"


def test_breakpoint_given_as_one_name() -> None:
    agent = create_caddie_agent(
        ScriptedModel([look(), "Paris"]), [search], checkpointer=InMemorySaver(), interrupt_before="tools"
    )
    agent.invoke({"messages": "Where?"}, THREAD)
    assert agent.get_state(THREAD).next == ("tools",)


def test_breakpoint_at_run_time(invoke: Invoke) -> None:
    """Not only at compile time: `invoke(..., interrupt_before=...)` is LangGraph's own and must work."""
    agent = create_caddie_agent(ScriptedModel([asks(), "Paris"]), critic=critic(), checkpointer=InMemorySaver())
    agent.invoke({"messages": "Where?"}, THREAD, interrupt_before=["critic"])
    assert agent.get_state(THREAD).next == ("critic",)
    assert invoke(agent, None, THREAD)["answer"] == "Paris"


@pytest.mark.parametrize("stored", [False, True], ids=["bare", "thread"])
def test_cancellation_reaches_the_tool_and_the_caller(stored: bool) -> None:
    ended: list[str] = []

    async def wait(text: str) -> str:
        """Wait."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return "never"

    async def work() -> None:
        saver = InMemorySaver() if stored else None
        agent = create_caddie_agent(ScriptedModel([calls(call("wait", "it"))]), [wait], checkpointer=saver)
        await asyncio.wait_for(agent.ainvoke({"messages": "Wait"}, THREAD), 0.3)

    with pytest.raises(TimeoutError):
        asyncio.run(work())
    assert ended == ["cancelled"]


def test_cancelled_run_resumes() -> None:
    """`ainvoke` cancelled while a tool waits: the thread stands before the tools, and goes on from there."""
    started: list[str] = []

    async def wait(text: str) -> str:
        """Wait."""
        started.append(text)
        await asyncio.sleep(0 if len(started) > 1 else 60)
        return f"waited for {text}"

    async def work() -> dict[str, Any]:
        agent = create_caddie_agent(
            ScriptedModel([calls(call("wait", "it")), "Done"]), [wait], checkpointer=InMemorySaver()
        )
        running = asyncio.create_task(agent.ainvoke({"messages": "Wait"}, THREAD))
        while not started:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return await agent.ainvoke(None, THREAD)

    output = asyncio.run(work())
    assert contents(output, "tool") == ["waited for it"]
    assert started == ["it", "it"]
