"""Statistics of evaluations, as pure functions of outcomes (SPEC §6; Caddie paper, §3.1 "Evaluation metric").

    without = gather(("q1", 0, 0), ("q1", 1, 1), ("q2", 0, 0), ("q2", 1, 0))
    with_critic = gather(("q1", 0, 1), ("q1", 1, 1), ("q2", 0, 1), ("q2", 1, 0))
    score(without)                           # mean 0.25, SEM 0.25 over 2 tasks
    paired_difference(without, with_critic)  # difference 0.5, helped 2, hurt 0, same 2

Rates and differences are fractions in [0, 1] and [-1, 1], not percent. No result depends on the order in which
tasks or trials come: tasks are taken by name, and sums are exact before they are rounded. Trials that an
infrastructure failure took away have no outcome here: leave them out, and compare arms over `shared` trials.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from caddie_sdk.errors import ConfigError

Outcomes: TypeAlias = Mapping[str, Mapping[int, float]]
"""task -> seed -> success of that trial, in [0, 1]. Tasks need not have the same seeds."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its uncertainty.

    Attributes:
        mean: the estimate, a fraction.
        sem: standard error of the mean, same unit; None where one sample allows no statement.
        n: how many samples the error is over (tasks, or seeds).
    """

    mean: float
    sem: float | None
    n: int


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """What a critic changed, over the same tasks and seeds.

    Attributes:
        difference: mean over tasks of the task's mean difference (second arm − first arm), in [-1, 1].
        sem: paired SEM by task; None for a single task.
        low, high: bounds of the bootstrap interval.
        level: coverage of that interval.
        helped, hurt, same: trials in which the second arm did better, worse, equally well.
        tasks: number of tasks.
    """

    difference: float
    sem: float | None
    low: float
    high: float
    level: float
    helped: int
    hurt: int
    same: int
    tasks: int

    @property
    def pairs(self) -> int:
        """Number of matched trials."""
        return self.helped + self.hurt + self.same


@dataclass(frozen=True, slots=True)
class RequestBin:
    """Rollouts that asked the critic equally often.

    Attributes:
        requests: how often they asked.
        rollouts: how many they are.
        success: mean success among them, a fraction.
    """

    requests: int
    rollouts: int
    success: float


@dataclass(frozen=True, slots=True)
class RoutingEntropy:
    """How undecided the choice to ask is.

    Attributes:
        mean: mean over prompts, in units of `base` (bits for 2).
        by_prompt: the entropy of each prompt.
        base: of the logarithm.
    """

    mean: float
    by_prompt: Mapping[str, float]
    base: float


def gather(*trials: tuple[str, int, float]) -> dict[str, dict[int, float]]:
    """Trials `(task, seed, success)` as outcomes.

    Raises:
        ConfigError: a trial comes twice, or its success is not a number in [0, 1].
    """
    outcomes: dict[str, dict[int, float]] = {}
    for task, seed, success in trials:
        seeds = outcomes.setdefault(task, {})
        if seed in seeds:
            raise ConfigError(f"task {task!r}, seed {seed}: two outcomes for one trial; remove one record")
        seeds[seed] = _checked(task, seed, success)
    return outcomes


def task_rates(outcomes: Outcomes) -> dict[str, float]:
    """Success of each task: the mean over its trials (SPEC §6). Tasks in order of their names.

    Raises:
        ConfigError: no tasks, a task without trials, or a success outside [0, 1].
    """
    _require(outcomes)
    return {task: statistics.fmean(_successes(outcomes, task)) for task in sorted(outcomes)}


def seed_accuracies(outcomes: Outcomes) -> dict[int, float]:
    """Aggregate accuracy of each seed: its mean over the tasks it was run on, in order of the seeds.

    Raises:
        ConfigError: as `task_rates`.
    """
    _require(outcomes)
    by_seed: dict[int, list[float]] = defaultdict(list)
    for task, seeds in outcomes.items():
        for seed, success in seeds.items():
            by_seed[seed].append(_checked(task, seed, success))
    return {seed: statistics.fmean(by_seed[seed]) for seed in sorted(by_seed)}


def sem(samples: Sequence[float]) -> float | None:
    """Standard error of the mean: sample standard deviation (n − 1 below) / √n. None for a single sample.

    Raises:
        ConfigError: no samples.
    """
    if not samples:
        raise ConfigError("no samples: the standard error needs at least one, better two")
    return statistics.stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else None


def score(outcomes: Outcomes) -> Estimate:
    """Mean over tasks of their success, with the SEM over the per-task rates (SPEC §6; Caddie paper, §3.1).

    Raises:
        ConfigError: as `task_rates`.
    """
    rates = list(task_rates(outcomes).values())
    return Estimate(statistics.fmean(rates), sem(rates), len(rates))


def score_by_seed(outcomes: Outcomes) -> Estimate:
    """The same score with the SEM over the seed-level accuracies, for small task sets such as τ³ and DeepDive.

    Source: SPEC §6; Caddie paper, §3.1 ("each seed's success rate over all tasks is one sample"). Where trials are
    missing, the mean is still the one over tasks, and a seed counts the tasks that it has.

    Raises:
        ConfigError: as `task_rates`.
    """
    accuracies = list(seed_accuracies(outcomes).values())
    return Estimate(statistics.fmean(task_rates(outcomes).values()), sem(accuracies), len(accuracies))


def shared(first: Outcomes, second: Outcomes) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, float]], int]:
    """Both arms cut down to the trials they share, and how many trials were left out, of both arms together.

    For `paired_difference` after infrastructure failures; say beside the result how many were left out.
    """
    kept = {
        task: seeds
        for task in first.keys() & second.keys()
        if (seeds := sorted(first[task].keys() & second[task].keys()))
    }
    left = {task: {seed: first[task][seed] for seed in kept[task]} for task in sorted(kept)}
    right = {task: {seed: second[task][seed] for seed in kept[task]} for task in sorted(kept)}
    everything = sum(len(seeds) for arm in (first, second) for seeds in arm.values())
    return left, right, everything - 2 * sum(map(len, kept.values()))


def paired_difference(
    first: Outcomes, second: Outcomes, *, resamples: int = 10_000, seed: int = 0, level: float = 0.95
) -> PairedDifference:
    """Success of `second` − `first`, paired by task and seed.

    Source: SPEC §6; Caddie paper, appendix E ("paired task-level SEM").

    Args:
        first: outcomes of the baseline, usually without a critic.
        second: outcomes of the other arm, for the same trials.
        resamples: bootstrap resamples of the tasks.
        seed: of the bootstrap; the same seed gives the same interval.
        level: coverage of the interval, in (0, 1).

    Raises:
        ConfigError: no tasks, a trial that only one arm has, or a success outside [0, 1].
    """
    _require(first)
    _require(second)
    _require_pairs(first, second)
    by_trial = {
        task: [_checked(task, key, second[task][key]) - _checked(task, key, first[task][key]) for key in first[task]]
        for task in sorted(first)
    }
    by_task = [statistics.fmean(differences) for differences in by_trial.values()]
    trials = [difference for differences in by_trial.values() for difference in differences]
    low, high = bootstrap_interval(by_task, resamples=resamples, seed=seed, level=level)
    helped, hurt = sum(item > 0 for item in trials), sum(item < 0 for item in trials)
    return PairedDifference(
        statistics.fmean(by_task),
        sem(by_task),
        low,
        high,
        level,
        helped,
        hurt,
        len(trials) - helped - hurt,
        len(by_task),
    )


def bootstrap_interval(
    samples: Sequence[float], *, resamples: int = 10_000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron, 1979), quantiles interpolated linearly.

    Args:
        samples: one value per task; resampled with replacement, as many as there are.
        resamples: how often.
        seed: of the random numbers.
        level: coverage, in (0, 1); 0.95 takes the quantiles 0.025 and 0.975.

    Raises:
        ConfigError: no samples, no resamples, or a level outside (0, 1).
    """
    if not samples:
        raise ConfigError("no samples: a bootstrap needs at least one task")
    if resamples < 1 or not 0 < level < 1:
        raise ConfigError(f"a bootstrap needs resamples >= 1 and 0 < level < 1, not {resamples} and {level}")
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(samples, k=len(samples))) for _ in range(resamples))
    tail = (1 - level) / 2
    return _quantile(means, tail), _quantile(means, 1 - tail)


