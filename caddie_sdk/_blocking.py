"""Run a coroutine from synchronous code on one background event loop.

The blocking twins of Caddie's I/O call their async selves through `run`, so that retries, deadlines and
cancellation exist once. The loop lives on a daemon thread, is shared by all clients, and is made anew after a
fork (ALFWorld branches by `os.fork`), where the parent's thread does not exist.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Background:
    """One event loop on a daemon thread, started when it is first needed."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start over: in a forked child the thread is not there, and another one may have held the lock."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self.thread = threading.Thread(target=_serve, args=(self._loop,), name="caddie-io", daemon=True)
                self.thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            # A task that ends so (a tool that calls sys.exit) stops the loop it runs on. Whoever waits for the task is
            # told; the loop serves the others as well.
            continue
        return


_background = _Background()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_background.forget)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine from any thread but the loop's own. An interrupt cancels it.

    Raises:
        RuntimeError: called by something that runs on the loop, which would wait for itself for ever.
    """
    if threading.current_thread() is _background.thread:
        coroutine.close()
        raise RuntimeError("a blocking call inside a coroutine would wait for ever; await its async twin instead")
    future = asyncio.run_coroutine_threadsafe(coroutine, _background.loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
