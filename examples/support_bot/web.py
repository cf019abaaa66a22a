"""The bot's own web server: a page for customers, a page for staff, and the JSON behind both.

Whoever asks shows a token in `Authorization: Bearer`: customers the one from signing in, staff the one the server was
started with. There are no cookies, so no other site can act in anybody's name. Contents are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from caddie_sdk.errors import MissingExtra
from examples.support_bot.desk import Desk
from examples.support_bot.mailroom import Mailroom, NotPossible

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import FileResponse, JSONResponse, Response
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise MissingExtra("the support bot's web page", "proxy") from error

log = logging.getLogger("support_bot")

MAX_BODY, MAX_TEXT = 32_768, 4_000
"""Bytes of a request, characters of a message."""
POLL_SECONDS = 20.0
MAX_FAILURES, FORGET_SECONDS = 5, 60.0
"""Wrong postcodes for one address, and for how long they count."""

_PAGES = Path(__file__).parent / "static"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

OpenDesk = Callable[[], contextlib.AbstractAsyncContextManager[Desk]]


def create_app(open_desk: OpenDesk, mailroom: Mailroom, staff_token: str) -> ASGIApp:
    """The bot as an ASGI application.

    Args:
        open_desk: makes the desk, on the server's own event loop, and closes it.
        mailroom: of the same bot.
        staff_token: what staff must show.
    """
    server = _Server(mailroom, staff_token)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with open_desk() as server.desk:
            yield

    return _Guard(Starlette(routes=server.routes(), lifespan=lifespan, exception_handlers=_HANDLERS))


class _Server:
    desk: Desk

    def __init__(self, mailroom: Mailroom, staff_token: str) -> None:
        self._mailroom, self._staff_token = mailroom, staff_token
        self._failures = _Failures()

    def routes(self) -> list[Any]:
        return [
            Route("/", _page("customer.html")),
            Route("/staff", _page("staff.html")),
            Mount("/static", StaticFiles(directory=_PAGES)),
            Route("/healthz", self.healthz),
            Route("/api/samples", self.samples),
            Route("/api/sign-in", self.sign_in, methods=["POST"]),
            Route("/api/sign-out", self.sign_out, methods=["POST"]),
            Route("/api/chat", self.chat),
            Route("/api/chat", self.say, methods=["POST"]),
            Route("/api/staff/threads", self.threads),
            Route("/api/staff/threads/{thread}", self.thread),
            Route("/api/staff/threads/{thread}/advice/{number:int}", self.advice),
            Route("/api/staff/handovers/{number:int}", self.answer, methods=["POST"]),
        ]

    async def healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    # ---------------------------------------------------------------- customers

    async def samples(self, request: Request) -> Response:
        """Made-up customers to try the bot with."""
        return JSONResponse({"customers": await asyncio.to_thread(self._mailroom.samples)})

    async def sign_in(self, request: Request) -> Response:
        body = await _json(request)
        email, postcode = _text(body, "email", 200), _text(body, "postcode", 40)
        if self._failures.too_many(email):
            raise HTTPException(429, "Too many attempts. Please wait a minute.")
        token = await asyncio.to_thread(self._mailroom.sign_in, email, postcode)
        if token is None:
            self._failures.add(email)
            raise HTTPException(401, "We know no customer with this e-mail address and postcode.")
        return JSONResponse({"token": token})

    async def sign_out(self, request: Request) -> Response:
        await asyncio.to_thread(self._mailroom.sign_out, _bearer(request))
        return Response(status_code=204)

    async def chat(self, request: Request) -> Response:
        """The customer's conversation, as soon as it differs from the one whose mark is given as `seen`."""
        who = await self._customer(request)
        mark = await self.desk.changed(who["thread"], request.query_params.get("seen", ""), POLL_SECONDS)
        return JSONResponse({"name": who["name"], "mark": mark, **await self.desk.for_customer(who["thread"])})

    async def say(self, request: Request) -> Response:
        """A message. `ref` is the sender's own mark for it, so that it may be sent again when the answer is lost."""
        who = await self._customer(request)
        body = await _json(request)
        ref, text = _text(body, "ref", 64), _text(body, "text", MAX_TEXT)
        return JSONResponse({"number": await self.desk.say(who["thread"], ref, text)}, status_code=202)

    async def _customer(self, request: Request) -> dict[str, Any]:
        who = await asyncio.to_thread(self._mailroom.signed_in, _bearer(request))
        if who is None:
            raise HTTPException(401, "Please sign in.")
        return who

    # ---------------------------------------------------------------- staff

    async def threads(self, request: Request) -> Response:
        """All conversations, those that wait for a colleague first."""
        self._staff(request)
        mark = await self.desk.changed(None, request.query_params.get("seen", ""), POLL_SECONDS)
        return JSONResponse({"mark": mark, "threads": await asyncio.to_thread(self._mailroom.overview)})

    async def thread(self, request: Request) -> Response:
        """One conversation, with calls and hand-overs, without advice."""
        self._staff(request)
        thread = await self._known(request)
        return JSONResponse(await self.desk.for_staff(thread))

    async def advice(self, request: Request) -> Response:
        """What the critic said in one consultation."""
        self._staff(request)
        found = await self.desk.advice(await self._known(request), request.path_params["number"])
        if found is None:
            raise HTTPException(404, "There is no such consultation.")
        return JSONResponse(found)

    async def answer(self, request: Request) -> Response:
        """A colleague's answer to a hand-over."""
        self._staff(request)
        body = await _json(request)
        message = _text(body, "message", MAX_TEXT, empty=True)
        await self.desk.answer(request.path_params["number"], _text(body, "decision", 10), message)
        return Response(status_code=204)

    def _staff(self, request: Request) -> None:
        if not secrets.compare_digest(_bearer(request).encode(), self._staff_token.encode()):
            raise HTTPException(401, "The staff token is missing or wrong.")

    async def _known(self, request: Request) -> str:
        thread = str(request.path_params["thread"])
        await asyncio.to_thread(self._mailroom.customer_of, thread)
        return thread


