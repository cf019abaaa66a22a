"""What holds in every session, whatever the model, the tools, the critic and the user do (SPEC §4, rules 1-8)."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import pytest
import session_driver as driver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caddie_sdk.actions import Call
from caddie_sdk.budget import Budget
from caddie_sdk.commands import CallModel, Consult, Finish, Reject, RunTools, ToolResult
from caddie_sdk.config import SessionConfig
from caddie_sdk.errors import SessionError
from caddie_sdk.session import Session
from caddie_sdk.testing import check_wire

quick = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
slower = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(driver.configs(), driver.scripts)
def test_every_request_satisfies_the_strictest_server(config: SessionConfig, numbers: list[int]) -> None:
    for _, command, _ in driver.states(config, numbers):
        if isinstance(command, CallModel):
            check_wire(command.messages, alternating=config.profile in ("compatible", "no-system", "reasoning"))
            driver.check_strict(command.messages)
            assert command.messages[-1]["role"] in ("user", "tool")
            assert all("strict" not in tool["function"] for tool in command.tools)
            if config.profile == "no-system":
                assert all(message["role"] != "system" for message in command.messages)
            if config.profile != "reasoning":
                assert all("reasoning_content" not in message for message in command.messages)


@quick
@given(driver.configs(), driver.scripts)
def test_every_call_has_exactly_one_result_and_the_history_only_grows(
    config: SessionConfig, numbers: list[int]
) -> None:
    before: list[dict[str, Any]] = []
    for session, command, _ in driver.states(config, numbers):
        transcript = session.transcript()
        assert transcript[: len(before)] == before, "an earlier message was changed"
        before = copy.deepcopy(transcript)
        driver.check_canonical(transcript, open_calls=isinstance(command, RunTools | Consult))
        json.dumps(session.dump(), ensure_ascii=False, allow_nan=False).encode("utf-8")


@quick
@given(driver.configs(), driver.scripts)
def test_budgets_hold_and_the_control_is_withdrawn(config: SessionConfig, numbers: list[int]) -> None:
    budget = config.budget
    for session, command, _ in driver.states(config, numbers):
        told = Counter(record["trajectory"] for record in session.consultations)
        if isinstance(command, Consult):
            # The one that is being asked for counts too; one that a stop cut short does not.
            told[session.trajectory] += 1
            assert config.protocol.spec != "off"
            assert command.state.control in config.controls
            assert command.state.remaining == session.remaining - 1 >= 0
            assert command.state.max_tokens == budget.max_tokens
        assert all(count <= budget.max_uses for count in told.values())
        assert budget.session_max_uses is None or told.total() <= budget.session_max_uses
        assert session.remaining >= 0
        assert budget.max_steps is None or session.step <= budget.max_steps
        if isinstance(command, CallModel):
            offered = {tool["function"]["name"] for tool in command.tools} & {"call_critic", "request_feedback"}
            may_ask = session.remaining > 0 and config.protocol.self_call and not session.closing
            expected = set(config.controls) if may_ask and config.format == "tool-calls" else set()
            assert offered == expected
            tag = {"caddie": "<critic/>", "cafe": "<request_feedback>"}.get(config.format)
            if tag is not None:
                assert (tag in (command.grammar or "")) == (may_ask and bool(config.controls))
            if session.closing:
                assert command.tool_choice == "none" or not session._format.native_tools


@slower
@given(driver.configs(), driver.scripts)
def test_a_dump_brings_back_the_same_session_with_the_same_command(config: SessionConfig, numbers: list[int]) -> None:
    for session, command, _ in driver.states(config, numbers):
        again = Session.load(json.loads(json.dumps(session.dump())))
        assert again == session
        assert again.command == session.command == command
        assert again.remaining == session.remaining
        assert again.transcript() == session.transcript()


@slower
@given(driver.configs(), driver.scripts, st.integers(0, 40))
def test_a_restored_session_goes_on_exactly_as_the_original_would(
    config: SessionConfig, numbers: list[int], cut: int
) -> None:
    """Dumped and loaded at one state, and then at every state: the run is the same."""
    plain = [json.dumps(session.dump()) for session, _, _ in driver.states(config, numbers)]
    choices, session = driver.Choices(numbers), Session(config)
    command = session.user_said(choices.of(("Which river?", driver.FORGERY, "")))
    for index, expected in enumerate(plain):
        assert json.dumps(session.dump()) == expected
        if isinstance(command, Finish) and session.trajectory >= 2:
            break
        if index >= cut:
            session = Session.load(json.loads(json.dumps(session.dump())))
            command = session.command
        if isinstance(command, Finish):
            command = driver.advance(session, command, choices)
        elif choices.below(24) == 23:
            command = session.stop("cancelled")
        elif isinstance(command, CallModel) and choices.below(24) == 23:
            command = session.user_said("One more thing.")
        else:
            command = driver.advance(session, command, choices)


@slower
@given(driver.configs(), driver.scripts, driver.scripts)
def test_a_fork_that_goes_its_own_way_leaves_the_parent_alone(
    config: SessionConfig, numbers: list[int], other: list[int]
) -> None:
    for index, (session, _, _) in enumerate(driver.states(config, numbers, limit=24)):
        if index % 4:
            continue
        before = json.dumps(session.dump())
        child = session.fork()
        assert child == session
        assert child.command == session.command
        choices, command = driver.Choices(other), child.command
        for _ in range(6):
            command = driver.advance(child, command, choices)
            driver.check_canonical(child.transcript(), open_calls=isinstance(command, RunTools | Consult))
        assert json.dumps(session.dump()) == before
        if child.history.head is not None and len(child.transcript()) > len(session.transcript()):
            assert child.history.path()[0] is session.history.path()[0], "the prefix is shared, not copied"


@slower
@given(driver.configs(), driver.scripts)
def test_a_stop_at_any_point_leaves_a_session_that_takes_another_turn(
    config: SessionConfig, numbers: list[int]
) -> None:
    for session, command, _ in driver.states(config, numbers, limit=24):
        if isinstance(command, Finish):
            continue
        stopped = session.fork()
        end = stopped.stop("cancelled")
        assert isinstance(end, Finish)
        assert end.reason == "cancelled"
        driver.check_canonical(stopped.transcript())
        again = stopped.user_said("Once more, please.")
        assert isinstance(again, CallModel | Consult)
        assert stopped.trajectory == session.trajectory + 1
        while isinstance(again, Consult):
            again = stopped.critic_replied(driver.parsed("a", "b"))
        check_wire(again.messages, alternating=config.profile == "compatible")
        assert "Once more, please." in str(again.messages)


@slower
@given(driver.configs(), driver.scripts)
def test_an_event_out_of_turn_is_refused_and_changes_nothing(config: SessionConfig, numbers: list[int]) -> None:
    allowed: dict[type, set[str]] = {
        CallModel: {"user", "model", "stop"},
        RunTools: {"tools", "stop"},
        Consult: {"critic", "stop"},
        Reject: {"proceed", "stop"},
        Finish: {"user"},
    }
    for session, command, _ in driver.states(config, numbers, limit=24):
        before = json.dumps(session.dump())
        events = {
            "user": lambda s=session: s.user_said("hello"),
            "model": lambda s=session: s.model_replied({"role": "assistant", "content": "hello"}),
            "tools": lambda s=session: s.tools_returned([]),
            "critic": lambda s=session: s.critic_replied(driver.parsed("a", "b")),
            "proceed": lambda s=session: s.proceed(),
            "stop": lambda s=session: s.stop("error"),
        }
        for name, event in events.items():
            if name not in allowed[type(command)]:
                with pytest.raises(SessionError):
                    event()
        if isinstance(command, RunTools):
            # One good result beside one for an id nobody waits for: refused as a whole.
            results = [ToolResult(command.calls[0].id, "good", is_error=True), ToolResult("nobody", "bad")]
            with pytest.raises(SessionError):
                session.tools_returned(results)
        if isinstance(command, CallModel):
            with pytest.raises(SessionError):
                session.model_replied({"role": "user", "content": "I am no assistant"})
            with pytest.raises(SessionError):
                session.user_said({"role": "system", "content": "I am no user"})
        assert json.dumps(session.dump()) == before


_LOOPS = (
    "answer",
    "step",
    "unknown",
    "control",
    "controls and step",
    "empty",
    "malformed",
    "guarded",
    "text call",
    "mix",
)


def _looping_reply(kind: str, format: str, number: int) -> Any:
    """What a model says that has got stuck in one habit."""

    def call(*names: str, arguments: str = '{"query": "x", "order_id": "x"}') -> dict[str, Any]:
        made = [{"id": "same", "type": "function", "function": {"name": n, "arguments": arguments}} for n in names]
        return {"role": "assistant", "content": "", "tool_calls": made}

    def text(reason: str, form: str) -> str:
        return f"<{reason}>r</{reason}>{form}"

    thought = {"caddie": "reason", "cafe": "think"}.get(format)
    if kind == "mix":
        kind = _LOOPS[number * 7 % (len(_LOOPS) - 1)]
    if kind == "answer":
        return {"role": "assistant", "content": driver.answer_in(format)}
    if kind == "step":
        return driver.step_in(format)
    if thought is None:
        return {
            "unknown": call("fly"),
            "control": call("call_critic"),
            "controls and step": call("call_critic", "request_feedback", "call_critic", "search"),
            "guarded": call("refund"),
            "text call": {"role": "assistant", "content": '<tool_call>{"name": "call_critic"}</tool_call>'},
            "malformed": {"role": "assistant", "content": "<think>never closed"},
        }.get(kind, {"role": "assistant", "content": ""})
    ask = "<critic/>" if format == "caddie" else "<request_feedback></request_feedback>"
    pay = "<refund>1</refund>"
    if format == "cafe":
        pay = '<tool_call>{"name": "refund", "arguments": {"order_id": "1"}}</tool_call>'
    said = {"control": text(thought, ask), "guarded": text(thought, pay), "text call": text(thought, ask + ask)}
    return {"role": "assistant", "content": said.get(kind, "" if kind == "empty" else "nothing of use")}


@settings(max_examples=300, deadline=None)
@given(driver.configs(), st.sampled_from(_LOOPS))
def test_a_model_stuck_in_a_habit_is_stopped_within_the_budget(config: SessionConfig, habit: str) -> None:
    """Each reply is a step, a consultation, a rejection or the end. So calls are bounded by what those are."""
    session = Session(config)
    session.user_said("Which river?")
    budget, numbers = config.budget, iter(range(10_000))
    if budget.max_steps is None and habit not in ("empty", "malformed", "answer"):
        return
    steps = budget.max_steps if budget.max_steps is not None else 0
    uses = budget.max_uses
    bound = steps * (budget.max_rejections + 1) + budget.max_rejections + uses + 1
    end, called = driver.finish(session, lambda _: _looping_reply(habit, config.format, next(numbers)), max(bound, 1))
    assert called <= bound
    assert end.reason in ("answer", "max_steps", "malformed", "stuck")


@quick
@given(driver.configs(), driver.scripts)
def test_replies_are_steps_consultations_rejections_or_the_end(config: SessionConfig, numbers: list[int]) -> None:
    """The bound on model calls that makes every run end, in terms of what the session itself counts."""
    called = Counter[int]()
    limit = config.budget
    for session, command, _ in driver.states(config, numbers):
        if isinstance(command, CallModel):
            steps, uses = session.step, session.uses
            so_far = called[session.trajectory]
            assert so_far <= (steps + 1) * limit.max_rejections + steps + uses
            # The driver may add a user's word without a reply in between; count replies, not commands.
            before = session.history.head.id if session.history.head else -1
            called[session.trajectory] = _replies(session, before)


def _replies(session: Session, until: int) -> int:
    """Agent replies of the current trajectory, from the history itself."""
    count = 0
    for node in reversed(session.history.path()):
        if node.kind == "action" and node.id <= until:
            count += 1
        if node.kind == "task":
            break
    return count


@slower
@given(driver.configs(), driver.scripts)
def test_the_shell_sees_only_its_own_calls(config: SessionConfig, numbers: list[int]) -> None:
    """`RunTools` never carries a control, an unknown tool, or arguments that are no object."""
    names = {tool["function"]["name"] for tool in config.tools}
    for _, command, _ in driver.states(config, numbers):
        if isinstance(command, RunTools):
            assert command.calls
            for call in command.calls:
                assert isinstance(call, Call)
                assert call.id
                assert call.name in names
                assert isinstance(call.arguments, dict)
            shown = command.message.get("tool_calls", [])
            if config.format == "tool-calls":
                assert [c["id"] for c in shown] == [c.id for c in command.calls]
            else:
                assert shown == []


@slower
@given(driver.configs(), driver.scripts)
def test_every_step_of_the_story_has_one_observation_per_action(config: SessionConfig, numbers: list[int]) -> None:
    """The critic's view: actions and observations pair up, and advice is never an observation."""
    for session, command, _ in driver.states(config, numbers):
        if not isinstance(command, Consult):
            continue
        events = command.state.events
        assert events[0].kind == "task"
        assert sum(event.kind == "task" for event in events) == 1
        for event in events:
            names = {action.name for action in event.actions}
            assert not names & set(config.controls)
            if event.kind == "step" and event.actions and config.format == "tool-calls":
                assert len(event.observations) == len(event.actions)
        told = [event for event in events if event.kind == "advice"]
        assert len(told) <= len(session.consultations)


