"""Asking a critic, for every shell: a deadline that holds, and no exception that gets through.

`Consult` commands are answered here and nowhere else, so failing open (SPEC §4, rule 6) has one home.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from caddie_sdk import _blocking, tracing
from caddie_sdk.critic import ConsultState, Critic
from caddie_sdk.critique import Critique
from caddie_sdk.errors import ConfigError


def check_controls(controls: tuple[str, ...], critics: Mapping[str, Critic]) -> None:
    """Raise ConfigError when a control tool has no critic behind it."""
    for control in controls:
        if control not in critics:
            raise ConfigError(f"the control tool {control!r} has no critic behind it; pass one, or leave the tool out")


def _checked(critique: Critique) -> Critique:
    if not isinstance(critique, Critique):
        raise TypeError(f"the critic returned {type(critique).__name__}, not a Critique")
    return critique


def being_cancelled(error: BaseException) -> bool:
    """Whether somebody cancels us, rather than foreign code leaking a cancellation of its own making."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def aconsult(critics: Mapping[str, Critic], state: ConsultState) -> Critique:
    """Ask the critic behind `state.control`. Always returns; only cancellation gets through."""
    with tracing.consultation(state, critics.get(state.control)) as span:
        critique = await _aask(critics, state)
        span.advised(critique)
        return critique


async def _aask(critics: Mapping[str, Critic], state: ConsultState) -> Critique:
    started = time.monotonic()
    try:
        async with asyncio.timeout(state.timeout):
            critique = _checked(await critics[state.control].acritique(state))
    except asyncio.CancelledError as error:
        if being_cancelled(error):
            raise
        critique = Critique(status="failed", detail="the critic cancelled itself")
    except TimeoutError:
        critique = Critique(status="timeout", detail=f"no critique within {state.timeout:g} s")
    except Exception as error:  # noqa: BLE001 - a critic's own bug must not stop the agent (rule 6)
        critique = Critique(status="failed", detail=f"{type(error).__name__}: {error}")
    return replace(critique, seconds=round(time.monotonic() - started, 4))


def consult(critics: Mapping[str, Critic], state: ConsultState) -> Critique:
    """Blocking twin of `aconsult`; it waits for the same coroutine, so the same deadline holds."""
    return _blocking.run(aconsult(critics, state))


__all__ = ["aconsult", "being_cancelled", "check_controls", "consult"]
