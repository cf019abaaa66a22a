"""What rollouts cost: tokens with cached ones apart, calls, wall time (SPEC §6).

    costs = sum_costs(read_records("records.jsonl"))
    costs.critic.cached_tokens, costs.seconds_per_rollout, costs.requests_per_called_rollout

A record is one rollout as `caddie_evals.search_qa.record` makes it; read are its `usage` (of `agent` and `critic`),
`consultations` and `seconds`. Every rollout that is passed counts, failed ones too: they were paid for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from caddie_sdk.errors import ConfigError
from caddie_sdk.usage import Usage


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens and calls of one model. The three kinds of tokens do not overlap.

    Attributes:
        prompt_tokens: read anew; those from the cache are not among them.
        cached_tokens: prompt tokens that the server read from its cache.
        completion_tokens: written.
        calls: of the model.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    calls: int

    @property
    def tokens(self) -> int:
        """All tokens, cached ones too."""
        return self.prompt_tokens + self.cached_tokens + self.completion_tokens

    @property
    def cached_share(self) -> float | None:
        """Cached prompt tokens of all prompt tokens; None when there were none."""
        prompt = self.prompt_tokens + self.cached_tokens
        return self.cached_tokens / prompt if prompt else None

    @classmethod
    def of(cls, usage: Usage) -> Spent:
        """From a `Usage`, whose `prompt_tokens` hold the cached ones."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        return cls(usage.prompt_tokens - cached, cached, usage.completion_tokens, usage.calls)


@dataclass(frozen=True, slots=True)
class Costs:
    """Totals over rollouts.

    Attributes:
        rollouts: how many.
        agent, critic: their models' tokens and calls.
        seconds: wall time of the rollouts, summed; those that ran side by side count each.
        critic_seconds: the part of it that consultations took.
        requests: consultations that took place, those that brought no advice too.
        called: rollouts with at least one.
        unmetered: rollouts whose agent's tokens no server reported: the token totals are then a lower bound.
    """

    rollouts: int
    agent: Spent
    critic: Spent
    seconds: float
    critic_seconds: float
    requests: int
    called: int
    unmetered: int

    @property
    def requests_per_called_rollout(self) -> float | None:
        """Mean number of requests among rollouts that made any (Caddie paper, appendix H.1); None when none did."""
        return self.requests / self.called if self.called else None

    @property
    def called_share(self) -> float:
        """Share of rollouts that asked at least once."""
        return self.called / self.rollouts

    @property
    def seconds_per_rollout(self) -> float:
        """Mean wall time of a rollout."""
        return self.seconds / self.rollouts

    @property
    def tokens_per_rollout(self) -> float:
        """Mean tokens of a rollout, of agent and critic, cached ones too."""
        return (self.agent.tokens + self.critic.tokens) / self.rollouts


def requests_of(record: Mapping[str, Any]) -> int:
    """How often a rollout asked the critic: its consultations, without those an exhausted budget refused."""
    return sum(item.get("status") != "over_budget" for item in record.get("consultations") or ())


def sum_costs(records: Iterable[Mapping[str, Any]]) -> Costs:
    """The costs of rollouts, from their records.

    Raises:
        ConfigError: no records, or one whose time, usage or consultations cannot be read; it is named.
    """
    agent, critic = Usage(), Usage()
    seconds, critic_seconds, requests = [], [], []
    unmetered = 0
    for number, record in enumerate(records, 1):
        name = f"record {number} (id {record.get('id')!r})"
        usage = _mapping(record.get("usage") or {}, f"{name}, field 'usage'")
        own, other = (
            Usage.load(_mapping(usage.get(who) or {}, f"{name}, field 'usage.{who}'")) for who in ("agent", "critic")
        )
        agent, critic = agent + own, critic + other
        unmetered += not own.prompt_tokens
        seconds.append(_seconds(record.get("seconds"), f"{name}, field 'seconds'"))
        critic_seconds += [
            _seconds(item.get("seconds"), f"{name}, field 'consultations.seconds'")
            for item in _consultations(record, name)
        ]
        requests.append(requests_of(record))
    if not seconds:
        raise ConfigError("no records: there is not one finished rollout whose cost could be summed")
    return Costs(
        rollouts=len(seconds),
        agent=Spent.of(agent),
        critic=Spent.of(critic),
        seconds=math.fsum(seconds),
        critic_seconds=math.fsum(critic_seconds),
        requests=sum(requests),
        called=sum(count > 0 for count in requests),
        unmetered=unmetered,
    )


def _consultations(record: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = record.get("consultations") or []
    if not isinstance(found, list | tuple):
        raise ConfigError(f"{name}, field 'consultations': expected a list, not {type(found).__name__}")
    return [_mapping(item, f"{name}, field 'consultations'") for item in found]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected an object, not {type(value).__name__}")
    return value


def _seconds(value: Any, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{where}: expected seconds, a number >= 0, not {value!r}")
    return float(value)