def pass_hat_k(outcomes: Outcomes, k: int) -> float:
    """pass^k: the chance that k trials of a task, drawn without replacement, all succeed; mean over tasks.

    Source: τ-bench (Yao et al., 2024, §4), its unbiased estimator C(c, k) / C(n, k) for c successes in n trials.

    Raises:
        ConfigError: k < 1, a task with fewer than k trials, or a success other than 0 and 1.
    """
    _require(outcomes)
    if k < 1:
        raise ConfigError(f"pass^k needs k >= 1, not {k}")
    chances = []
    for task in sorted(outcomes):
        successes = _successes(outcomes, task)
        if len(successes) < k:
            raise ConfigError(f"pass^{k} needs {k} trials of each task; task {task!r} has {len(successes)}")
        if any(success not in (0, 1) for success in successes):
            raise ConfigError(f"pass^{k} needs outcomes of 0 or 1; task {task!r} has others")
        chances.append(math.comb(round(sum(successes)), k) / math.comb(len(successes), k))
    return statistics.fmean(chances)


def success_by_requests(rollouts: Iterable[tuple[int, float]]) -> list[RequestBin]:
    """Success of rollouts by how often they asked the critic, fewest first (Caddie paper, appendix H.1, figure 7).

    Rollouts are weighed alike, whatever their task: this describes, it does not estimate what one more request does.

    Args:
        rollouts: `(requests, success)` of each.

    Raises:
        ConfigError: no rollouts, a negative count, or a success outside [0, 1].
    """
    bins: dict[int, list[float]] = defaultdict(list)
    for requests, success in rollouts:
        if requests < 0:
            raise ConfigError(f"a rollout cannot ask the critic {requests} times")
        bins[requests].append(_checked("rollout", requests, success))
    if not bins:
        raise ConfigError("no rollouts to sort by number of requests")
    return [RequestBin(count, len(bins[count]), statistics.fmean(bins[count])) for count in sorted(bins)]