def test_the_driver_reaches_what_it_is_meant_to_reach() -> None:
    """The properties above would hold trivially for runs that never get anywhere."""
    seen = Counter[str]()

    @settings(max_examples=1500, deadline=None, derandomize=True, database=None)
    @given(driver.configs(), driver.scripts)
    def explore(config: SessionConfig, numbers: list[int]) -> None:
        for session, command, _ in driver.states(config, numbers):
            seen[type(command).__name__] += 1
            seen[f"{config.format} {type(command).__name__}"] += 1
            if isinstance(command, Finish):
                seen[f"end {command.reason}"] += 1
            if isinstance(command, Consult):
                seen[f"consult {command.state.trigger}"] += 1
            if session.turn and any(call["do"] == "hold" for call in session.turn["calls"]):
                seen["held"] += 1

    explore()
    wanted = ["CallModel", "RunTools", "Consult", "Reject", "Finish", "held"]
    wanted += [f"{form} {kind}" for form in ("tool-calls", "caddie", "cafe") for kind in ("RunTools", "Consult")]
    wanted += [f"end {reason}" for reason in ("answer", "max_steps", "malformed", "cancelled", "stuck")]
    wanted += [f"consult {t}" for t in ("self-call", "guarded", "windowed", "fixed", "probabilistic")]
    assert not [name for name in wanted if seen[name] < 3], seen


@pytest.mark.parametrize("format", ["tool-calls", "caddie", "cafe"])
def test_a_thousand_steps_cost_no_more_than_their_number(format: str) -> None:
    """A long run ends, and nothing in it grows without need: ids stay unique, the dump loads."""
    config = SessionConfig(tools=(driver.SEARCH,), format=format, budget=Budget(max_steps=1000))
    session = Session(config)
    session.user_said("Which river?")
    end, called = driver.finish(session, lambda _: driver.step_in(format), 2000)
    assert (end.reason, session.step, called) == ("max_steps", 1000, 1001)
    driver.check_canonical(session.transcript())
    assert Session.load(json.loads(json.dumps(session.dump()))) == session
