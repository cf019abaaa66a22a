"""Running out: of steps, of LangGraph's own recursion limit, of context."""

from __future__ import annotations

from typing import Any

import pytest
from graph_kit import THREAD, WAYS, Invoke, check_thread, contents, critic, look, search
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError

from caddie_sdk import Budget, create_caddie_agent
from caddie_sdk.errors import ContextOverflow
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, tool_call

SEARCH, CRITIC, FEEDBACK = tool_call("search", {"query": "a"}), tool_call("call_critic"), tool_call("request_feedback")
RESTLESS = {
    "searches": calls(SEARCH, text="still looking"),
    "asks and searches": calls(SEARCH, CRITIC, text="still looking"),
    "asks both and searches": calls(FEEDBACK, SEARCH, CRITIC, text="still looking"),
    "asks only": calls(CRITIC, FEEDBACK, text="still looking"),
    "guarded": calls(tool_call("refund", {"query": "7"}), text="still looking"),
    "nothing legal": "",
}


@pytest.fixture(params=WAYS)
def invoke(request: pytest.FixtureRequest) -> Invoke:
    return WAYS[request.param]


def refund(query: str) -> str:
    """Pay back."""
    return "refunded"


def restless(kind: str, protocol: str, **budget: Any) -> tuple[Any, ScriptedModel]:
    """An agent that never stops by itself; with its tools taken away it answers."""

    def reply(call: Any) -> Any:
        return "best guess" if call.tool_choice == "none" else RESTLESS[kind]

    model = ScriptedModel(reply)
    agent = create_caddie_agent(
        model,
        [search, refund],
        critic=critic(),
        feedback=ScriptedCritic(lambda state: ("", "go on")),
        protocol=protocol,
        budget=Budget(max_uses=10_000, max_rejections=10_000, **budget),
        checkpointer=InMemorySaver(),
    )
    return agent, model


@pytest.mark.parametrize("protocol", ["self-call", "probabilistic:1", "guarded:refund;repeats=1", "off"])
@pytest.mark.parametrize("kind", RESTLESS)
def test_langgraphs_limit_gives_the_best_answer(kind: str, protocol: str) -> None:
    """Whatever the agent does, at every limit: no exception, a reason, and an answer once one call has fitted in."""
    for limit in [*range(2, 18), 25, 60]:
        agent, model = restless(kind, protocol)
        output = agent.invoke({"messages": "Where?"}, {**THREAD, "recursion_limit": limit})
        assert output["reason"] == "max_steps", limit
        assert output["answer"] == ("best guess" if model.seen else None), limit
        assert bool(model.seen) == (limit >= 4 if protocol.startswith("probabilistic") else limit >= 3), limit
        if model.seen:
            assert model.seen[-1].tool_choice == "none"
        check_thread(agent, THREAD)
        # The limit is not reached by giving up early: most of it is used.
        if limit >= 25:
            assert len(model.seen) >= limit // 6


@pytest.mark.parametrize("limit", [5, 9, 25])
def test_langgraphs_limit_async(limit: int) -> None:
    agent, _ = restless("asks both and searches", "self-call")
    output = WAYS["async"](agent, {"messages": "Where?"}, {**THREAD, "recursion_limit": limit})
    assert (output["answer"], output["reason"]) == ("best guess", "max_steps")


def test_a_thread_goes_on_after_langgraphs_limit(invoke: Invoke) -> None:
    agent, model = restless("searches", "self-call")
    invoke(agent, {"messages": "Where?"}, {**THREAD, "recursion_limit": 7})
    first = len(model.seen)
    output = invoke(agent, {"messages": "And Bob?"}, {**THREAD, "recursion_limit": 12})
    assert len(model.seen) > first + 2
    assert contents(output, "user") == ["Where?", "And Bob?"]
    assert output["answer"] == "best guess"


