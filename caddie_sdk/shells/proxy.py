"""The proxy: an OpenAI-compatible server between an agent in any language and its model, with a critic at hand.

    /v1/chat/completions, /v1/responses   through the relay, streaming or not
    everything else                       passes to the upstream as it is
    /caddie/critique                      advice on a conversation, by its messages or its session name
    /healthz, /metrics                    for operators

The caller's key goes upstream with its request and nowhere else. Contents are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from caddie_sdk.critic import Critic
from caddie_sdk.critique import Critique
from caddie_sdk.endpoint import with_v1
from caddie_sdk.errors import CaddieError, ConfigError, MissingExtra
from caddie_sdk.relay import sse
from caddie_sdk.relay.flow import Emit, Relay, Start, openai_error
from caddie_sdk.shells.consult import aconsult
from caddie_sdk.shells.metrics import Metrics
from caddie_sdk.shells.pool import Pool, Slot
from caddie_sdk.shells.runners import AsyncRunner, passing

try:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtra("the proxy", "proxy") from error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

log = logging.getLogger("caddie.proxy")

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may cost.

    Attributes:
        max_body: bytes of a request body.
        connect: seconds until the upstream accepts a connection.
        idle: seconds without a byte from the upstream.
        total: seconds for the whole request, consultations included.
        connections: to the upstream, at one time.
    """

    max_body: int = 32 * 2**20
    connect: float = 10.0
    idle: float = 600.0
    total: float = 3600.0
    connections: int = 1000

    def __post_init__(self) -> None:
        for name in ("max_body", "connect", "idle", "total", "connections"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"limits: {name} must be positive")


class _TooLarge(Exception):
    """The request's body exceeds the limit."""


