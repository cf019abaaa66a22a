"""Costs of rollouts, summed by hand, and from a record that a real episode makes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caddie_evals.costs import Spent, requests_of, sum_costs
from caddie_evals.questions import Question
from caddie_evals.search_qa import record, search_tool
from caddie_sdk.errors import ConfigError
from caddie_sdk.session import Session, SessionConfig
from caddie_sdk.shells.loop import run
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, tool_call
from caddie_sdk.usage import Usage
from caddie_tools import Passage


def rollout(id: str, seconds: float, agent: Usage, critic: Usage, *consultations: tuple[str, float]) -> dict[str, Any]:
    return {
        "id": id,
        "seconds": seconds,
        "usage": {"agent": agent.dump(), "critic": critic.dump()},
        "consultations": [{"status": status, "seconds": took} for status, took in consultations],
    }


ROLLOUTS = [
    rollout("a", 2.0, Usage(100, 10, 40, 2), Usage(50, 20, 30, 2), ("ok", 0.5), ("timeout", 1.0)),
    rollout("b", 1.0, Usage(30, 5, 0, 1), Usage()),
    # The budget refused this one: nobody was asked, so the rollout did not call.
    rollout("c", 4.0, Usage(0, 0, 0, 3), Usage(), ("over_budget", 0.0)),
    rollout("d", 0.5, Usage(20, 1, 20, 1), Usage(10, 4, 0, 1), ("ok", 0.25)),
]


def test_costs_by_hand() -> None:
    found = sum_costs(ROLLOUTS)
    # agent: prompt 100 + 30 + 20 = 150 of which 40 + 20 = 60 cached; written 16; calls 2 + 1 + 3 + 1
    assert found.agent == Spent(prompt_tokens=90, cached_tokens=60, completion_tokens=16, calls=7)
    # critic: prompt 60 of which 30 cached; written 24; calls 3
    assert found.critic == Spent(prompt_tokens=30, cached_tokens=30, completion_tokens=24, calls=3)
    assert (found.rollouts, found.seconds, found.critic_seconds) == (4, 7.5, 1.75)
    # requests: a two (the one that timed out was made), d one; called: a and d
    assert (found.requests, found.called, found.unmetered) == (3, 2, 1)
    assert found.requests_per_called_rollout == 1.5
    assert found.called_share == 0.5
    assert found.seconds_per_rollout == 1.875
    assert found.tokens_per_rollout == (90 + 60 + 16 + 30 + 30 + 24) / 4
    assert found.agent.cached_share == 60 / 150


def test_nobody_asked() -> None:
    found = sum_costs(ROLLOUTS[1:2])
    assert found.requests_per_called_rollout is None
    assert found.critic == Spent(0, 0, 0, 0)
    assert found.critic.cached_share is None


def test_more_cached_than_read_is_all_cached() -> None:
    assert Spent.of(Usage(prompt_tokens=10, cached_tokens=12)) == Spent(0, 10, 0, 0)


def test_a_record_of_a_real_episode() -> None:
    """The fields read here are those that `search_qa.record` writes."""
    passages = (Passage("p", "Ada", "Ada was born in Fenwick."),)
    question = Question("q", "Where was Ada born?", answers=("Fenwick",), passages=passages)
    look_up = search_tool(question)
    model = ScriptedModel(
        [calls(tool_call("call_critic")), calls(tool_call("search", {"query": "Ada"})), "Fenwick"], Usage(10, 5, 4, 1)
    )
    critic = ScriptedCritic([("Nothing was looked up.", "Search for Ada.")])
    session = Session(SessionConfig(tools=(look_up.schema(),)))
    outcome = run(session, question.question, model, [look_up], {"call_critic": critic})
    state = {
        "answer": outcome.answer,
        "reason": session.reason,
        "consultations": session.consultations,
        "usage": {"agent": session.usage.dump(), "critic": session.critic_usage.dump()},
    }
    made = record(question, state, seconds=1.5)
    found = sum_costs([made])
    assert found.agent == Spent(prompt_tokens=18, cached_tokens=12, completion_tokens=15, calls=3)
    assert (found.requests, found.called, found.seconds, found.unmetered) == (1, 1, 1.5, 0)
    assert requests_of(made) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seconds": None}, r"record 2 \(id 'b'\), field 'seconds': expected seconds, a number >= 0, not None"),
        ({"seconds": -1}, "not -1"),
        ({"seconds": True}, "not True"),
        ({"seconds": float("nan")}, "not nan"),
        ({"usage": [1]}, "field 'usage': expected an object, not list"),
        ({"usage": {"agent": 3}}, "field 'usage.agent': expected an object, not int"),
        ({"consultations": {"a": 1}}, "field 'consultations': expected a list, not dict"),
        ({"consultations": ["x"]}, "field 'consultations': expected an object, not str"),
        ({"consultations": [{"status": "ok"}]}, "field 'consultations.seconds'"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        sum_costs([ROLLOUTS[0], {**ROLLOUTS[1], **changed}])
    assert "\n" not in str(caught.value)


def test_no_records() -> None:
    with pytest.raises(ConfigError, match="no records"):
        sum_costs([])


@given(st.permutations(ROLLOUTS))
def test_no_order_matters(mixed: list[dict[str, Any]]) -> None:
    assert sum_costs(mixed) == sum_costs(ROLLOUTS)
