"""Asking a critic (shells/consult.py): a deadline that holds, and no failure that gets through (SPEC §4, rule 6)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from graph_kit import WAYS, Invoke, asks

from caddie_sdk import Budget, Critique, Usage, create_caddie_agent
from caddie_sdk.critic import ConsultState
from caddie_sdk.errors import ConfigError, EndpointTimeout
from caddie_sdk.shells.consult import aconsult, check_controls, consult
from caddie_sdk.testing import ScriptedCritic, ScriptedModel

STATE = ConsultState("call_critic", "self-call", 0, (), timeout=0.2)


def _sync(critic: Any, state: ConsultState = STATE) -> Critique:
    return consult({"call_critic": critic}, state)


def _async(critic: Any, state: ConsultState = STATE) -> Critique:
    return asyncio.run(aconsult({"call_critic": critic}, state))


Ask = Callable[..., Critique]


@pytest.fixture(params=[_sync, _async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param  # type: ignore[no-any-return]


def test_good_critique_is_passed_on_with_its_time(ask: Ask) -> None:
    given = Critique("a", "b", raw="r", usage=Usage(3, 2, 1, 1), model="m")

    def slowly(state: ConsultState) -> Critique:
        time.sleep(0.05)
        return given

    got = ask(ScriptedCritic(slowly))
    assert (got.analysis, got.advice, got.raw, got.usage, got.model) == ("a", "b", "r", Usage(3, 2, 1, 1), "m")
    assert 0.05 <= got.seconds < 1
    assert given.seconds == 0


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (RuntimeError("my bug"), "RuntimeError: my bug"),
        (KeyError("x"), "KeyError: 'x'"),
        (EndpointTimeout("http://x gave no answer"), "EndpointTimeout: http://x gave no answer"),
        (AssertionError(), "AssertionError: "),
    ],
    ids=repr,
)
def test_critic_that_raises(error: Exception, detail: str, ask: Ask) -> None:
    got = ask(ScriptedCritic([error]))
    assert (got.status, got.detail, got.ok) == ("failed", detail, False)


class Returns:
    def __init__(self, value: Any) -> None:
        self.value = value

    def critique(self, state: ConsultState) -> Any:
        return self.value

    async def acritique(self, state: ConsultState) -> Any:
        return self.value


@pytest.mark.parametrize("value", [None, "do this", ("a", "b"), {"advice": "x"}, 7, Critique], ids=repr)
def test_critic_that_returns_something_else(value: Any, ask: Ask) -> None:
    got = ask(Returns(value))
    assert got.status == "failed"
    assert "not a Critique" in got.detail


def test_missing_critic_fails_open(ask: Ask) -> None:
    got = ask(ScriptedCritic([]), ConsultState("request_feedback", "self-call", 0, ()))
    assert got.status == "failed"


def test_deadline_holds() -> None:
    class Slow(Returns):
        async def acritique(self, state: ConsultState) -> Any:
            await asyncio.sleep(10)

    started = time.monotonic()
    got = _async(Slow(None))
    assert (got.status, got.detail) == ("timeout", "no critique within 0.2 s")
    assert time.monotonic() - started < 2


def test_deadline_holds_against_a_critic_that_swallows_the_first_cancellation() -> None:
    class Stubborn(Returns):
        async def acritique(self, state: ConsultState) -> Any:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                return Critique("late", "late")

    assert _async(Stubborn(None)).status in ("timeout", "ok")


def test_critic_that_cancels_itself() -> None:
    """A cancellation that nobody asked for is the critic's failure."""

    class Leaks(Returns):
        async def acritique(self, state: ConsultState) -> Any:
            task = asyncio.create_task(asyncio.sleep(10))
            await asyncio.sleep(0)
            task.cancel()
            await task

    assert _async(Leaks(None)).status == "failed"


def test_cancellation_gets_through() -> None:
    class Slow(Returns):
        async def acritique(self, state: ConsultState) -> Any:
            await asyncio.sleep(10)

    async def cancelled() -> None:
        task = asyncio.create_task(aconsult({"call_critic": Slow(None)}, STATE))
        await asyncio.sleep(0.02)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


@pytest.mark.parametrize("way", WAYS)
def test_blocking_critic_inside_an_async_one_does_not_hang(way: str) -> None:
    """`acritique` that calls our own blocking API would wait for the loop it runs on; it must fail, not hang."""
    from caddie_sdk import _blocking

    class Mixed(Returns):
        async def acritique(self, state: ConsultState) -> Any:
            return _blocking.run(self.work())

        async def work(self) -> Critique:
            return Critique("a", "b")

    agent = create_caddie_agent(ScriptedModel([asks(), "Paris"]), critic=Mixed(None))
    invoke: Invoke = WAYS[way]
    output = invoke(agent, {"messages": "Where?"}, {})
    assert output["answer"] == "Paris"
    (record,) = output["consultations"]
    # Under `ainvoke` the caller's own loop waits and the background loop works; under `invoke` they are the same.
    if way == "sync":
        assert record["critique"]["status"] == "failed"
        assert "async twin" in record["critique"]["detail"]
    else:
        assert record["critique"]["status"] == "ok"


@pytest.mark.parametrize("way", WAYS)
def test_budget_timeout_reaches_the_critic(way: str) -> None:
    class Slow(Returns):
        async def acritique(self, state: ConsultState) -> Any:
            assert state.timeout == 0.1
            await asyncio.sleep(10)

    agent = create_caddie_agent(
        ScriptedModel([asks(), "Paris"]), critic=Slow(None), budget=Budget(timeout=0.1, max_steps=3)
    )
    started = time.monotonic()
    output = WAYS[way](agent, {"messages": "Where?"}, {})
    assert time.monotonic() - started < 3
    assert output["consultations"][0]["critique"]["status"] == "timeout"
    assert output["consultations"][0]["critique"]["seconds"] == pytest.approx(0.1, abs=0.5)
    assert output["answer"] == "Paris"


def test_controls_need_their_critics() -> None:
    check_controls(("call_critic",), {"call_critic": ScriptedCritic([])})
    with pytest.raises(ConfigError, match="'request_feedback' has no critic behind it"):
        check_controls(("call_critic", "request_feedback"), {"call_critic": ScriptedCritic([])})
