"""The statistics, on numbers worked by hand, beside scipy, and on properties that hold for all outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie_evals.statistics import (
    Outcomes,
    bootstrap_interval,
    gather,
    paired_difference,
    pass_hat_k,
    routing_entropy,
    score,
    score_by_seed,
    seed_accuracies,
    sem,
    shared,
    success_by_requests,
    task_rates,
)
from caddie_sdk.errors import ConfigError

# Three tasks, four seeds. Rates: a 3/4, b 1/4, c 2/4. Seeds: 0: 2/3, 1: 3/3, 2: 1/3, 3: 0/3.
BASE: Outcomes = {
    "a": {0: 1, 1: 1, 2: 1, 3: 0},
    "b": {0: 0, 1: 1, 2: 0, 3: 0},
    "c": {0: 1, 1: 1, 2: 0, 3: 0},
}
# Against BASE: a gains seed 3; b gains 0, 2, 3 and loses 1; c loses 0. Differences by task: 1/4, 2/4, -1/4.
HELPED: Outcomes = {
    "a": {0: 1, 1: 1, 2: 1, 3: 1},
    "b": {0: 1, 1: 0, 2: 1, 3: 1},
    "c": {0: 0, 1: 1, 2: 0, 3: 0},
}

outcomes_01 = st.dictionaries(
    st.sampled_from("abcdef"),
    st.dictionaries(st.integers(0, 7), st.sampled_from([0, 1]), min_size=1, max_size=6),
    min_size=1,
)


@st.composite
def arms(draw: st.DrawFn) -> tuple[Outcomes, Outcomes]:
    first = draw(outcomes_01)
    second = {task: {seed: draw(st.sampled_from([0, 1])) for seed in seeds} for task, seeds in first.items()}
    return first, second


def shuffled(outcomes: Outcomes, draw: st.DataObject) -> Outcomes:
    tasks = draw.draw(st.permutations(sorted(outcomes)))
    return {task: dict(draw.draw(st.permutations(sorted(outcomes[task].items())))) for task in tasks}


def test_score_by_task() -> None:
    # mean (3/4 + 1/4 + 2/4) / 3 = 1/2; deviations 1/4, -1/4, 0; variance (1/16 + 1/16) / 2 = 1/16; sd 1/4
    assert task_rates(BASE) == {"a": 0.75, "b": 0.25, "c": 0.5}
    found = score(BASE)
    assert (found.mean, found.n) == (0.5, 3)
    assert found.sem == pytest.approx(0.25 / math.sqrt(3), abs=1e-15)


def test_score_by_seed() -> None:
    # accuracies 2/3, 1, 1/3, 0 around 1/2: deviations 1/6, 1/2, -1/6, -1/2; squares sum to (1 + 9 + 1 + 9) / 36 = 5/9;
    # variance 5/27; SEM sqrt(5/27) / 2
    assert list(seed_accuracies(BASE).values()) == pytest.approx([2 / 3, 1, 1 / 3, 0])
    found = score_by_seed(BASE)
    assert (found.mean, found.n) == (0.5, 4)
    assert found.sem == pytest.approx(math.sqrt(5 / 27) / 2, abs=1e-15)


def test_tasks_weigh_alike_however_many_trials_they_have_left() -> None:
    # a: 1 of 1, b: 0 of 3. By task (1 + 0) / 2, not 1 of 4.
    holes = {"a": {0: 1}, "b": {0: 0, 1: 0, 2: 0}}
    assert score(holes).mean == 0.5
    # seeds: 0 has both tasks (1/2), 1 and 2 have b only (0): variance of (1/2, 0, 0) = 1/12
    found = score_by_seed(holes)
    assert (found.mean, found.n) == (0.5, 3)
    assert found.sem == pytest.approx(math.sqrt(1 / 12 / 3))


def test_one_sample_has_no_error() -> None:
    assert score({"a": {0: 1, 1: 0}}).sem is None
    assert score_by_seed({"a": {0: 1}, "b": {0: 0}}).sem is None
    assert sem([0.3]) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_sem_is_scipys(samples: list[float]) -> None:
    assert sem(samples) == pytest.approx(float(scipy.stats.sem(samples)), rel=1e-9, abs=1e-12)


def test_paired_difference() -> None:
    found = paired_difference(BASE, HELPED)
    # differences by task 1/4, 1/2, -1/4: mean 1/6; deviations 1/12, 4/12, -5/12; squares (1 + 16 + 25) / 144 = 7/24;
    # variance 7/48; SEM sqrt(7/144) = sqrt(7) / 12
    assert found.difference == pytest.approx(1 / 6, abs=1e-15)
    assert found.sem == pytest.approx(math.sqrt(7) / 12, abs=1e-15)
    # helped: a3, b0, b2, b3; hurt: b1, c0; the other six of twelve are the same
    assert (found.helped, found.hurt, found.same, found.pairs, found.tasks) == (4, 2, 6, 12, 3)
    # With 27 equally likely resamples the lowest mean is -1/4 (1 in 27 > 2.5 %), the highest 1/2 (likewise).
    assert (found.low, found.high, found.level) == (-0.25, 0.5, 0.95)


def test_pairing_removes_what_tasks_have_in_common() -> None:
    # Every task gains the same: rates differ widely between tasks, their differences not at all.
    low = {"a": {0: 0, 1: 0}, "b": {0: 1, 1: 0}}
    high = {"a": {0: 1, 1: 0}, "b": {0: 1, 1: 1}}
    found = paired_difference(low, high)
    assert (found.difference, found.sem, found.low, found.high) == (0.5, 0.0, 0.5, 0.5)


def test_a_percentile_by_hand() -> None:
    # Two samples 0 and 1: means 0, 1/2, 1 with chances 1/4, 1/2, 1/4. The middle 40 % lie at 1/2, the middle 60 % reach
    # both ends.
    assert bootstrap_interval([0.0, 1.0], level=0.4) == (0.5, 0.5)
    assert bootstrap_interval([0.0, 1.0], level=0.6) == (0.0, 1.0)
    # One resample is its own interval, and quantiles lie between neighbours.
    low, high = bootstrap_interval([0.0, 1.0], resamples=1)
    assert low == high


def test_the_bootstrap_interval_is_scipys_up_to_chance() -> None:
    samples = [((7 * index) % 13) / 12 - 0.3 for index in range(40)]
    ours = bootstrap_interval(samples, resamples=20_000)
    theirs = scipy.stats.bootstrap(
        (samples,), lambda x, axis: x.mean(axis=axis), n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    assert ours == pytest.approx((theirs.low, theirs.high), abs=0.005)  # the interval is 0.19 wide


def test_the_bootstrap_is_fixed_by_its_seed() -> None:
    samples = [0.1, 0.5, 0.2, 0.9, 0.4]
    assert bootstrap_interval(samples, resamples=50, seed=3) == bootstrap_interval(samples, resamples=50, seed=3)
    assert bootstrap_interval(samples, resamples=50, seed=3) != bootstrap_interval(samples, resamples=50, seed=4)


def test_pass_hat_k() -> None:
    # C(3,2)/C(4,2) = 3/6, C(1,2) = 0, C(2,2)/C(4,2) = 1/6: mean (3/6 + 0 + 1/6) / 3 = 2/9
    assert pass_hat_k(BASE, 2) == pytest.approx(2 / 9)
    # C(3,3)/C(4,3) = 1/4, the others 0
    assert pass_hat_k(BASE, 3) == pytest.approx(1 / 12)
    assert pass_hat_k(BASE, 4) == 0
    # a always succeeds, b has 3 of 4: (1 + 3/6 + 0) / 3 for k = 2
    assert pass_hat_k(HELPED, 2) == pytest.approx(1 / 2)


def test_pass_hat_k_is_the_share_of_subsets_that_all_succeed() -> None:
    # successes 1 1 0 1 0: of the ten pairs (0,1), (0,3), (1,3) succeed
    assert pass_hat_k({"a": dict(enumerate([1, 1, 0, 1, 0]))}, 2) == pytest.approx(3 / 10)


def test_success_by_requests() -> None:
    bins = success_by_requests([(1, 1), (0, 0), (1, 0), (3, 1), (1, 1), (0, 0)])
    assert [(item.requests, item.rollouts) for item in bins] == [(0, 2), (1, 3), (3, 1)]
    assert [item.success for item in bins] == pytest.approx([0, 2 / 3, 1])


def test_routing_entropy() -> None:
    # 1 of 4: -1/4 log2 1/4 - 3/4 log2 3/4 = 2 - 3/4 log2 3 = 0.811278; half: 1 bit; always: 0
    asked = {"x": [True, False, False, False], "y": [True, False], "z": [True, True, True]}
    found = routing_entropy(asked)
    assert found.by_prompt == pytest.approx({"x": 2 - 0.75 * math.log2(3), "y": 1, "z": 0}, abs=1e-15)
    assert found.mean == pytest.approx((2 - 0.75 * math.log2(3) + 1) / 3)
    assert found.base == 2
    assert routing_entropy({"y": [True, False]}, base=math.e).mean == pytest.approx(math.log(2))


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_routing_entropy_is_scipys_and_the_same_for_asking_and_not_asking(asked: list[bool]) -> None:
    share = sum(asked) / len(asked)
    found = routing_entropy({"x": asked}).mean
    assert found == pytest.approx(float(scipy.stats.entropy([share, 1 - share], base=2)), abs=1e-12)
    assert found == pytest.approx(routing_entropy({"x": [not choice for choice in asked]}).mean, abs=1e-12)


def test_gather() -> None:
    assert gather(("b", 1, True), ("a", 0, 0.5), ("b", 0, 0)) == {"b": {1: 1.0, 0: 0.0}, "a": {0: 0.5}}
    with pytest.raises(ConfigError, match="task 'a', seed 3: two outcomes for one trial"):
        gather(("a", 3, 1), ("a", 3, 1))


def test_shared_trials() -> None:
    first = {"a": {0: 1, 1: 0}, "b": {0: 1}, "c": {5: 1}}
    second = {"a": {1: 1, 2: 1}, "b": {0: 0}, "d": {0: 1}, "c": {6: 0}}
    # left out: a0, c5 of the first; a2, d0, c6 of the second
    assert shared(first, second) == ({"a": {1: 0}, "b": {0: 1}}, {"a": {1: 1}, "b": {0: 0}}, 5)
    left, right, _ = shared(first, second)
    assert paired_difference(left, right).difference == 0


NAN = float("nan")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: score({}), "no outcomes: there is not one finished trial"),
        (lambda: score({"a": {}}), "task 'a' has no finished trial"),
        (lambda: score({"a": {2: NAN}}), r"task 'a', seed 2: success must lie in \[0, 1\], not nan"),
        (lambda: score_by_seed({"a": {2: 1.5}}), "task 'a', seed 2"),
        (lambda: score_by_seed({}), "no outcomes"),
        (lambda: gather(("a", 0, -1)), "not -1"),
        (lambda: sem([]), "no samples"),
        (lambda: bootstrap_interval([]), "no samples"),
        (lambda: bootstrap_interval([1], resamples=0), "resamples >= 1"),
        (lambda: bootstrap_interval([1], level=1), "0 < level < 1"),
        (lambda: paired_difference({}, {}), "no outcomes"),
        (lambda: paired_difference(BASE, {}), "no outcomes"),
        (
            lambda: paired_difference({"a": {0: 1, 1: 1}}, {"a": {0: 1, 2: 0}}),
            "2 trials have no partner, the first is task 'a', seed 1, which only the first arm has",
        ),
        (
            lambda: paired_difference({"b": {0: 1}}, {"a": {0: 1}, "b": {0: 1}}),
            "task 'a', seed 0, which only the second",
        ),
        (lambda: pass_hat_k(BASE, 0), "k >= 1, not 0"),
        (lambda: pass_hat_k(BASE, 5), r"pass\^5 needs 5 trials of each task; task 'a' has 4"),
        (lambda: pass_hat_k({"a": {0: 0.5}}, 1), "outcomes of 0 or 1; task 'a'"),
        (lambda: pass_hat_k({}, 1), "no outcomes"),
        (lambda: success_by_requests([]), "no rollouts"),
        (lambda: success_by_requests([(-1, 1)]), "cannot ask the critic -1 times"),
        (lambda: routing_entropy({}), "no prompts"),
        (lambda: routing_entropy({"x": []}), "prompt 'x' has no rollouts"),
        (lambda: routing_entropy({"x": [True]}, base=1), "greater than 1"),
    ],
)
def test_bad_input_is_told_in_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@settings(max_examples=30)
@given(arms())
def test_the_paired_difference_is_antisymmetric(pair: tuple[Outcomes, Outcomes]) -> None:
    there, back = (paired_difference(*sides, resamples=60) for sides in (pair, pair[::-1]))
    assert there.difference == -back.difference
    assert there.sem == back.sem
    assert (there.helped, there.hurt, there.same) == (back.hurt, back.helped, back.same)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-12)


@given(arms())
def test_the_paired_difference_is_the_difference_of_the_scores(pair: tuple[Outcomes, Outcomes]) -> None:
    found = paired_difference(*pair, resamples=1)
    assert found.difference == pytest.approx(score(pair[1]).mean - score(pair[0]).mean, abs=1e-12)


@given(outcomes_01)
def test_an_arm_against_itself_is_all_the_same(outcomes: Outcomes) -> None:
    found = paired_difference(outcomes, outcomes, resamples=5)
    assert (found.difference, found.low, found.high, found.helped, found.hurt) == (0, 0, 0, 0, 0)


@given(outcomes_01)
def test_pass_hat_1_is_the_score_and_pass_hat_k_never_rises(outcomes: Outcomes) -> None:
    curve = [pass_hat_k(outcomes, k) for k in range(1, min(map(len, outcomes.values())) + 1)]
    assert curve[0] == pytest.approx(score(outcomes).mean, abs=1e-12)
    assert curve == sorted(curve, reverse=True)


@given(st.floats(0, 1), st.integers(1, 12), st.floats(0.5, 0.99))
def test_equal_samples_give_an_interval_of_that_one_point(value: float, size: int, level: float) -> None:
    low, high = bootstrap_interval([value] * size, resamples=20, level=level)
    assert low == high == pytest.approx(value, abs=1e-15)


@settings(max_examples=30)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=8), st.floats(0.1, 0.9))
def test_an_interval_stays_within_the_samples_and_grows_with_its_level(samples: list[float], level: float) -> None:
    low, high = bootstrap_interval(samples, resamples=40, level=level)
    wider = bootstrap_interval(samples, resamples=40, level=level + 0.05)
    assert min(samples) - 1e-12 <= wider[0] <= low <= high <= wider[1] <= max(samples) + 1e-12


@settings(max_examples=30)
@given(arms(), st.data())
def test_no_order_matters(pair: tuple[Outcomes, Outcomes], data: st.DataObject) -> None:
    first, second = pair
    mixed = shuffled(first, data)
    assert score(mixed) == score(first)
    assert score_by_seed(mixed) == score_by_seed(first)
    assert pass_hat_k(mixed, 1) == pass_hat_k(first, 1)
    found = paired_difference(mixed, shuffled(second, data), resamples=20)
    assert found == paired_difference(first, second, resamples=20)
    rollouts = [(seed, success) for seeds in first.values() for seed, success in seeds.items()]
    assert success_by_requests(data.draw(st.permutations(rollouts))) == success_by_requests(rollouts)