def create_app(
    upstream: str,
    critics: Mapping[str, Critic],
    relay: Relay,
    *,
    limits: Limits | None = None,
    metrics: Metrics | None = None,
    on_shutdown: Callable[[], Any] | None = None,
) -> Starlette:
    """The proxy as an ASGI application.

    Args:
        upstream: base URL of the model server, with or without `/v1`.
        critics: control tool name to critic; none at all makes a plain proxy.
        relay: see `caddie_sdk.shells.wrap.make_relay`.
        limits: of size and time.
        metrics: where counts go; by default a registry of the application's own.
        on_shutdown: called when the server has drained.

    Raises:
        ConfigError: the URL cannot be one.
    """
    try:
        url = with_v1(upstream)
    except ConfigError as error:
        raise ConfigError(f"the upstream's {error}") from None
    proxy = _Proxy(url, critics, relay, limits or Limits(), metrics or Metrics())
    relay.observer = proxy.metrics

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await proxy.pool.aclose()
        if on_shutdown is not None:
            on_shutdown()

    routes = [
        Route("/healthz", proxy.healthz),
        Route("/metrics", proxy.metrics_page),
        Route("/caddie/critique", proxy.critique, methods=["POST"]),
        Route("/{path:path}", proxy.relayed, methods=_METHODS),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


class _Proxy:
    def __init__(
        self, upstream: str, critics: Mapping[str, Critic], relay: Relay, limits: Limits, metrics: Metrics
    ) -> None:
        self.base, self.critics, self.relay = upstream, critics, relay
        self.limits, self.metrics = limits, metrics
        parts = urlsplit(upstream)
        self.root = f"{parts.scheme}://{parts.netloc}"
        self.pool = Pool(self._client, limits.connections)

    def _client(self, connections: int) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            timeout=httpx.Timeout(self.limits.idle, connect=self.limits.connect, pool=self.limits.total),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            follow_redirects=False,
            trust_env=False,
        )

    # ---------------------------------------------------------------- operators

    async def healthz(self, request: Request) -> Response:
        """Alive; says nothing about the upstream."""
        return JSONResponse({"status": "ok"})

    async def metrics_page(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self.metrics.page(), media_type=self.metrics.content_type)

    # ---------------------------------------------------------------- requests

    async def relayed(self, request: Request) -> Response:
        """A request for the upstream, through the relay where it handles the path."""
        try:
            async with asyncio.timeout(self.limits.total):
                body = await self._body(request)
        except _TooLarge:
            limit = f"{self.limits.max_body:,} bytes"
            return error_response(413, "request_too_large", f"the request body is larger than {limit}")
        except TimeoutError:
            return error_response(408, "request_timeout", "the request body did not arrive in time")
        except ClientDisconnect:
            return Response(status_code=499)
        path, slot = request.scope["path"], self.pool.slot()
        headers = passing(request.headers)
        if self.relay.handles(request.method, path):
            headers.pop("accept-encoding", None)  # what is read here must be packed in a way that is known here
            flow = self.relay.flow(path, request.headers, body)
            return _Relayed(AsyncRunner(flow, self._sender(request, headers, slot), self.critics), self, slot)
        headers.setdefault("accept-encoding", "identity")
        return _Relayed(_Plain(self._sender(request, headers, slot), body), self, slot)

    def _sender(self, request: Request, headers: Mapping[str, str], slot: Slot) -> Callable[[bytes], Any]:
        url = self._url(request)

        async def send(body: bytes) -> httpx.Response:
            sent = slot.client.build_request(request.method, url, headers=headers, content=body or None)
            return await slot.client.send(sent, stream=True)

        return send

    def _url(self, request: Request) -> str:
        path = request.scope.get("raw_path", request.scope["path"].encode()).decode("latin-1").partition("?")[0]
        url = self.base + path.removeprefix("/v1") if path.startswith("/v1/") else self.root + path
        query = request.scope.get("query_string", b"").decode("latin-1")
        return f"{url}?{query}" if query else url

    async def _body(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self.limits.max_body:
            raise _TooLarge
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.limits.max_body:
                raise _TooLarge
            parts.append(part)
        return b"".join(parts)

    # ---------------------------------------------------------------- advice for others

    async def critique(self, request: Request) -> Response:
        """Advice on a conversation that is given, or that this proxy has relayed under a session name."""
        try:
            asked = json.loads(await self._body(request))
            if not isinstance(asked, dict):
                raise ValueError("not an object")
        except _TooLarge:
            return error_response(413, "request_too_large", "the request body is too large")
        except ValueError:
            return error_response(400, "invalid_request_error", "the body must be a JSON object")
        try:
            critique = await self._advice(asked)
        except LookupError as error:
            return error_response(404, "not_found", str(error.args[0]))
        except CaddieError as error:
            return error_response(400, "invalid_request_error", str(error))
        facts = {name: getattr(critique, name) for name in ("status", "detail", "analysis", "advice", "seconds")}
        return JSONResponse({**facts, "usage": asdict(critique.usage)})

    async def _advice(self, asked: Mapping[str, Any]) -> Critique:
        from caddie_sdk.relay.advise import advise

        control = str(asked.get("control") or next(iter(self.critics), ""))
        if control not in self.critics:
            raise ConfigError(f"there is no critic behind {control!r} here")
        if (name := asked.get("session_id")) is None:
            messages, tools = asked.get("messages") or [], asked.get("tools") or []
            return await advise(messages, tools, self.critics, control=control, budget=self.relay.terms.budget)
        session = self.relay.recall(str(name))
        if session is None:
            raise LookupError(f"no conversation is known under the session {str(name)!r}")
        if not session.remaining:
            return Critique(status="over_budget", detail="no consultations are left in this user turn")
        return await aconsult(self.critics, session.consult_state(control))


def error_response(status: int, kind: str, message: str) -> Response:
    """An error in the form of OpenAI's."""
    return JSONResponse(openai_error(kind, message), status)


class _Plain:
    """A request that passes as it is, in the shape of a runner."""

    def __init__(self, send: Callable[[bytes], Any], body: bytes) -> None:
        self._send, self._body = send, body
        self._response: httpx.Response | None = None

    async def head(self) -> Start:
        self._response = await self._send(self._body)
        given = self._response.headers
        names = {*passing(given), "content-length"}
        kept = httpx.Headers([item for item in given.multi_items() if item[0].lower() in names])
        return Start(self._response.status_code, kept)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert self._response is not None
        async for part in self._response.aiter_raw():
            yield part

    async def aclose(self) -> None:
        if self._response is not None:
            await self._response.aclose()


class _Relayed(Response):
    """Sends what a runner gives. When the caller hangs up, everything that is under way for it is cancelled."""

    def __init__(self, runner: Any, proxy: _Proxy, slot: Slot) -> None:
        self._runner, self._proxy, self._slot = runner, proxy, slot
        self._started = self._streams = False
        self.status = 0
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        with self._proxy.metrics.in_flight(), self._slot:
            work = asyncio.create_task(self._work(send))
            gone = asyncio.create_task(_hung_up(receive))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    self.status = 499
            except asyncio.CancelledError:
                self.status = 499  # the server shuts down and has waited long enough; it closes the connection
            finally:
                for task in (work, gone):
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(work, gone, return_exceptions=True)
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(self._runner.aclose())
        self._proxy.metrics.request(scope["path"], self.status, time.monotonic() - started)
        if work.done() and not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _work(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._proxy.limits.total):
                await self._relay(send)
        except (httpx.HTTPError, TimeoutError, CaddieError) as error:
            await self._failed(send, error)

    async def _relay(self, send: Send) -> None:
        head = await self._runner.head()
        self.status = head.status
        self._streams = "text/event-stream" in head.headers.get("content-type", "")
        if self._streams or isinstance(self._runner, _Plain):
            await self._begin(send, head)
            async for part in self._runner:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        else:
            whole = b"".join([part async for part in self._runner])
            await self._begin(send, Start(head.status, {**head.headers, "content-length": str(len(whole))}))
            await send({"type": "http.response.body", "body": whole, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send, head: Start) -> None:
        self._started = True
        items = head.headers.multi_items() if isinstance(head.headers, httpx.Headers) else head.headers.items()
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in items]
        await send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def _failed(self, send: Send, error: Exception) -> None:
        """The upstream cannot be reached or has stopped answering: say so in the form the caller can still read."""
        slow = isinstance(error, TimeoutError | httpx.TimeoutException)
        said = "gave no answer in time" if slow else f"cannot be reached or broke off ({type(error).__name__})"
        self.status = 504 if slow else 502
        told = openai_error("upstream_error", f"the upstream {said}")
        log.warning("the upstream %s", said)
        body = json.dumps(told).encode()
        if not self._started:
            head = {"content-type": "application/json", "content-length": str(len(body))}
            await self._begin(send, Start(self.status, head))
            await send({"type": "http.response.body", "body": body, "more_body": False})
        elif self._streams:
            await send({"type": "http.response.body", "body": sse.event(told), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        # Else a body breaks off half way: the server closes the connection over it, as the upstream did.


async def _hung_up(receive: Receive) -> None:
    with contextlib.suppress(ClientDisconnect):
        while (await receive())["type"] != "http.disconnect":
            pass


__all__ = ["Emit", "Limits", "create_app"]