def test_resuming_under_a_tiny_limit(invoke: Invoke) -> None:
    """A resumed run counts anew; with room for the critic and the tools only, the tools end the work."""
    model = ScriptedModel([calls(SEARCH, CRITIC), "Paris"])
    agent = create_caddie_agent(
        model, [search], critic=critic(), checkpointer=InMemorySaver(), interrupt_before=["critic"]
    )
    agent.invoke({"messages": "Where?"}, THREAD)
    output = invoke(agent, None, {**THREAD, "recursion_limit": 1})
    assert (output["answer"], output["reason"]) == (None, "max_steps")
    assert contents(output, "tool")[0] == "found: a"
    assert contents(output, "tool")[1].startswith("Critic feedback:")
    check_thread(agent, THREAD)


def test_a_limit_that_no_graph_can_keep_is_langgraphs_error() -> None:
    """With 1 not even a graph of one node can end; that is LangGraph's to say."""
    agent, _ = restless("searches", "self-call")
    with pytest.raises(GraphRecursionError):
        agent.invoke({"messages": "Where?"}, {**THREAD, "recursion_limit": 1})


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_max_steps(steps: int, invoke: Invoke) -> None:
    agent, model = restless("searches", "self-call", max_steps=steps)
    output = invoke(agent, {"messages": "Where?"}, THREAD)
    assert (output["answer"], output["reason"]) == ("best guess", "max_steps")
    assert contents(output, "tool") == ["found: a"] * steps
    assert [call.tool_choice for call in model.seen] == ["auto"] * steps + ["none"]


def test_default_is_forty_steps() -> None:
    model = ScriptedModel(lambda call: "best guess" if call.tool_choice == "none" else look())
    output = create_caddie_agent(model, [search]).invoke({"messages": "Where?"})
    assert (output["answer"], output["reason"]) == ("best guess", "max_steps")
    assert contents(output, "tool") == ["found: Ada"] * 40


def test_own_budget_without_max_steps_is_not_cut_by_langgraph() -> None:
    """LangGraph's default of 25 super-steps must not be what ends a longer task."""
    turns = [look()] * 60 + ["Paris"]
    output = create_caddie_agent(ScriptedModel(turns), [search], budget=Budget()).invoke({"messages": "Where?"})
    assert (output["answer"], output["reason"]) == ("Paris", "answer")
    assert len(contents(output, "tool")) == 60


@pytest.mark.parametrize("silent", ["", "<think>hm</think>"])
def test_limit_with_a_model_that_says_nothing(silent: str, invoke: Invoke) -> None:
    model = ScriptedModel(lambda call: silent if call.tool_choice == "none" else look())
    agent = create_caddie_agent(model, [search], budget=Budget(max_steps=1), checkpointer=InMemorySaver())
    output = invoke(agent, {"messages": "Where?"}, THREAD)
    assert output["reason"] == "max_steps"
    assert output["answer"] is None
    check_thread(agent, THREAD)


def test_context_overflow_ends_the_turn_and_not_the_thread(invoke: Invoke) -> None:
    model = ScriptedModel([look(), ContextOverflow("http://x: the prompt does not fit"), "Lyon"])
    agent = create_caddie_agent(model, [search], checkpointer=InMemorySaver())
    output = invoke(agent, {"messages": "Where?"}, THREAD)
    assert (output["answer"], output["reason"]) == (None, "context_overflow")
    assert contents(output, "tool") == ["found: Ada"]
    assert invoke(agent, {"messages": "And Bob?"}, THREAD)["answer"] == "Lyon"
    check_thread(agent, THREAD)


def test_context_overflow_keeps_the_draft(invoke: Invoke) -> None:
    model = ScriptedModel(["Paris", look(), ContextOverflow("too long")])
    agent = create_caddie_agent(model, [search], budget=Budget(min_steps=2))
    output = invoke(agent, {"messages": "Where?"}, {})
    assert (output["answer"], output["reason"]) == ("Paris", "context_overflow")
