"""The background loop behind all blocking calls."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from caddie_sdk import _blocking


async def _value(value: int) -> int:
    await asyncio.sleep(0.01)
    return value


def test_result_and_exception() -> None:
    async def fail() -> None:
        raise KeyError("x")

    assert _blocking.run(_value(3)) == 3
    with pytest.raises(KeyError, match="x"):
        _blocking.run(fail())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_task_that_ends_the_program_does_not_end_the_loop(error: BaseException) -> None:
    async def leave() -> None:
        raise error

    async def in_a_task() -> str:
        try:
            await asyncio.create_task(leave())
        except BaseException as caught:  # noqa: BLE001 - it is what the test is about
            return repr(caught)
        return "nothing"

    with pytest.raises(type(error)):
        _blocking.run(leave())
    assert _blocking.run(in_a_task()) == repr(error)
    assert _blocking.run(_value(5)) == 5


def test_one_loop_for_all_threads() -> None:
    async def loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with ThreadPoolExecutor(8) as pool:
        loops = list(pool.map(lambda _: _blocking.run(loop()), range(8)))
    assert len(set(map(id, loops))) == 1
    assert [thread.name for thread in threading.enumerate()].count("caddie-io") == 1


def test_calls_of_several_threads_run_side_by_side() -> None:
    async def sleep() -> None:
        await asyncio.sleep(0.2)

    started = time.monotonic()
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda _: _blocking.run(sleep()), range(10)))
    assert time.monotonic() - started < 1


def test_blocking_call_from_the_loop_itself_is_an_error_and_no_hang() -> None:
    async def inner() -> int:
        return _blocking.run(_value(3))

    with pytest.raises(RuntimeError, match="await its async twin"):
        _blocking.run(inner())
    assert _blocking.run(_value(4)) == 4


def test_blocking_call_from_a_worker_thread_of_the_loop_works() -> None:
    """Sync tools run in such threads, and may use blocking API."""

    async def inner() -> int:
        return await asyncio.to_thread(_blocking.run, _value(3))

    assert _blocking.run(inner()) == 3


def test_context_variables_travel() -> None:
    from contextvars import ContextVar

    who: ContextVar[str] = ContextVar("who", default="nobody")

    async def ask() -> str:
        return who.get()

    who.set("Ada")
    assert _blocking.run(ask()) == "Ada"


def test_forked_child_gets_a_loop_of_its_own_even_if_the_lock_was_held() -> None:
    assert _blocking.run(_value(1)) == 1
    held = _blocking._background._lock
    with held:
        child = os.fork()
        if child == 0:
            os._exit(0 if _blocking.run(_value(7)) == 7 else 1)
    until = time.monotonic() + 10
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the forked child hangs on the parent's lock")
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    assert _blocking.run(_value(2)) == 2
