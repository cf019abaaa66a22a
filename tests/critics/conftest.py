"""Fixtures of the critics' tests: a scripted OpenAI-compatible server on loopback, and consultations.

The server is a real one (uvicorn, real sockets), so that what is tested is what happens on the wire: retries,
deadlines, disconnects. Only its words are scripted.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import openai  # noqa: F401 - imported at the first call otherwise, which would count against short deadlines
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from caddie_sdk.commands import CallModel, Consult, RunTools
from caddie_sdk.config import CALL_CRITIC, SessionConfig
from caddie_sdk.critic import ConsultState
from caddie_sdk.session import Session
from caddie_sdk.testing import ScriptedModel, calls, tool_call

GOOD = "Analysis: The birthplace is known, its river is not.\nAdvices for next steps: Look for the river of that town."
Step = Callable[[Request, Send], Any]


@dataclass
class Seen:
    """One request as the server got it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    at: float


@dataclass
class ScriptedServer:
    """Plays prepared behaviours, one per chat request; the last one repeats.

    Attributes:
        url: base URL, without `/v1`.
        listing: the entries of `/v1/models`.
        listing_script: behaviours for `/v1/models`, used up before `listing` is served.
        seen: the requests so far.
        open_requests: requests that hang or drip right now.
        disconnects: of those, how many the client has given up.
    """

    url: str = ""
    listing: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": "tiny", "object": "model", "owned_by": "somebody"}]
    )
    script: list[Step] = field(default_factory=list)
    listing_script: list[Step] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    open_requests: int = 0
    disconnects: int = 0

    # ------------------------------------------------------------ what it can do

    def answer(self, text: str = GOOD, **facts: Any) -> Step:
        """A chat completion. `finish`, `model`, `usage`, `delay` may be given."""

        async def step(_: Request, send: Send) -> None:
            await asyncio.sleep(facts.get("delay", 0))
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": facts.get("finish", "stop"),
            }
            usage = {
                "prompt_tokens": 120,
                "completion_tokens": 30,
                "total_tokens": 150,
                "prompt_tokens_details": {"cached_tokens": 100},
            }
            body = {"id": "c", "object": "chat.completion", "created": 0, "model": facts.get("model", "tiny")}
            await _send(send, 200, {**body, "choices": [choice], "usage": facts.get("usage", usage)})

        return step

    def status(self, code: int, message: str = "scripted", **headers: str) -> Step:
        """An error in OpenAI form; headers with `_` for `-`."""
        return self.raw(code, {"error": {"message": message, "code": code}}, **headers)

    def overflow(self) -> Step:
        """llama.cpp's words for a prompt that is too long."""
        message = "the request exceeds the available context size, try increasing it"
        return self.raw(400, {"error": {"code": 400, "message": message, "type": "exceed_context_size_error"}})

    def raw(self, code: int, body: Any, content_type: str = "application/json", **headers: str) -> Step:
        """Any body at all: JSON, or bytes as they are."""

        async def step(_: Request, send: Send) -> None:
            await _send(send, code, body, content_type, headers)

        return step

    def hang(self) -> Step:
        """Takes the request and never answers."""

        async def step(request: Request, send: Send) -> None:
            async with self._watched(request):
                await asyncio.sleep(3600)

        return step

    def drip(self) -> Step:
        """Answers with one blank every 20 ms, for ever: no read ever times out."""

        async def step(request: Request, send: Send) -> None:
            async with self._watched(request):
                await _start(send, 200, "application/json", {})
                while True:
                    await send({"type": "http.response.body", "body": b" ", "more_body": True})
                    await asyncio.sleep(0.02)

        return step

    def drop(self) -> Step:
        """Promises a long body, sends a little of it and closes the connection."""

        async def step(_: Request, send: Send) -> None:
            await _start(send, 200, "application/json", {"content-length": "5000"})
            await send({"type": "http.response.body", "body": b'{"id": "c", "choi', "more_body": True})
            raise ConnectionResetError("scripted drop")

        return step

    # ------------------------------------------------------------ what it has seen

    @property
    def chats(self) -> list[dict[str, Any]]:
        """Bodies of the chat requests."""
        return [seen.body for seen in self.seen if seen.path == "/v1/chat/completions"]

    @property
    def listings(self) -> int:
        """How often the models were listed."""
        return sum(seen.path == "/v1/models" for seen in self.seen)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Block until the server has seen something."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"the server did not see it within {seconds} s"
            time.sleep(0.005)

    # ------------------------------------------------------------ inside

    async def play_chat(self, request: Request, send: Send) -> None:
        """Answer a chat request."""
        await self._note(request)
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0] if self.script else self.answer()
        await step(request, send)

    async def play_models(self, request: Request, send: Send) -> None:
        """List the models."""
        await self._note(request)
        if self.listing_script:
            await self.listing_script.pop(0)(request, send)
        else:
            await _send(send, 200, {"object": "list", "data": self.listing})

    async def _note(self, request: Request) -> None:
        raw = await request.body()
        body = json.loads(raw) if raw else {}
        self.seen.append(Seen(request.url.path, body, dict(request.headers), time.monotonic()))

    def _watched(self, request: Request) -> _Watched:
        return _Watched(self, request)


