"""The bare loop: what goes wrong around a session stays an observation (SPEC §4, rule 6)."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
import session_driver as driver

from caddie_sdk.budget import Budget
from caddie_sdk.commands import CallModel, Consult, Finish, Reject, RunTools
from caddie_sdk.config import SessionConfig
from caddie_sdk.critic import ConsultState
from caddie_sdk.critique import Critique
from caddie_sdk.errors import ConfigError, ConsultationError, ContextOverflow, EndpointUnavailable
from caddie_sdk.intervention import Never, SelfCall
from caddie_sdk.session import Session
from caddie_sdk.shells.loop import arun, asteps, run
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, tool_call
from caddie_sdk.tools import Tool

SCHEMA = driver.SEARCH["function"]["parameters"]


def tool(function: Any, name: str = "search") -> Tool:
    return Tool(name, "Finds passages.", SCHEMA, function)


def session_for(*tools: Tool, **settings: Any) -> Session:
    budget = {name: settings.pop(name) for name in list(settings) if name in Budget.__dataclass_fields__}
    return Session(SessionConfig(tools=tuple(t.schema() for t in tools), budget=Budget(**budget), **settings))


SEARCH = calls(tool_call("search", {"query": "Elbe"}, id="s1"))
ASK = calls(tool_call("call_critic", id="c1"))
ADVICE = [("Missing.", "Search.")] * 9


async def test_a_whole_run() -> None:
    asked: list[str] = []

    async def find(query: str) -> str:
        asked.append(query)
        return f"about {query}"

    search = tool(find)
    session = session_for(search)
    model, critic = ScriptedModel([SEARCH, ASK, "The Elbe"]), ScriptedCritic(ADVICE)
    end = await arun(session, "Which river?", model, [search], {"call_critic": critic})
    assert end == Finish("The Elbe", "answer")
    assert asked == ["Elbe"]
    assert [m["role"] for m in session.transcript()] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert session.transcript()[2]["content"] == "about Elbe"
    assert "Search." in str(session.transcript()[4]["content"])
    assert [event.kind for event in critic.seen[0].events] == ["task", "step", "proposal"]
    assert (session.usage.calls, len(model.seen)) == (3, 3)
    assert session.consultations[0]["critique"]["seconds"] >= 0


def test_the_blocking_twin_does_the_same() -> None:
    search = tool(lambda query: f"about {query}")

    def ended() -> tuple[Finish, dict[str, Any]]:
        session = session_for(search)
        end = run(session, "Q", ScriptedModel([SEARCH, ASK, "E"]), [search], {"call_critic": ScriptedCritic(ADVICE)})
        dump = session.dump()
        dump["consultations"][0]["critique"]["seconds"] = 0
        return end, dump

    assert ended() == ended()
    assert ended()[0] == Finish("E", "answer")


async def test_every_command_is_shown_before_it_is_carried_out() -> None:
    search = tool(lambda query: "x")
    session = session_for(search, min_steps=1)
    model = ScriptedModel(["too early", SEARCH, ASK, "The Elbe"])
    seen = []
    async for command in asteps(session, "Q", model, [search], {"call_critic": ScriptedCritic(ADVICE)}):
        seen.append(type(command))
        if isinstance(command, RunTools):
            assert len(session.transcript()) == 4, "the results are not in yet"
    assert seen == [CallModel, Reject, CallModel, RunTools, CallModel, Consult, CallModel, Finish]


@pytest.mark.parametrize("kind", ["sync", "async", "wrong arguments", "not there", "cancels itself", "exits"])
async def test_a_tool_that_fails_is_an_observation(kind: str) -> None:
    def boom(query: str) -> str:
        raise RuntimeError("no network")

    async def aboom(query: str) -> str:
        raise RuntimeError("no network")

    async def cancels(query: str) -> str:
        raise asyncio.CancelledError

    def exits(query: str) -> str:
        raise SystemExit(3)

    functions = {"sync": boom, "async": aboom, "cancels itself": cancels, "exits": exits}
    search = tool(functions.get(kind, lambda other: "x"))
    session = session_for(search)
    tools = [] if kind == "not there" else [search]
    end = await arun(session, "Q", ScriptedModel([SEARCH, "The Elbe"]), tools, {"call_critic": ScriptedCritic([])})
    assert end == Finish("The Elbe", "answer")
    told = str(session.transcript()[2]["content"])
    assert told.startswith("The tool failed: ")
    errors = {
        "wrong arguments": "TypeError",
        "not there": "KeyError",
        "cancels itself": "CancelledError",
        "exits": "SystemExit: 3",
    }
    error = errors.get(kind, "RuntimeError: no network")
    assert error in told
    assert session.history.path()[2].meta["error"] is True


async def test_tools_of_one_turn_run_together_and_answer_in_order() -> None:
    running: list[str] = []
    together: list[int] = []

    async def find(query: str) -> str:
        running.append(query)
        await asyncio.sleep(0.05 if query == "one" else 0)
        together.append(len(running))
        return f"about {query}"

    search = tool(find)
    session = session_for(search)
    both = calls(tool_call("search", {"query": "one"}, id="a"), tool_call("search", {"query": "two"}, id="b"))
    await arun(session, "Q", ScriptedModel([both, "x"]), [search], {"call_critic": ScriptedCritic([])})
    assert together == [2, 2], "both had started before either was done"
    results = [(m.get("tool_call_id"), m["content"]) for m in session.transcript()[2:4]]
    assert results == [("a", "about one"), ("b", "about two")]


async def test_a_tools_result_of_another_type_is_its_text() -> None:
    search = tool(lambda query: {"hits": 3})
    session = session_for(search)
    await arun(session, "Q", ScriptedModel([SEARCH, "x"]), [search], {"call_critic": ScriptedCritic([])})
    assert session.transcript()[2]["content"] == "{'hits': 3}"


@pytest.mark.parametrize(
    ("critique", "status"),
    [
        (RuntimeError("bug in the critic"), "failed"),
        (TimeoutError(), "timeout"),
        (asyncio.CancelledError(), "failed"),
        (Critique(status="malformed", raw="junk"), "malformed"),
        (Critique(status="context_overflow"), "context_overflow"),
        (Critique(), "malformed"),
    ],
    ids=str,
)
async def test_a_critic_that_fails_never_stops_the_agent(critique: Any, status: str) -> None:
    session = session_for()
    critics = {"call_critic": ScriptedCritic([critique])}
    end = await arun(session, "Q", ScriptedModel([ASK, "The Elbe"]), (), critics)
    assert end == Finish("The Elbe", "answer")
    assert session.consultations[0]["critique"]["status"] == status
    told = str(session.transcript()[2]["content"])
    assert f"none this time ({status.replace('_', ' ')})" in told
    assert "bug in the critic" not in told
    if isinstance(critique, RuntimeError):
        assert session.consultations[0]["critique"]["detail"] == "RuntimeError: bug in the critic"


async def test_a_critic_that_returns_something_else_never_stops_the_agent() -> None:
    critics: dict[str, Any] = {"call_critic": ScriptedCritic([])}
    for wrong in (None, "Look again.", {"advice": "x"}):
        critics["call_critic"].acritique = lambda state, wrong=wrong: asyncio.sleep(0, wrong)
        session = session_for()
        assert (await arun(session, "Q", ScriptedModel([ASK, "E"]), (), critics)).answer == "E"
        assert session.consultations[0]["critique"]["status"] == "failed"
        assert type(wrong).__name__ in session.consultations[0]["critique"]["detail"]


class Hanging:
    """A critic that never answers."""

    def critique(self, state: ConsultState) -> Critique:
        raise AssertionError("the loop asks asynchronously")

    async def acritique(self, state: ConsultState) -> Critique:
        await asyncio.sleep(60)
        raise AssertionError("not cancelled")


async def test_a_critic_that_hangs_is_given_up_after_the_timeout() -> None:
    session = session_for(timeout=0.1)
    started = time.monotonic()
    end = await arun(session, "Q", ScriptedModel([ASK, "The Elbe"]), (), {"call_critic": Hanging()})
    assert end.answer == "The Elbe"
    assert 0.1 <= time.monotonic() - started < 30
    critique = session.consultations[0]["critique"]
    assert critique["status"] == "timeout"
    assert "0.1 s" in critique["detail"]
    assert critique["seconds"] >= 0.1


async def test_a_cancelled_run_leaves_a_session_that_goes_on() -> None:
    session = session_for()
    critics: dict[str, Any] = {"call_critic": Hanging()}
    task = asyncio.create_task(arun(session, "Q", ScriptedModel([ASK]), (), critics))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(session.command, Consult)
    again = Session.load(json.loads(json.dumps(session.dump())))
    end = await arun(again, None, ScriptedModel(["The Elbe"]), (), {"call_critic": ScriptedCritic(ADVICE)})
    assert end.answer == "The Elbe"
    assert len(again.consultations) == 1


async def test_on_error_raise_comes_out_and_the_session_still_waits() -> None:
    session = session_for(on_error="raise")
    failing = {"call_critic": ScriptedCritic([Critique(status="unavailable", detail="down")])}
    with pytest.raises(ConsultationError, match=r"unavailable.*down"):
        await arun(session, "Q", ScriptedModel([ASK]), (), failing)
    end = await arun(session, None, ScriptedModel(["E"]), (), {"call_critic": ScriptedCritic(ADVICE)})
    assert end == Finish("E", "answer")


async def test_a_model_whose_context_overflows_ends_the_trajectory() -> None:
    search = tool(lambda query: "x")
    session = session_for(search, min_steps=1)
    model = ScriptedModel(["A guess", SEARCH, ContextOverflow("too long")])
    end = await arun(session, "Q", model, [search], {"call_critic": ScriptedCritic([])})
    assert end == Finish("A guess", "context_overflow")
    driver.check_canonical(session.transcript())


async def test_a_model_that_is_down_raises_and_the_session_stays_where_it_was() -> None:
    search = tool(lambda query: "x")
    session = session_for(search)
    critics = {"call_critic": ScriptedCritic([])}
    with pytest.raises(EndpointUnavailable):
        await arun(session, "Q", ScriptedModel([SEARCH, EndpointUnavailable("down")]), [search], critics)
    assert isinstance(session.command, CallModel)
    again = Session.load(session.dump())
    assert (await arun(again, None, ScriptedModel(["E"]), [search], critics)).answer == "E"
    assert again.step == 1


async def test_a_control_without_a_critic_is_refused_before_anything_is_asked() -> None:
    model = ScriptedModel(["never asked"])
    with pytest.raises(ConfigError, match="call_critic"):
        await arun(session_for(), "Q", model, ())
    assert model.seen == []
    assert (await arun(session_for(protocol=Never()), "Q", ScriptedModel(["E"]), ())).answer == "E"
    assert (await arun(session_for(controls=(), protocol=SelfCall()), "Q", ScriptedModel(["E"]), ())).answer == "E"


async def test_a_chat_goes_on_in_the_same_session() -> None:
    session = session_for()
    critics = {"call_critic": ScriptedCritic([])}
    await arun(session, "one", ScriptedModel(["first"]), (), critics)
    end = await arun(session, "two", ScriptedModel(["second"]), (), critics)
    assert end.answer == "second"
    assert [m["content"] for m in session.transcript()] == ["one", "first", "two", "second"]
    assert (await arun(session, None, ScriptedModel([]), (), critics)) == end, "nothing left to do"
