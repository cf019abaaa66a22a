"""What every HTTP client here shares: the one owner of retries, and a client for each event loop."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
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
S = TypeVar("S")


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
    """One client for each event loop: connections work only on the loop that opened them.

    A client is closed with its loop where the loop is ended by `asyncio.run` or a runner.

    Args:
        make: makes a client; called on the loop it is for.
        close: closes one.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[Any]]) -> None:
        self._make, self._close = make, close
        self._held: dict[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None, None]]] = {}
        self._lock = threading.Lock()  # loops may run in several threads

    def __len__(self) -> int:
        return len(self._held)

    async def get(self) -> T:
        """The running loop's client."""
        loop = asyncio.get_running_loop()
        if (held := self._held.get(loop)) is not None:
            return held[0]
        client = self._make()
        closing = self._closing(client)
        with self._lock:
            # An open connection refers to its loop, so the clients of finished loops would never go by themselves.
            self._held = {known: held for known, held in self._held.items() if not known.is_closed()}
            self._held[loop] = client, closing
        await anext(closing)
        return client

    async def aclose(self) -> None:
        """Close the running loop's client, if it has one."""
        with self._lock:
            held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[1].aclose()

    async def _closing(self, client: T) -> AsyncGenerator[None, None]:
        """`asyncio.run` ends the generators that are still open; this one closes the client then."""
        try:
            yield
        finally:
            await self._close(client)


class Clients(Generic[S, T]):
    """A blocking client, made when it is first needed, and an async one for each event loop.

    Args:
        make, amake: make them.
        close, aclose: close them.
    """

    def __init__(
        self, make: Callable[[], S], close: Callable[[S], Any], amake: Callable[[], T], aclose: Callable[[T], Any]
    ) -> None:
        self._make, self._close = make, close
        self._one: S | None = None
        self._lock = threading.Lock()
        self._per_loop = PerLoop(amake, aclose)

    def get(self) -> S:
        """The blocking client."""
        with self._lock:
            if self._one is None:
                self._one = self._make()
            return self._one

    async def aget(self) -> T:
        """The running loop's client."""
        return await self._per_loop.get()

    def close(self) -> None:
        """Close the blocking client."""
        with self._lock:
            client, self._one = self._one, None
        if client is not None:
            self._close(client)

    async def aclose(self) -> None:
        """Close the blocking client and that of the running loop."""
        self.close()
        await self._per_loop.aclose()
