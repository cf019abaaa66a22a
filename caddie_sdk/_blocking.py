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

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner: int | None = None


def _background_loop() -> asyncio.AbstractEventLoop:
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():
            _loop, _owner = asyncio.new_event_loop(), os.getpid()
            threading.Thread(target=_loop.run_forever, name="caddie-io", daemon=True).start()
        return _loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine from a thread without a running loop. An interrupt cancels it."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _background_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
