"""What every HTTP client here shares: the one owner of retries, and a client for each event loop."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
)
from tenacity.wait import wait_exponential, wait_random

from caddie_sdk.errors import ConfigError, EndpointUnavailable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to try again: only after `EndpointUnavailable` (no connection, 5xx, 429).

    Attributes:
        tries: calls in all, 1 or more.
        backoff: seconds before the second try; doubles each time. Up to one `backoff` is added at random, so
            that many rollouts refused together do not come back together.
        max_wait: seconds; the longest wait. A server that asks for longer is not tried again.
    """

    tries: int = 3
    backoff: float = 0.5
    max_wait: float = 30.0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ConfigError(f"tries must be 1 or more, not {self.tries}")

    def run(self, call: Callable[[], T]) -> T:
        """Call until it succeeds or the tries are used up; the last error is raised as it is."""
        return Retrying(**self._options())(call)

    async def arun(self, call: Callable[[], Awaitable[T]], *, within: float | None = None) -> T:
        """The same for an async call; no wait begins that would end later than `within` seconds from now."""

        async def attempt() -> T:  # tenacity awaits only what is declared async, which a lambda is not
            return await call()

        options = self._options()
        if within is not None:
            options["stop"] = options["stop"] | stop_before_delay(within)
        return await AsyncRetrying(**options)(attempt)

    def _options(self) -> dict[str, Any]:
        return {
            "stop": stop_after_attempt(self.tries),
            "retry": retry_if_exception(self._worth_it),
            "wait": self._wait,
            "reraise": True,
        }

    def _worth_it(self, error: BaseException) -> bool:
        return isinstance(error, EndpointUnavailable) and (error.retry_after or 0) <= self.max_wait

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after if isinstance(error, EndpointUnavailable) else None
        if asked is not None:
            return asked
        grows = wait_exponential(multiplier=self.backoff, max=self.max_wait) + wait_random(0, self.backoff)
        return grows(state)


def parse_retry_after(value: str | None) -> float | None:
    """Seconds to wait by a Retry-After header (RFC 9110, 10.2.3: seconds or a date); None if unusable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
        seconds = max(0.0, seconds)
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


class PerLoop(Generic[T]):
    """One client for each event loop: connections work only on the loop that opened them."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._clients: dict[asyncio.AbstractEventLoop, T] = {}
        self._lock = threading.Lock()  # loops may run in several threads

    def get(self) -> T:
        """The running loop's client."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._clients:
                # A closed loop's client can no longer be closed: forget it, or each asyncio.run leaks one.
                self._clients = {known: c for known, c in self._clients.items() if not known.is_closed()}
                self._clients[loop] = self._make()
            return self._clients[loop]

    def pop(self) -> T | None:
        """Forget and return the running loop's client, if it has one."""
        with self._lock:
            return self._clients.pop(asyncio.get_running_loop(), None)