def routing_entropy(asked: Mapping[str, Iterable[bool]], *, base: float = 2.0) -> RoutingEntropy:
    """Entropy of whether a rollout asked for feedback, per prompt, and its mean over prompts.

    H(x) = −p log p − (1 − p) log(1 − p), p the share of the prompt's rollouts that asked, 0 log 0 = 0. In bits for
    the base 2. Source: CAFE, appendix E.

    Args:
        asked: prompt -> whether each of its rollouts asked.
        base: of the logarithm, > 1.

    Raises:
        ConfigError: no prompts, a prompt without rollouts, or a base that is not > 1.
    """
    if not asked:
        raise ConfigError("no prompts: routing entropy needs at least one")
    if not base > 1:
        raise ConfigError(f"the base of an entropy must be greater than 1, not {base}")
    by_prompt = {}
    for prompt in sorted(asked):
        choices = [bool(choice) for choice in asked[prompt]]
        if not choices:
            raise ConfigError(f"prompt {prompt!r} has no rollouts; leave it out")
        shares = (sum(choices) / len(choices), choices.count(False) / len(choices))
        by_prompt[prompt] = math.fsum(-p * math.log(p, base) for p in shares if p)
    return RoutingEntropy(statistics.fmean(by_prompt.values()), by_prompt, base)


def _quantile(ordered: Sequence[float], q: float) -> float:
    """The quantile q of sorted values, interpolated between neighbours."""
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def _require(outcomes: Outcomes) -> None:
    if not outcomes:
        raise ConfigError("no outcomes: there is not one finished trial to score")
    for task, seeds in outcomes.items():
        if not seeds:
            raise ConfigError(f"task {task!r} has no finished trial; leave it out and report it apart")


def _require_pairs(first: Outcomes, second: Outcomes) -> None:
    trials = [{(task, seed) for task, seeds in arm.items() for seed in seeds} for arm in (first, second)]
    if lonely := sorted(trials[0] ^ trials[1]):
        task, seed = lonely[0]
        arm = "first" if lonely[0] in trials[0] else "second"
        raise ConfigError(
            f"{len(lonely)} trials have no partner, the first is task {task!r}, seed {seed}, which only the {arm} arm "
            "has; finish the run with --resume, or compare the shared trials"
        )


def _successes(outcomes: Outcomes, task: str) -> list[float]:
    return [_checked(task, seed, success) for seed, success in outcomes[task].items()]


def _checked(task: str, seed: int, success: float) -> float:
    if not 0 <= success <= 1:  # refuses NaN too
        raise ConfigError(f"task {task!r}, seed {seed}: success must lie in [0, 1], not {success}")
    return float(success)
