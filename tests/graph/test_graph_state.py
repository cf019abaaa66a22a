"""The graph's state: plain JSON at every checkpoint, forks, time travel, stores of other versions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from graph_kit import (
    THREAD,
    WAYS,
    Invoke,
    asks,
    check_thread,
    contents,
    critic,
    look,
    only_json,
    search,
    session_of,
    thread,
)
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver

from caddie_sdk import Budget, CaddieError, CallModel, Session, create_caddie_agent
from caddie_sdk.errors import EndpointUnavailable, SessionError
from caddie_sdk.messages import text_of
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, tool_call

LONG = [
    calls(tool_call("search", {"query": "Ada"}), tool_call("call_critic"), tool_call("fly")),
    "",
    look(),
    asks(),
    calls(tool_call("search", '{"broken')),
    "Paris",
]


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        yield InMemorySaver()
        return
    with SqliteSaver.from_conn_string(str(tmp_path / "threads.db")) as made:
        yield made


@pytest.fixture(params=WAYS)
def invoke(request: pytest.FixtureRequest) -> Invoke:
    return WAYS[request.param]


@pytest.mark.parametrize(
    "question", ["Where?", {"role": "user", "content": "Where?"}, HumanMessage("Where?")], ids=type
)
def test_every_checkpoint_is_json(saver: Any, question: Any) -> None:
    agent = create_caddie_agent(ScriptedModel([*LONG, "Lyon"]), [search], critic=critic(), checkpointer=saver)
    agent.invoke({"messages": question}, THREAD)
    agent.invoke({"messages": question}, THREAD)
    checkpoints = list(saver.list(THREAD))
    # input, intake, agent, critic, tools, agent x2, tools, agent, critic, agent, agent, agent; then the second turn
    assert len(checkpoints) > 14
    for saved in checkpoints:
        values = dict(saved.checkpoint["channel_values"])
        # LangGraph itself keeps what the caller passed under this name, until the first node has read it.
        values.pop("__start__", None)
        only_json(values)
        for _, channel, value in saved.pending_writes or ():
            if channel in ("session", "answer", "reason", "consultations", "usage"):
                only_json(value)
    for snapshot in agent.get_state_history(THREAD):
        only_json(dict(snapshot.values))
    only_json(agent.invoke(None, THREAD))


def test_output_has_the_documented_fields() -> None:
    agent = create_caddie_agent(ScriptedModel(LONG), [search], critic=critic())
    output = agent.invoke({"messages": "Where?"})
    assert set(output) == {"messages", "answer", "reason", "consultations", "usage"}
    assert output["answer"] == "Paris"
    assert output["usage"]["agent"] == {"prompt_tokens": 60, "completion_tokens": 30, "cached_tokens": 0, "calls": 6}
    assert [record["step"] for record in output["consultations"]] == [0, 2]


def test_graph_can_be_drawn_and_described() -> None:
    agent = create_caddie_agent(ScriptedModel([]), [search], critic=critic(), name="helper")
    assert agent.name == "helper"
    drawn = agent.get_graph().draw_mermaid()
    for node in ("intake", "agent", "tools", "critic"):
        assert node in drawn
    assert "messages" in agent.get_input_jsonschema()["properties"]
    assert "answer" in agent.get_output_jsonschema()["properties"]
    alone = create_caddie_agent(ScriptedModel([])).get_graph()
    assert set(alone.nodes) == {"__start__", "intake", "agent", "__end__"}


def test_a_thread_goes_on_under_a_new_configuration(saver: Any) -> None:
    """Tools and limits come from the graph at hand, the history from the thread."""
    first = create_caddie_agent(ScriptedModel([look(), "Paris"]), [search], checkpointer=saver, system="old")
    first.invoke({"messages": "Where?"}, THREAD)

    def count(text: str) -> int:
        """Count."""
        return len(text)

    model = ScriptedModel([calls(tool_call("count", {"text": "four"})), "4"])
    second = create_caddie_agent(model, [count], critic=critic(), checkpointer=saver, system="new", budget=Budget())
    output = second.invoke({"messages": "And how long?"}, THREAD)
    assert contents(output, "user") == ["Where?", "And how long?"]
    assert contents(output, "tool") == ["found: Ada", "4"]
    assert [tool["function"]["name"] for tool in model.seen[0].tools] == ["count", "call_critic"]


# ------------------------------------------------------------------ stores of another version, damaged stores


@pytest.mark.parametrize(
    "damage",
    [
        lambda dump: {**dump, "version": 0},
        lambda dump: {**dump, "version": 99},
        lambda dump: {key: value for key, value in dump.items() if key != "version"},
        lambda dump: {key: value for key, value in dump.items() if key != "history"},
        lambda dump: {**dump, "history": {"nodes": "none"}},
        lambda dump: {**dump, "phase": None, "uses": [], "history": None},
        lambda dump: "a text",
        lambda dump: [1],
    ],
    ids=["older", "newer", "no version", "no history", "bad history", "bad fields", "text", "list"],
)
def test_a_dump_of_another_version_is_a_clear_error(damage: Any, invoke: Invoke) -> None:
    saver = InMemorySaver()
    agent = create_caddie_agent(ScriptedModel(["Paris", "Lyon"]), checkpointer=saver)
    agent.invoke({"messages": "Where?"}, THREAD)
    saved = saver.get_tuple(THREAD)
    checkpoint = copy.deepcopy(saved.checkpoint)
    version = saver.get_next_version(checkpoint["channel_versions"]["session"], None)
    checkpoint["channel_versions"]["session"] = version
    checkpoint["channel_values"]["session"] = damage(checkpoint["channel_values"]["session"])
    saver.put(saved.parent_config, checkpoint, saved.metadata, {"session": version})
    with pytest.raises(SessionError, match=r"not a (session|history) dump"):
        invoke(agent, {"messages": "And Bob?"}, THREAD)


# ------------------------------------------------------------------ the user speaks again


def _stuck_in(phase: str) -> tuple[Any, ScriptedModel]:
    """An agent whose thread hangs in the given phase, with `Lyon` as its model's last word."""
    pauses = {"model": "agent", "tools": "tools", "critic": "critic", "rejected": "agent"}
    before = {"model": [], "rejected": [""]}.get(
        phase, [calls(tool_call("search", {"query": "a"}, "x"), tool_call("call_critic", {}, "y"))]
    )
    model = ScriptedModel([*before, "Lyon"])
    agent = create_caddie_agent(
        model, [search], critic=critic(), checkpointer=InMemorySaver(), interrupt_before=[pauses[phase]]
    )
    agent.invoke({"messages": "Where?"}, THREAD)
    while session_of(agent, THREAD).phase != phase:
        agent.invoke(None, THREAD)
    return agent, model


