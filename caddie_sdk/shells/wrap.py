"""`wrap(client, critic)`: an openai client whose agent may consult a critic, with nothing else changed.

The wrapped client is the client itself over another transport: each chat-completions and responses request passes
through a relay (`caddie_sdk/relay`) on its way, so whatever the client can do (retries, raw responses, parsing
helpers, typed streams) works as it did.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from caddie_sdk.budget import Budget
from caddie_sdk.critic import Critic
from caddie_sdk.errors import ConfigError
from caddie_sdk.intervention import Intervention
from caddie_sdk.relay.flow import Relay
from caddie_sdk.relay.ledger import Ledger, MemoryLedger, SqliteLedger
from caddie_sdk.shells.runners import AsyncRunner, Runner, passing
from caddie_sdk.shells.terms import agree, check_critics, named_critics
from caddie_sdk.tracing import TraceSink

Client = TypeVar("Client")


def wrap(
    client: Client,
    critic: Critic | None = None,
    *,
    feedback: Critic | None = None,
    protocol: Intervention | str = "self-call",
    budget: Budget | None = None,
    on_error: str = "continue",
    ledger: Ledger | str | Path | None = None,
    advice: bool = False,
    traces: TraceSink | str | Path | None = None,
) -> Client:
    """An openai client whose model may consult a critic while it works.

    The control tool is added to every chat-completions and responses request that leaves the choice of tools to the
    model; what the model asks is answered on the way, and the caller gets only what it must handle. Earlier
    consultations are put back into later requests of the same history.

    Args:
        client: an `OpenAI` or `AsyncOpenAI` client, or a subclass. It stays usable, without a critic.
        critic: answers `call_critic`.
        feedback: answers `request_feedback`.
        protocol: when to consult; an `Intervention` or its text form.
        budget: limits; `max_steps`, `min_steps` and `max_rejections` are the caller's own business here.
        on_error: `continue` goes on without advice when a consultation fails; `raise` ends the request with status
            424, which the client raises as `openai.APIStatusError`.
        ledger: where turns with consultations are kept between requests: by default in memory (64 MiB), or the path
            of an SQLite file that outlives the process.
        advice: put the texts of critiques into the answer's extension field `caddie`.
        traces: a sink, or the path of a file, to which each finished trajectory is written.

    Returns:
        A client of the same class that shares connections, key and settings with `client`.

    Raises:
        ConfigError: it is no openai client, or a setting is wrong.
    """
    critics = named_critics(critic, feedback, "wrap")
    relay = make_relay(
        critics, protocol=protocol, budget=budget, on_error=on_error, ledger=ledger, advice=advice, traces=traces
    )
    http = getattr(client, "_client", None)
    if not hasattr(client, "copy") or not hasattr(http, "build_request"):
        raise ConfigError(f"wrap takes an OpenAI or AsyncOpenAI client, not {type(client).__name__}")
    assert http is not None
    return client.copy(http_client=_relaying(http, relay, critics))  # type: ignore[no-any-return]


def make_relay(
    critics: Mapping[str, Critic],
    *,
    protocol: Intervention | str = "self-call",
    budget: Budget | None = None,
    on_error: str = "continue",
    ledger: Ledger | str | Path | None = None,
    advice: bool = False,
    traces: TraceSink | str | Path | None = None,
) -> Relay:
    """The relay behind `wrap` and the proxy.

    Raises:
        ConfigError: a setting is wrong.
    """
    check_critics(critics)
    terms = agree(critics, protocol, budget, on_error)
    kept: Any = SqliteLedger(ledger) if isinstance(ledger, str | Path) else ledger
    sink = TraceSink(traces) if isinstance(traces, str | Path) else traces
    return Relay(terms, MemoryLedger() if kept is None else kept, advice=advice, traces=sink)


def _relaying(http: Any, relay: Relay, critics: Mapping[str, Critic]) -> Any:
    """An HTTP client of the same library as `http`, over whose connections everything still goes."""
    name = next(base.__module__.split(".")[0] for base in type(http).__mro__ if base.__name__ in _KINDS)
    library = importlib.import_module(name)
    settings = {
        "headers": http.headers,
        "cookies": http.cookies,
        "params": http.params,
        "timeout": http.timeout,
        "follow_redirects": http.follow_redirects,
        "trust_env": False,
    }
    if any(base.__name__ == "AsyncClient" for base in type(http).__mro__):
        return library.AsyncClient(transport=_async_transport(library)(http, relay, critics), **settings)
    return library.Client(transport=_transport(library)(http, relay, critics), **settings)


_KINDS = ("Client", "AsyncClient")


def _again(library: Any, request: Any, body: bytes) -> Any:
    """The same request with another body, for the inner client to sign and to send; with the caller's timeouts."""
    headers = passing(request.headers)
    return library.Request(
        request.method,
        request.url,
        headers={"host": request.headers["host"], **headers},
        content=body,
        extensions=request.extensions,
    )


def _transport(library: Any) -> Any:
    class Transport(library.BaseTransport):  # type: ignore[misc]
        """Sends requests on through another client; those that a relay handles, by its steps."""

        def __init__(self, http: Any, relay: Relay, critics: Mapping[str, Critic]) -> None:
            self._http, self._relay, self._critics = http, relay, critics

        def handle_request(self, request: Any) -> Any:
            if not self._relay.handles(request.method, request.url.path):
                answer = self._send(request, request.read())
                body = Body(answer.iter_raw(), answer)
                return library.Response(answer.status_code, headers=answer.headers, stream=body)
            flow = self._relay.flow(request.url.path, dict(request.headers.items()), request.read())
            runner = Runner(flow, lambda body: self._send(request, body), self._critics)
            head = runner.head()
            return library.Response(head.status, headers=dict(head.headers), stream=Body(runner, runner))

        def _send(self, request: Any, body: bytes) -> Any:
            return self._http.send(_again(library, request, body), stream=True, follow_redirects=False)

        def close(self) -> None:
            self._http.close()

    class Body(library.SyncByteStream):  # type: ignore[misc]
        def __init__(self, parts: Any, owner: Any) -> None:
            self._parts, self._owner = parts, owner

        def __iter__(self) -> Iterator[bytes]:
            yield from self._parts

        def close(self) -> None:
            self._owner.close()

    return Transport


def _async_transport(library: Any) -> Any:
    class Transport(library.AsyncBaseTransport):  # type: ignore[misc]
        """Async twin."""

        def __init__(self, http: Any, relay: Relay, critics: Mapping[str, Critic]) -> None:
            self._http, self._relay, self._critics = http, relay, critics

        async def handle_async_request(self, request: Any) -> Any:
            if not self._relay.handles(request.method, request.url.path):
                answer = await self._send(request, await request.aread())
                body = Body(answer.aiter_raw(), answer)
                return library.Response(answer.status_code, headers=answer.headers, stream=body)
            flow = self._relay.flow(request.url.path, dict(request.headers.items()), await request.aread())
            runner = AsyncRunner(flow, lambda body: self._send(request, body), self._critics)
            head = await runner.head()
            return library.Response(head.status, headers=dict(head.headers), stream=Body(runner, runner))

        async def _send(self, request: Any, body: bytes) -> Any:
            return await self._http.send(_again(library, request, body), stream=True, follow_redirects=False)

        async def aclose(self) -> None:
            await self._http.aclose()

    class Body(library.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, parts: Any, owner: Any) -> None:
            self._parts, self._owner = parts, owner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for part in self._parts:
                yield part

        async def aclose(self) -> None:
            await self._owner.aclose()

    return Transport