# ------------------------------------------------------------------ requests


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        return FileResponse(_PAGES / name)

    return page


def _bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


async def _json(request: Request) -> Mapping[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            # Closed, so that whoever sends without end is not read any further.
            raise HTTPException(413, f"The request is longer than {MAX_BODY} bytes.", {"connection": "close"})
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise HTTPException(400, "The request's body must be a JSON object.")
    return read


def _text(body: Mapping[str, Any], name: str, longest: int, *, empty: bool = False) -> str:
    """A field, as text that can be stored and shown."""
    given = body.get(name, "")
    if not isinstance(given, str) or not _encodable(given):
        raise HTTPException(400, f"{name} must be a text.")
    text = "".join(c for c in given if c in "\n\t" or unicodedata.category(c) != "Cc").strip()
    if not text and not empty:
        raise HTTPException(400, f"{name} must not be empty.")
    if len(text) > longest:
        raise HTTPException(400, f"{name} must not be longer than {longest} characters.")
    return text


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)


async def _not_possible(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=409)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)


_HANDLERS: Mapping[Any, Any] = {HTTPException: _refused, NotPossible: _not_possible, ClientDisconnect: _gone}


class _Failures:
    """Wrong postcodes by e-mail address: whoever guesses has to wait."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def too_many(self, email: str) -> bool:
        return len(self._recent(email)) >= MAX_FAILURES

    def add(self, email: str) -> None:
        if len(self._times) > 10_000:
            self._times.clear()
        self._times[email.lower()] = [*self._recent(email), time.monotonic()]

    def _recent(self, email: str) -> list[float]:
        since = time.monotonic() - FORGET_SECONDS
        return [at for at in self._times.get(email.lower(), ()) if at > since]


class _Guard:
    """Headers on every answer; and a failure of ours is one line in the log, without what anybody wrote."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_ENCODED]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:  # noqa: BLE001 - Starlette has answered 500 by now
            log.error("%s %s: %s", scope["method"], scope["path"], type(error).__name__)


_ENCODED = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