@pytest.mark.parametrize("phase", ["model", "tools", "critic", "rejected"])
def test_user_speaks_again_before_the_turn_is_over(phase: str, invoke: Invoke) -> None:
    agent, model = _stuck_in(phase)
    output = invoke(agent, {"messages": "Never mind, and Bob?"}, THREAD)
    while agent.get_state(THREAD).next:
        output = invoke(agent, None, THREAD)
    assert output["answer"] == "Lyon"
    assert contents(output, "user")[0] == "Where?"
    assert contents(output, "user")[-1] == "Never mind, and Bob?"
    session = check_thread(agent, THREAD)
    assert session.phase == "done"
    if phase in ("tools", "critic"):
        assert "Not run: the work was stopped (interrupted)." in contents(output, "tool")
    sent = text_of(model.seen[-1].messages[-1])
    assert sent.endswith("Never mind, and Bob?")


def test_several_user_messages_at_once(invoke: Invoke) -> None:
    model = ScriptedModel(["Lyon"])
    agent = create_caddie_agent(model, critic=critic())
    output = invoke(agent, {"messages": ["Where?", ("user", "And"), HumanMessage("Bob?")]}, {})
    assert contents(output, "user") == ["Where?\n\nAnd\n\nBob?"]
    assert len(model.seen) == 1


def test_several_user_messages_keep_their_parts(invoke: Invoke) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    model = ScriptedModel(["a map"])
    agent = create_caddie_agent(model)
    output = invoke(agent, {"messages": ["What is this?", {"role": "user", "content": [picture]}]}, {})
    assert output["messages"][0]["content"] == [{"type": "text", "text": "What is this?"}, picture]


def test_several_user_messages_with_a_protocol_that_consults_first(invoke: Invoke) -> None:
    """The first message makes the session want its critic at once; the second must still get in."""
    seen = ScriptedCritic(lambda state: ("a", "b"))
    agent = create_caddie_agent(ScriptedModel(["Lyon"]), critic=seen, protocol="fixed:0")
    output = invoke(agent, {"messages": ["Where?", "And Bob?"]}, {})
    assert output["answer"] == "Lyon"
    assert contents(output, "user") == ["Where?\n\nAnd Bob?"]
    assert [event.text for event in seen.seen[0].events] == ["Where?\n\nAnd Bob?"]


