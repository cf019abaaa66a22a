"""`create_agent` with `CriticMiddleware` meets the same trajectory as our own loop: wire, advice and answers."""

from __future__ import annotations

import pytest
from middleware_shell import fits, play
from parity_cases import CASES
from test_callers import PLAYED, reference, told
from test_parity import timeless

SEEDED = [
    number
    for number, case in enumerate(CASES)
    if case.format == "tool-calls" and (case.protocol.startswith("windowed") or case.protocol == "probabilistic:0.5")
]
"""Other callers cannot choose the seed; the middleware can."""
NUMBERS = [number for number in sorted({*PLAYED, *SEEDED}) if fits(CASES[number])]


@pytest.mark.parametrize("number", NUMBERS, ids=[CASES[number].name for number in NUMBERS])
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_middleware_meets_the_same_trajectory(way: str, number: int) -> None:
    expected, seen = reference(number), play(CASES[number], way)
    assert seen.answers == expected.answers
    assert [told(wire) for wire in seen.wire] == [told(wire) for wire in expected.wire]
    assert seen.offered == expected.offered
    assert timeless(seen.states) == timeless(expected.states)


def test_most_cases_are_played() -> None:
    names = {CASES[number].name for number in NUMBERS}
    assert len(names) >= 40
    assert {"tool-calls: mixed turn", "tool-calls: guarded tool beside others", "tool-calls: sometimes"} <= names