class _Watched:
    """Ends its body when the client goes away, and counts that."""

    def __init__(self, server: ScriptedServer, request: Request) -> None:
        self.server, self.request = server, request

    async def __aenter__(self) -> None:
        self.server.open_requests += 1
        task = asyncio.current_task()
        assert task is not None
        self.left = False

        async def watch() -> None:
            while (await self.request.receive())["type"] != "http.disconnect":
                pass
            self.left = True
            task.cancel()

        self.watcher = asyncio.ensure_future(watch())

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.watcher.cancel()
        self.server.open_requests -= 1
        self.server.disconnects += self.left
        return self.left and kind is asyncio.CancelledError


def _endpoint(handler: Callable[[Request, Send], Any]) -> Any:
    class Raw:
        """A raw ASGI endpoint: starlette's responses cannot break off in the middle."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await handler(Request(scope, receive), send)

    return Raw()


async def _start(send: Send, code: int, content_type: str, headers: dict[str, str]) -> None:
    pairs = {"content-type": content_type, **{key.replace("_", "-"): value for key, value in headers.items()}}
    raw = [(key.encode(), value.encode()) for key, value in pairs.items()]
    await send({"type": "http.response.start", "status": code, "headers": raw})


async def _send(
    send: Send, code: int, body: Any, content_type: str = "application/json", headers: dict[str, str] | None = None
) -> None:
    await _start(send, code, content_type, headers or {})
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    await send({"type": "http.response.body", "body": payload})


@dataclass
class Stage:
    """The one running server; each test puts its own script on it."""

    url: str = ""
    playing: ScriptedServer = field(default_factory=ScriptedServer)

    def app(self) -> Starlette:
        async def chat(request: Request, send: Send) -> None:
            await self.playing.play_chat(request, send)

        async def models(request: Request, send: Send) -> None:
            await self.playing.play_models(request, send)

        return Starlette(
            routes=[
                Route("/v1/chat/completions", _endpoint(chat), methods=["POST"]),
                Route("/v1/models", _endpoint(models)),
            ]
        )


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """A server that is up."""
    stage, listener = Stage(), socket.socket()
    listener.bind(("127.0.0.1", 0))
    stage.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(stage.app(), log_config=None, access_log=False, lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    stage.playing.wait_for(lambda: running.started)
    yield stage
    running.should_exit = running.force_exit = True
    thread.join(5)
    listener.close()


@pytest.fixture
def server(stage: Stage) -> ScriptedServer:
    """A scripted server of this test's own."""
    stage.playing = ScriptedServer(stage.url)
    return stage.playing


@pytest.fixture
def dead_url() -> Iterator[str]:
    """The URL of a port that is bound, so that nobody takes it, and refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find passages about a query.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


def consultation(
    *, task: str = "Which river flows through the town where Ada Byrne was born?", observation: str = "", **limits: Any
) -> ConsultState:
    """The state of a self-called consultation after one search, made by a real session."""
    model = ScriptedModel(
        [
            calls(tool_call("search", {"query": "Ada Byrne birthplace"}), text="First the town."),
            calls(tool_call(CALL_CRITIC)),
        ]
    )
    session = Session(SessionConfig(tools=(SEARCH,), system="POLICY: never promise a refund."))
    command = session.user_said(task)
    while not isinstance(command, Consult):
        if isinstance(command, CallModel):
            command = session.model_replied(model.complete(command).message)
        elif isinstance(command, RunTools):
            text = observation or "Ada Byrne was born in Millbrook."
            command = session.tools_returned([{"id": call.id, "content": text} for call in command.calls])
        else:
            raise AssertionError(f"the script led to {command!r}")
    return replace(command.state, **limits)


@pytest.fixture
def consult_state() -> Callable[..., ConsultState]:
    """Makes a consultation's state: `consult_state(timeout=1.0, observation="...")`."""
    return consultation
