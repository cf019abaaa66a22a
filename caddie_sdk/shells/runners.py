"""What carries out the steps of a relayed request: HTTP upstream and consultations, blocking and async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from caddie_sdk.critic import Critic
from caddie_sdk.relay.flow import Answer, Ask, Emit, Flow, Read, Send, Start
from caddie_sdk.shells.consult import aconsult, consult

_HOP = frozenset(
    ("connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
     "te", "trailer", "transfer-encoding", "upgrade")
)  # fmt: skip
"""Headers that belong to one connection (RFC 9110, 7.6.1), or to a body's length on it."""


def passing(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that go on to the other side; ours and those of the connection stay here."""
    return {
        name: value
        for name, value in ((name.lower(), value) for name, value in headers.items())
        if name not in _HOP and not name.startswith("x-caddie")
    }


def _decoded(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of an answer whose body has been unpacked on the way."""
    return {name: value for name, value in passing(headers).items() if name != "content-encoding"}


class Runner:
    """Carries a flow out, blocking.

    Args:
        flow: the request's steps.
        send: sends a body upstream and returns the opened response (of httpx's kind).
        critics: control tool name to critic.
    """

    def __init__(self, flow: Flow, send: Callable[[bytes], Any], critics: Mapping[str, Critic]) -> None:
        self._flow, self._send, self._critics = flow, send, critics
        self._response: Any = None
        self._body: Iterator[bytes] = iter(())
        self._value: Any = None

    def head(self) -> Start:
        """Go on until the response to the caller begins."""
        step = self._next()
        assert isinstance(step, Start)
        return step

    def __iter__(self) -> Iterator[bytes]:
        while (step := self._next()) is not None:
            if isinstance(step, Emit):
                yield step.data

    def close(self) -> None:
        """End the request, wherever it stands."""
        self._flow.close()
        if self._response is not None:
            self._response.close()
            self._response = None

    def _next(self) -> Start | Emit | None:
        """The next step that concerns the caller."""
        try:
            step = self._flow.send(self._value)
            while not isinstance(step, Start | Emit):
                try:
                    value = self._carry(step)
                except Exception as error:  # noqa: BLE001 - the flow decides what a failure means
                    step = self._flow.throw(error)
                else:
                    step = self._flow.send(value)
            self._value = None
            return step
        except StopIteration:
            self.close()
            return None
        except BaseException:
            self.close()
            raise

    def _carry(self, step: Send | Read | Ask) -> Any:
        match step:
            case Send(body):
                if self._response is not None:
                    self._response.close()
                self._response = self._send(body)
                self._body = self._response.iter_bytes()
                return Answer(self._response.status_code, _decoded(self._response.headers))
            case Read():
                return next(self._body, None)
            case Ask(state):
                return consult(self._critics, state)


class AsyncRunner:
    """Async twin of `Runner`. Cancelled, it cancels what it waits for: the upstream's answer or the critic's."""

    def __init__(self, flow: Flow, send: Callable[[bytes], Awaitable[Any]], critics: Mapping[str, Critic]) -> None:
        self._flow, self._send, self._critics = flow, send, critics
        self._response: Any = None
        self._body: AsyncIterator[bytes] | None = None
        self._value: Any = None

    async def head(self) -> Start:
        """Go on until the response to the caller begins."""
        step = await self._next()
        assert isinstance(step, Start)
        return step

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (step := await self._next()) is not None:
            if isinstance(step, Emit):
                yield step.data

    async def aclose(self) -> None:
        """End the request, wherever it stands."""
        self._flow.close()
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()

    async def _next(self) -> Start | Emit | None:
        try:
            step = self._flow.send(self._value)
            while not isinstance(step, Start | Emit):
                try:
                    value = await self._carry(step)
                except Exception as error:  # noqa: BLE001 - the flow decides what a failure means
                    step = self._flow.throw(error)
                else:
                    step = self._flow.send(value)
            self._value = None
            return step
        except StopIteration:
            await self.aclose()
            return None
        except BaseException:
            await asyncio.shield(self.aclose())
            raise

    async def _carry(self, step: Send | Read | Ask) -> Any:
        match step:
            case Send(body):
                if self._response is not None:
                    await self._response.aclose()
                self._response = await self._send(body)
                self._body = self._response.aiter_bytes()
                return Answer(self._response.status_code, _decoded(self._response.headers))
            case Read():
                assert self._body is not None
                return await anext(self._body, None)
            case Ask(state):
                return await aconsult(self._critics, state)
