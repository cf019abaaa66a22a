"""Intervention protocols by themselves (SPEC §2; Caddie paper §2.1)."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie_sdk.errors import ConfigError
from caddie_sdk.intervention import (
    Guarded,
    Intervention,
    Moment,
    Never,
    Probabilistic,
    Scheduled,
    SelfCall,
    Windowed,
    parse_protocol,
)


def drawn(protocol: Windowed, seed: int, trajectory: int = 0) -> list[int]:
    return [step for step in range(30) if protocol.before_step(Moment(seed, trajectory, step))]


def test_windowed_is_uniform_over_seeds_and_over_trajectories() -> None:
    """Chi square over 10 cells: 99.9 % of fair draws lie below 27.9 (9 degrees of freedom)."""
    protocol = Windowed(1, 10)
    for moments in (
        [Moment(seed, 0, 0) for seed in range(4000)],
        [Moment(0, trajectory, 0) for trajectory in range(4000)],
    ):
        counts = Counter(protocol.step(moment) for moment in moments)
        assert set(counts) == set(range(1, 11)), "both ends included"
        chi_square = sum((count - 400) ** 2 / 400 for count in counts.values())
        assert chi_square < 27.9


def test_windowed_consults_once_inside_the_window() -> None:
    for seed in range(50):
        steps = drawn(Windowed(2, 5), seed)
        assert len(steps) == 1
        assert 2 <= steps[0] <= 5


def test_windowed_draws_differ_between_trajectories_and_repeat_with_the_seed() -> None:
    many = [drawn(Windowed(0, 9), 7, trajectory) for trajectory in range(20)]
    assert many == [drawn(Windowed(0, 9), 7, trajectory) for trajectory in range(20)]
    assert len({steps[0] for steps in many}) > 3
    assert many != [drawn(Windowed(0, 9), 8, trajectory) for trajectory in range(20)]


def test_the_draws_are_pinned_across_versions() -> None:
    """A change here changes which step every recorded experiment consulted at."""
    assert [Windowed(1, 10).step(Moment(seed, 0, 0)) for seed in range(8)] == PINNED_WINDOW
    assert [Probabilistic(0.5).before_step(Moment(0, 0, step)) for step in range(8)] == PINNED_COINS


PINNED_WINDOW = [7, 6, 9, 2, 8, 6, 4, 2]
PINNED_COINS = [True, False, False, False, True, True, True, False]


def test_fixed_is_a_window_of_one_step() -> None:
    assert parse_protocol("fixed:3") == Windowed(3, 3)
    assert drawn(Windowed(3, 3), seed=1) == [3]
    assert Windowed(3, 3).spec == "fixed:3"


def test_scheduled_consults_at_each_of_its_steps_and_no_other() -> None:
    protocol = parse_protocol("fixed:1,4,2")
    assert protocol == Scheduled((1, 4, 2))
    assert [step for step in range(9) if protocol.before_step(Moment(5, 2, step))] == [1, 2, 4]
    assert not protocol.self_call
    for steps in ((), (1, -1)):
        with pytest.raises(ConfigError, match="scheduled protocol"):
            Scheduled(steps)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_probabilistic_is_bernoulli_at_each_step_independently(alpha: float) -> None:
    protocol = Probabilistic(alpha)
    draws = [[protocol.before_step(Moment(seed, 0, step)) for step in (0, 1)] for seed in range(3000)]
    deviation = (alpha * (1 - alpha) / 3000) ** 0.5
    for step in (0, 1):
        assert abs(sum(draw[step] for draw in draws) / 3000 - alpha) <= 4 * deviation
    both = sum(draw[0] and draw[1] for draw in draws) / 3000
    assert abs(both - alpha**2) <= 4 * (alpha**2 * (1 - alpha**2) / 3000) ** 0.5


def test_asking_twice_about_one_moment_gives_one_answer() -> None:
    moment = Moment(3, 1, 4)
    for protocol in (Probabilistic(0.5), Windowed(0, 9)):
        assert len({protocol.before_step(moment) for _ in range(20)}) == 1


def test_guarded() -> None:
    protocol = Guarded(("refund", "cancel"), repeats=3)
    assert [protocol.guards(tool) for tool in ("refund", "cancel", "search", "refund_all", "")] == [True, True] + [
        False
    ] * 3
    assert [protocol.before_step(Moment(0, 0, 5, repeats)) for repeats in range(5)] == [False, False, False, True, True]
    assert protocol.self_call
    assert not Guarded(self_call=False).self_call


def test_only_guarded_guards_and_only_two_let_the_agent_ask() -> None:
    others: list[Intervention] = [Never(), SelfCall(), Windowed(0, 1), Probabilistic(1.0)]
    assert not any(protocol.guards("refund") for protocol in others)
    assert [protocol.self_call for protocol in others] == [False, True, False, False]
    assert not any(Never().before_step(Moment(0, 0, step, 9)) for step in range(9))
    assert not any(SelfCall().before_step(Moment(0, 0, step, 9)) for step in range(9))


_names = st.lists(st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True), max_size=3, unique=True).map(tuple)
_protocols = st.one_of(
    st.just(Never()),
    st.just(SelfCall()),
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: Windowed(min(pair), max(pair))),
    st.lists(st.integers(0, 20), min_size=2, max_size=4).map(tuple).map(Scheduled),
    st.floats(0, 1).map(Probabilistic),
    st.sampled_from((0, 1)).map(Probabilistic),
    st.builds(Guarded, _names, st.integers(1, 9), st.booleans()),
)


@given(_protocols)
@settings(max_examples=200, deadline=None)
def test_the_text_form_reads_back(protocol: Intervention) -> None:
    again = parse_protocol(json.loads(json.dumps(protocol.spec)))
    assert again == protocol
    assert again.spec == protocol.spec


def test_the_forms_of_the_command_line() -> None:
    assert parse_protocol(" off ") == parse_protocol("none") == Never()
    assert parse_protocol("self-call") == SelfCall()
    assert parse_protocol("windowed:1-10") == Windowed(1, 10)
    assert parse_protocol("probabilistic:0.25") == Probabilistic(0.25)
    assert parse_protocol("guarded:refund, cancel;repeats=2;self_call=no") == Guarded(("refund", "cancel"), 2, False)
    assert parse_protocol("guarded:refund") == Guarded(("refund",), 3, True)
    assert parse_protocol("guarded:") == Guarded((), 3, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sometimes",
        "fixed",
        "fixed:",
        "fixed:x",
        "fixed:-1",
        "fixed:1,",
        "fixed:1,-2",
        "fixed:1.5",
        "windowed:3",
        "windowed:5-2",
        "windowed:-1-2",
        "windowed:1-2-3",
        "probabilistic:",
        "probabilistic:1.5",
        "probabilistic:-0.1",
        "probabilistic:nan",
        "guarded:a;repeats=0",
        "guarded:a;repeats=x",
        "guarded:a;self_call=maybe",
        "guarded:a;unknown=1",
        "guarded:a;repeats",
    ],
)
def test_other_forms_are_refused_with_a_named_error(text: str) -> None:
    with pytest.raises(ConfigError, match="protocol"):
        parse_protocol(text)
