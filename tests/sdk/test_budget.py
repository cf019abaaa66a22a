"""Budgets, usage, and what a configuration refuses (SPEC §4, rule 5; §6)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import session_driver as driver
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie_sdk.budget import Budget
from caddie_sdk.config import SessionConfig
from caddie_sdk.errors import ConfigError
from caddie_sdk.intervention import Guarded, Probabilistic
from caddie_sdk.usage import Usage


def test_the_defaults_are_the_papers() -> None:
    budget = Budget()
    assert (budget.max_uses, budget.max_tokens) == (3, 512)
    assert (budget.session_max_uses, budget.max_input_tokens, budget.max_steps) == (None, None, None)


@pytest.mark.parametrize(
    ("limits", "uses", "session_uses", "left"),
    [
        ({"max_uses": 3}, 0, 0, 3),
        ({"max_uses": 3}, 2, 50, 1),
        ({"max_uses": 3}, 3, 3, 0),
        ({"max_uses": 3}, 5, 5, 0),
        ({"max_uses": 0}, 0, 0, 0),
        ({"max_uses": 3, "session_max_uses": 4}, 0, 3, 1),
        ({"max_uses": 3, "session_max_uses": 4}, 2, 2, 1),
        ({"max_uses": 3, "session_max_uses": 4}, 0, 4, 0),
        ({"max_uses": 3, "session_max_uses": 0}, 0, 0, 0),
        ({"max_uses": 3, "session_max_uses": 2}, 0, 9, 0),
    ],
)
def test_remaining(limits: dict[str, int], uses: int, session_uses: int, left: int) -> None:
    assert Budget(**limits).remaining(uses, session_uses) == left  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_uses": -1}, "max_uses"),
        ({"session_max_uses": -1}, "session_max_uses"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_input_tokens": -1}, "max_input_tokens"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"max_steps": -1}, "max_steps"),
        ({"min_steps": -1}, "min_steps"),
        ({"max_rejections": -1}, "max_rejections"),
        ({"min_steps": 3, "max_steps": 2}, "min_steps"),
    ],
)
def test_a_budget_that_makes_no_sense_names_the_field(limits: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Budget(**limits)


def test_a_budget_survives_json() -> None:
    budget = Budget(1, 2, 3, 4, 5.5, 6, 6, 0)
    assert Budget(**json.loads(json.dumps(budget.dump()))) == budget


# ---------------------------------------------------------------- usage


def test_usage_adds_up() -> None:
    assert Usage(1, 2, 3, 4) + Usage(10, 20, 30, 40) == Usage(11, 22, 33, 44)
    assert Usage() + Usage(calls=1) == Usage(calls=1)


def test_usage_from_a_servers_answer() -> None:
    full = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}, "other": "x"}
    assert Usage.from_openai(full) == Usage(9, 5, 4, 1)
    assert Usage.from_openai(None) == Usage(calls=1)
    assert Usage.from_openai({}) == Usage(calls=1)
    assert Usage.from_openai({"prompt_tokens": None, "prompt_tokens_details": None}) == Usage(calls=1)
    assert Usage.from_openai({"prompt_tokens": -4, "completion_tokens": "7"}) == Usage(calls=1)
    types = pytest.importorskip("openai.types.completion_usage")
    made = types.CompletionUsage(
        prompt_tokens=9,
        completion_tokens=5,
        total_tokens=14,
        prompt_tokens_details=types.PromptTokensDetails(cached_tokens=4),
    )
    assert Usage.from_openai(made) == Usage(9, 5, 4, 1)


@given(st.dictionaries(st.sampled_from(["prompt_tokens", "cached_tokens", "calls", "x"]), st.integers() | st.text()))
@settings(max_examples=100, deadline=None)
def test_usage_loads_whatever_it_is_given(data: dict[str, Any]) -> None:
    usage = Usage.load(data)
    assert Usage.load(json.loads(json.dumps(usage.dump()))) == usage
    assert min(usage.dump().values()) >= 0


# ---------------------------------------------------------------- configurations


@given(driver.configs())
@settings(max_examples=100, deadline=None)
def test_a_configuration_survives_json(config: SessionConfig) -> None:
    assert SessionConfig.load(json.loads(json.dumps(config.dump()))) == config


def test_an_alpha_that_is_a_whole_number_survives_json() -> None:
    config = SessionConfig(protocol=Probabilistic(1))
    again = SessionConfig.load(json.loads(json.dumps(config.dump())))
    assert again.dump() == config.dump()
    assert config.dump()["protocol"] == "probabilistic:1.0"


@pytest.mark.parametrize(
    ("settings_", "told"),
    [
        ({"tools": (driver.SEARCH, driver.SEARCH)}, "'search' is used twice"),
        ({"tools": ({"type": "function"},)}, "function"),
        ({"tools": ({"type": "function", "function": {"name": ""}},)}, "name"),
        ({"tools": (driver.schema("call_critic", "q"),)}, "call_critic"),
        ({"controls": ("ask_a_friend",)}, "ask_a_friend"),
        ({"format": "xml"}, "xml"),
        ({"profile": "strict"}, "strict"),
        ({"on_error": "ignore"}, "ignore"),
        ({"format": "caddie", "tools": (driver.schema("answer", "q"),)}, "answer"),
        ({"format": "caddie", "tools": ({"type": "function", "function": {"name": "nothing"}},)}, "nothing"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(settings_: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SessionConfig(**settings_)


def test_a_tool_may_be_called_like_a_control_that_is_not_on_offer() -> None:
    config = SessionConfig(tools=(driver.schema("call_critic", "q"),), controls=("request_feedback",))
    assert config.dump()["tools"][0]["function"]["name"] == "call_critic"
    assert config == SessionConfig.load(config.dump())
    assert SessionConfig(protocol=Guarded(("refund",))).protocol.guards("refund")
