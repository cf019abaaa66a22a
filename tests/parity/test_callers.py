"""Callers who own their tools meet the same trajectory as our own loop: same wire, same advice, same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from agents_shell import play_agents
from callers import Seen, by_async, by_create, by_responses, by_responses_stream, by_stream, play
from parity_cases import CASES, TOOLS, Case
from test_parity import timeless

from caddie_sdk import Session, arun
from caddie_sdk.messages import canonical
from caddie_sdk.testing import ScriptedModel

WAYS: dict[str, Callable[[Case], Seen]] = {
    "wrap": lambda case: play(case, by_create),
    "wrap, from the ledger": lambda case: play(case, by_create, remembers=False),
    "wrap, streamed": lambda case: play(case, by_stream),
    "wrap, async": lambda case: play(case, by_async),
    "wrap, responses": lambda case: play(case, by_responses),
    "wrap, responses streamed": lambda case: play(case, by_responses_stream),
    "proxy": lambda case: play(case, by_create, proxied=True),
    "proxy, streamed": lambda case: play(case, by_stream, proxied=True),
    "agents": play_agents,
    "agents, streamed": lambda case: play_agents(case, stream=True),
    "agents, chat": lambda case: play_agents(case, chat=True),
    "agents, chat streamed": lambda case: play_agents(case, chat=True, stream=True),
}

OWN_RULES = (
    "step limit", "too early", "the draft stands", "empty reply", "thought without", "never a legal",
    "the first malformed", "context overflow", "after a turn that failed", "calls written as text", "stuck",
    "server is down", "raises when asked",
)  # fmt: skip
"""Cases about rules that are the caller's own business there: limits, refusals of replies, errors of its server."""
OTHERWISE = {
    "tool-calls: without critic": "a client without a critic is not wrapped",
    "tool-calls: control without critic": "a client without a critic is not wrapped",
    "tool-calls: examples before the task": "a caller's examples are turns of its history",
    "tool-calls: answer in parts": "servers answer in one text",
    "tool-calls: chat with one consultation for all of it": "a caller's history is no session of ours",
}


def fits(case: Case) -> bool:
    """Whether a caller who owns the tools can play it."""
    seeded = case.protocol.startswith("windowed") or case.protocol == "probabilistic:0.5"  # the seed is the history's
    ours = any(part in case.name for part in OWN_RULES)
    return case.format == "tool-calls" and not seeded and not ours and case.name not in OTHERWISE


PLAYED = [number for number, case in enumerate(CASES) if fits(case)]


@cache
def reference(number: int) -> Seen:
    """The case in our own loop."""
    case, seen = CASES[number], Seen()
    session, model, critics = Session(case.config()), ScriptedModel(case.replies), case.critics()
    for turn in case.turns:
        seen.answers.append(asyncio.run(arun(session, turn, model, TOOLS, critics)).answer or "")
    for call in model.seen:
        seen.wire.append([dict(canonical(message)) for message in call.messages])
        seen.offered.append([tool["function"]["name"] for tool in call.tools])
    for name, critic in critics.items():
        seen.states[name] = [state.dump() for state in getattr(critic, "seen", ())]
    return seen


@pytest.fixture(params=PLAYED, ids=[CASES[number].name for number in PLAYED])
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_caller_meets_the_same_trajectory(way: str, number: int) -> None:
    expected, seen = reference(number), WAYS[way](CASES[number])
    assert seen.answers == expected.answers
    assert [told(wire) for wire in seen.wire] == [told(wire) for wire in expected.wire]
    assert seen.offered == expected.offered
    assert timeless(seen.states) == timeless(expected.states)


def told(wire: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the reasoning of earlier turns, which our loop keeps off the wire and a caller sends as it likes; and
    with made-up ids numbered as they come, since a caller's own history does not tell how many were made up before."""
    numbers: dict[str, str] = {}

    def named(id: str) -> str:
        return numbers.setdefault(id, f"id {len(numbers)}")

    result = []
    for message in wire:
        copy = {key: value for key, value in message.items() if key != "reasoning_content"}
        if "tool_calls" in copy:
            copy["tool_calls"] = [{**call, "id": named(call["id"])} for call in copy["tool_calls"]]
        if "tool_call_id" in copy:
            copy["tool_call_id"] = named(copy["tool_call_id"])
        result.append(copy)
    return result


def test_most_cases_are_played() -> None:
    """The filter must not swallow the table."""
    names = {CASES[number].name for number in PLAYED}
    assert len(names) >= 35
    assert {"tool-calls: mixed turn", "tool-calls: guarded tool beside others", "tool-calls: always"} <= names
    played = [reference(number) for number in PLAYED]
    assert sum(len(states) for seen in played for states in seen.states.values()) > 25