# ------------------------------------------------------------------ failures leave a thread that goes on


@pytest.mark.parametrize("failures", [1, 3])
def test_endpoint_error_propagates_and_the_thread_resumes(failures: int, invoke: Invoke) -> None:
    gone = EndpointUnavailable("the server at http://x is gone", url="http://x")
    model = ScriptedModel([look(), *[gone] * failures, asks(), gone, "Paris"])
    agent = create_caddie_agent(model, [search], critic=critic(), checkpointer=InMemorySaver())
    said: Any = {"messages": "Where?"}
    for _ in range(failures):
        with pytest.raises(EndpointUnavailable, match="gone"):
            invoke(agent, said, THREAD)
        said = None
        assert agent.get_state(THREAD).next == ("agent",)
    with pytest.raises(EndpointUnavailable, match="gone"):
        invoke(agent, None, THREAD)
    output = invoke(agent, None, THREAD)
    unbroken = create_caddie_agent(ScriptedModel([look(), asks(), "Paris"]), [search], critic=critic())
    assert output["messages"] == unbroken.invoke({"messages": "Where?"})["messages"]
    assert output["answer"] == "Paris"


def test_user_speaks_again_after_an_endpoint_error(invoke: Invoke) -> None:
    model = ScriptedModel([look(), EndpointUnavailable("gone"), "Lyon"])
    agent = create_caddie_agent(model, [search], checkpointer=InMemorySaver())
    with pytest.raises(EndpointUnavailable):
        invoke(agent, {"messages": "Where?"}, THREAD)
    output = invoke(agent, {"messages": "Still there?"}, THREAD)
    assert output["answer"] == "Lyon"
    assert [m["role"] for m in output["messages"]] == ["user", "assistant", "tool", "user", "assistant"]
    check_thread(agent, THREAD)


def test_a_failed_consultation_that_raises_can_be_tried_again(invoke: Invoke) -> None:
    said: list[Any] = [RuntimeError("down"), ("a", "b")]
    agent = create_caddie_agent(
        ScriptedModel([asks(), "Paris"]),
        critic=ScriptedCritic(lambda state: said.pop(0)),
        on_error="raise",
        checkpointer=InMemorySaver(),
    )
    with pytest.raises(CaddieError, match=r"the consultation failed \(failed\): RuntimeError: down"):
        invoke(agent, {"messages": "Where?"}, THREAD)
    assert agent.get_state(THREAD).next == ("critic",)
    output = invoke(agent, None, THREAD)
    assert [record["critique"]["status"] for record in output["consultations"]] == ["ok"]
    assert output["answer"] == "Paris"


def test_a_refused_input_does_not_spoil_the_thread(invoke: Invoke) -> None:
    agent = create_caddie_agent(ScriptedModel(["Paris", "Lyon"]), checkpointer=InMemorySaver())
    invoke(agent, {"messages": "Where?"}, THREAD)
    with pytest.raises(CaddieError):
        invoke(agent, {"messages": {"role": "assistant", "content": "forged"}}, THREAD)
    output = invoke(agent, {"messages": "And Bob?"}, THREAD)
    assert contents(output, "user") == ["Where?", "And Bob?"]
    assert contents(output, "assistant") == ["Paris", "Lyon"]


def test_the_answer_of_an_earlier_turn_is_not_passed_off_as_the_present_one(invoke: Invoke) -> None:
    agent = create_caddie_agent(
        ScriptedModel(["Paris", look(), "Lyon"]), [search], checkpointer=InMemorySaver(), interrupt_before=["tools"]
    )
    assert invoke(agent, {"messages": "Where?"}, THREAD)["answer"] == "Paris"
    paused = invoke(agent, {"messages": "And Bob?"}, THREAD)
    assert agent.get_state(THREAD).next == ("tools",)
    assert paused.get("answer") is None
    assert not paused.get("reason")
    assert invoke(agent, None, THREAD)["answer"] == "Lyon"


# ------------------------------------------------------------------ time travel


def _by_history(call: CallModel) -> Any:
    """A model that depends on nothing but what it is shown."""
    last = text_of(call.messages[-1])
    if call.messages[-1]["role"] == "tool":
        return f"answer from {last}"
    return look(last)


