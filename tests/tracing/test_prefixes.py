"""Every prefix of a recording is the state the session was really in, and goes on from there."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from session_driver import answer_in, configs, finish, scripts, states, step_in
from trace_kit import ASK, SCRIPT, finished, look

from caddie_sdk import CallModel, Consult, Finish, Guarded, Session, Windowed
from caddie_sdk.errors import SessionError
from caddie_sdk.testing import calls, check_wire, tool_call
from caddie_sdk.tracing import prefixes

STATE = ("trajectory", "step", "uses", "session_uses", "rejections", "repeats", "last_action", "fresh_advice",
         "closing", "draft", "consultations", "remaining")  # fmt: skip


def facts(session: Session) -> dict[str, Any]:
    """What a continuation depends on, beside the configuration."""
    path = [(node.id, node.kind, node.step, node.message, dict(node.meta)) for node in session.history.path()]
    return {**{name: getattr(session, name) for name in STATE}, "path": path}


def starts(config: Any, numbers: list[int]) -> tuple[Session, dict[int, dict[str, Any]]]:
    """A nasty run up to the end of its last finished trajectory, and the state at the start of each of its steps.

    Runs in which the user spoke in the middle of step 0, where a history cannot tell that from a new task, end there.
    """
    seen: dict[int, dict[str, Any]] = {}
    ended: tuple[Session, dict[int, dict[str, Any]]] = Session(config), {}
    trajectory, begin, waiting = -1, 0, None
    for session, command, _ in states(config, numbers):
        path = session.history.path()
        if session.trajectory != trajectory:
            trajectory, begin, seen, waiting = session.trajectory, len(path), {}, None
        if waiting is not None:
            new = [node.kind for node in path[len(waiting["path"]) :]]
            spoke = new == ["task"] and len(session.consultations) == len(waiting["consultations"])
            if not spoke:
                seen.setdefault(waiting["step"], waiting)
        elif path[-1].kind == "task" and session.step == 0 and len(path) > 1 and path[-2].kind == "notice":
            return ended
        forced = isinstance(command, Consult) and not (session.turn or {}).get("calls")
        at_start = session.step not in seen and (isinstance(command, CallModel) or forced)
        waiting = facts(session.fork()) if at_start else None
        if isinstance(command, Finish):
            acted = {node.step for node in path[begin:] if node.kind == "action"}
            ended = session.fork(), {step: state for step, state in seen.items() if step in acted}
    return ended


@given(configs(), scripts)
@settings(max_examples=300, deadline=None)
def test_a_prefix_is_the_state_the_session_was_in(config: Any, numbers: list[int]) -> None:
    recorded, seen = starts(config, numbers)
    before = recorded.dump()
    loaded = Session.load(json.loads(json.dumps(before)))
    found = {prefix.k: facts(prefix.session) for prefix in prefixes(loaded)}
    assert found.keys() >= seen.keys()
    for k, state in seen.items():
        assert found[k] == state, k
    assert loaded.dump() == before


@given(configs(bounded=True), scripts)
@settings(max_examples=100, deadline=None)
def test_every_prefix_loads_asks_the_model_and_goes_on_to_an_answer(config: Any, numbers: list[int]) -> None:
    recorded, _ = starts(config, numbers)
    for prefix in prefixes(recorded):
        session = Session.load(json.loads(json.dumps(prefix.session.dump())))
        assert isinstance(session.command, CallModel)
        check_wire(session.command.messages)
        assert session.step == prefix.k
        assert not session.history.archived
        end, _ = finish(session, partial(_act_then_answer, session), limit=60)
        assert end.reason in ("answer", "max_steps", "stuck", "malformed")


def _act_then_answer(session: Session, _: CallModel) -> Any:
    if session.step < session.config.budget.min_steps and session.config.tools:
        return step_in(session.config.format)
    return {"role": "assistant", "content": answer_in(session.config.format)}


def test_the_prefixes_of_a_plain_run() -> None:
    found = list(prefixes(finished()))
    assert [(prefix.k, prefix.consulted, prefix.session.uses) for prefix in found] == [
        (0, False, 0), (1, True, 0), (2, True, 1), (3, False, 2),
    ]  # fmt: skip
    assert [len(prefix.session.transcript()) for prefix in found] == [1, 3, 7, 10]
    assert [event.kind for event in found[3].events()] == [
        "task", "step", "proposal", "advice", "step", "proposal", "advice", "outcome",
    ]  # fmt: skip
    assert found[3].session.critic_usage.prompt_tokens == 14
    assert "Paris" not in json.dumps(found[3].session.dump())


def test_what_the_protocol_forced_at_a_step_is_not_part_of_its_prefix() -> None:
    recorded = finished([look("a"), look("b"), "Paris"], protocol=Windowed(1, 1))
    one = next(prefix for prefix in prefixes(recorded) if prefix.k == 1)
    assert one.consulted
    assert (one.session.uses, one.session.consultations) == (0, [])
    assert isinstance(one.session.command, CallModel)
    assert [message["role"] for message in one.session.transcript()] == ["user", "assistant", "tool"]
    # The consultation of this step has had its say: who branches here asks for advice, or none, on their own.
    assert isinstance(one.session.fork().model_replied({"role": "assistant", "content": "Rome"}), Finish)


def test_a_held_call_counts_for_the_step_it_was_proposed_at() -> None:
    recorded = finished([look("a"), look("a"), "Paris"], protocol=Guarded(("search",)))
    found = list(prefixes(recorded))
    assert [(prefix.k, prefix.consulted) for prefix in found] == [(0, True), (1, False)]
    assert [message["role"] for message in found[1].session.transcript()] == [
        "user", "assistant", "tool", "assistant", "tool", "assistant", "tool",
    ]  # fmt: skip


def test_only_the_latest_turn_of_a_chat_is_cut_and_the_earlier_ones_are_its_history() -> None:
    session = finished()
    session.user_said("And then?")
    session.model_replied(calls(tool_call("search", {"query": "d"})))
    session.tools_returned([{"id": session.history.path()[-1].message["tool_calls"][0]["id"], "content": "found"}])
    session.model_replied({"role": "assistant", "content": "Rome"})
    first, second = prefixes(session)
    earlier = len(finished().transcript())
    assert [len(prefix.session.transcript()) for prefix in (first, second)] == [earlier + 1, earlier + 3]
    assert (first.session.uses, first.session.session_uses, first.session.trajectory) == (0, 2, 1)
    assert len(first.session.consultations) == 2


@pytest.mark.parametrize("stop_at", ["model", "tools", "critic"])
def test_work_that_was_stopped_from_outside_has_prefixes_up_to_there(stop_at: str) -> None:
    full = finished()
    session = Session(full.config)
    session.user_said("Where?")
    session.model_replied(look("a"))
    if stop_at != "tools":
        call = session.command.calls[0]  # type: ignore[union-attr]
        session.tools_returned([{"id": call.id, "content": "found"}])
    if stop_at == "critic":
        session.model_replied(ASK)
    assert session.phase == stop_at
    session.stop("cancelled")
    assert [prefix.k for prefix in prefixes(session)] == ([0, 1] if stop_at == "critic" else [0])


def test_a_history_that_its_caller_kept_has_prefixes_too() -> None:
    config = replace(finished().config, protocol=Guarded(("search",)), caller_owned=True, controls=("call_critic",))
    session = Session(config)
    with session.observe():
        session.user_said("Where?")
        for query in ("a", "b"):
            session.model_replied(calls(tool_call("search", {"query": query}, id=query)))
            session.tools_returned([{"id": query, "content": f"found {query}"}])
        session.overheard({"role": "system", "content": "Be brief."})
    session.resume()
    session.model_replied({"role": "assistant", "content": "Paris"})
    found = list(prefixes(Session.load(json.loads(json.dumps(session.dump())))))
    assert [(prefix.k, len(prefix.session.transcript())) for prefix in found] == [(0, 1), (1, 3), (2, 6)]
    # Live, the protocol has its say again.
    assert isinstance(found[1].session.model_replied(look("b")), Consult)


def test_an_edited_recording_is_refused() -> None:
    dump = json.loads(json.dumps(finished(SCRIPT).dump()))
    dump["history"]["nodes"][4]["message"]["content"] = "somebody else's words"
    with pytest.raises(SessionError, match="departs from the session's rules at message 4"):
        list(prefixes(Session.load(dump)))


def test_a_session_without_a_task_has_none() -> None:
    assert list(prefixes(Session())) == []