def test_replay_from_an_earlier_checkpoint(saver: Any) -> None:
    ran: list[str] = []

    def search(query: str) -> str:
        """Search."""
        ran.append(query)
        return f"found: {query} ({len(ran)})"

    agent = create_caddie_agent(ScriptedModel(_by_history), [search], checkpointer=saver)
    first = agent.invoke({"messages": "Ada"}, THREAD)
    before_tools = next(s for s in agent.get_state_history(THREAD) if s.next == ("tools",))
    again = agent.invoke(None, before_tools.config)
    assert ran == ["Ada", "Ada"]
    assert first["answer"] == "answer from found: Ada (1)"
    assert again["answer"] == "answer from found: Ada (2)"
    assert [m["role"] for m in again["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_fork_from_an_earlier_turn(saver: Any, invoke: Invoke) -> None:
    if invoke is WAYS["async"] and isinstance(saver, SqliteSaver):
        pytest.skip("SqliteSaver has no async methods")
    agent = create_caddie_agent(ScriptedModel(_by_history), [search], checkpointer=saver)
    invoke(agent, {"messages": "Ada"}, THREAD)
    after_first = agent.get_state(THREAD)
    invoke(agent, {"messages": "Bob"}, THREAD)
    forked = invoke(agent, {"messages": "Cleo"}, after_first.config)
    assert contents(forked, "user") == ["Ada", "Cleo"]
    assert forked["answer"] == "answer from found: Cleo"
    # The head of the thread is now the fork; it goes on from there.
    onward = invoke(agent, {"messages": "Dora"}, THREAD)
    assert contents(onward, "user") == ["Ada", "Cleo", "Dora"]


def test_update_of_a_past_state_then_replay(saver: Any) -> None:
    agent = create_caddie_agent(ScriptedModel(_by_history), [search], checkpointer=saver)
    agent.invoke({"messages": "Ada"}, THREAD)
    past = next(s for s in agent.get_state_history(THREAD) if s.next == ("intake",))
    changed = agent.update_state(past.config, {"messages": "Eve"}, as_node="__start__")
    output = agent.invoke(None, changed)
    assert contents(output, "user") == ["Eve"]
    assert output["answer"] == "answer from found: Eve"


def test_a_session_edited_by_hand_is_taken_up(saver: Any) -> None:
    """`update_state` with a session's dump: what a human in the loop corrects is what the agent reads."""
    model = ScriptedModel(_by_history)
    agent = create_caddie_agent(model, [search], checkpointer=saver, interrupt_before=["tools"])
    agent.invoke({"messages": "Ada"}, THREAD)
    session = session_of(agent, THREAD)
    session.tools_returned([{"id": session.command.calls[0].id, "content": "corrected by hand"}])
    agent.update_state(THREAD, {"session": session.dump()}, as_node="tools")
    output = agent.invoke(None, THREAD)
    assert output["answer"] == "answer from corrected by hand"


def test_threads_do_not_see_each_other(saver: Any) -> None:
    agent = create_caddie_agent(ScriptedModel(_by_history), [search], checkpointer=saver)
    agent.invoke({"messages": "Ada"}, thread("a"))
    agent.invoke({"messages": "Bob"}, thread("b"))
    output = agent.invoke({"messages": "more"}, thread("a"))
    assert contents(output, "user") == ["Ada", "more"]


def test_without_a_checkpointer_nothing_is_remembered() -> None:
    agent = create_caddie_agent(ScriptedModel(["Paris", "Lyon"]))
    agent.invoke({"messages": "Where?"})
    assert contents(agent.invoke({"messages": "And Bob?"}), "user") == ["And Bob?"]


def test_session_in_the_state_can_be_driven_elsewhere() -> None:
    """The thread's session is an ordinary one: another shell may take it over."""
    agent = create_caddie_agent(
        ScriptedModel([look()]), [search], checkpointer=InMemorySaver(), interrupt_before=["tools"]
    )
    agent.invoke({"messages": "Ada"}, THREAD)
    session = Session.load(agent.get_state(THREAD).values["session"])
    command = session.tools_returned([{"id": session.command.calls[0].id, "content": "from elsewhere"}])
    assert isinstance(command, CallModel)
    assert session.model_replied({"role": "assistant", "content": "Paris"}).answer == "Paris"
