"""The ways in, made to look alike: the same words go in and the same turn comes out, whatever lies between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import uvicorn
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from caddie_sdk import Critique
from caddie_sdk.relay.flow import Answer, Ask, Emit, Read, Relay, Send
from caddie_sdk.relay.flow import Start as Head
from caddie_sdk.shells.proxy import create_app
from caddie_sdk.shells.wrap import make_relay, wrap
from caddie_sdk.testing import ScriptedCritic, calls, tool_call

SYSTEM = {"role": "system", "content": "You work in a shop."}
USER = {"role": "user", "content": "Return order 7."}
ASK: list[Any] = [SYSTEM, USER]


def function(name: str, *required: str) -> dict[str, Any]:
    """A tool's schema; all of its parameters are texts."""
    properties = {one: {"type": "string"} for one in required}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": f"The tool {name}.", "parameters": parameters},
    }


TOOLS: list[Any] = [function("look", "order"), function("refund", "order")]


def ask(id: str = "", arguments: str = "{}") -> dict[str, Any]:
    """The call with which a model asks its critic."""
    return tool_call("call_critic", arguments, id)


def look(order: str = "7", id: str = "") -> dict[str, Any]:
    """A call of a harmless tool."""
    return tool_call("look", {"order": order}, id)


def refund(order: str = "7", id: str = "") -> dict[str, Any]:
    """A call of a tool that cannot be undone."""
    return tool_call("refund", {"order": order}, id)


def critic(*advice: str) -> ScriptedCritic:
    """Gives these pieces of advice in turn; without any, always the same one."""
    if not advice:
        return ScriptedCritic(lambda state: ("The order is old.", "Look at the order first."))
    return ScriptedCritic([("As seen.", text) for text in advice])


def result(call: Mapping[str, Any], content: str = "found") -> dict[str, Any]:
    """What a caller answers a call with."""
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def roles(body: Mapping[str, Any]) -> str:
    """The history of a request as letters: s u a t, C for the assistant's call of a critic, A for advice."""
    letters, asked = "", set()
    for message in body["messages"]:
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        asked |= {call["id"] for call in message.get("tool_calls") or () if call["function"]["name"] == "call_critic"}
        letter = {"developer": "s"}.get(message["role"], message["role"][0])
        if names and set(names) == {"call_critic"}:
            letter = "C"
        elif "call_critic" in names:
            letter = "M"
        elif message.get("tool_call_id") in asked:
            letter = "A"
        letters += letter
    return letters


def offered(body: Mapping[str, Any]) -> list[str]:
    """The names of the tools that a request offers."""
    return [tool["function"]["name"] for tool in body.get("tools") or ()]


@dataclass
class Turn:
    """One answer, as any application sees it."""

    message: dict[str, Any]
    finish_reason: str | None
    usage: dict[str, Any] | None
    caddie: dict[str, Any] | None
    completion: Any
    texts: list[str] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)

    @property
    def content(self) -> str | None:
        return self.message.get("content")  # type: ignore[no-any-return]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []

    @property
    def seen(self) -> tuple[Any, ...]:
        """What must be the same in every way."""
        wanted = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in self.calls]
        return self.content or "", wanted, self.finish_reason


def turn_of(completion: Any, chunks: Sequence[Any] = ()) -> Turn:
    """A turn from the client's own object."""
    data = completion.model_dump(exclude_none=True)
    choice, extras = data["choices"][0], dict(completion.model_extra or {})
    for one in chunks:
        extras |= {key: value for key, value in (one.model_extra or {}).items() if value is not None}
    message = {key: value for key, value in choice["message"].items() if key not in ("parsed", "function_call")}
    for call in message.get("tool_calls") or ():
        call.pop("index", None)
        call.get("function", {}).pop("parsed_arguments", None)
    texts = [one.choices[0].delta.content for one in chunks if one.choices and one.choices[0].delta.content]
    facts = choice.get("finish_reason"), data.get("usage"), extras.get("caddie")
    return Turn(message, *facts, completion, texts, list(chunks))


class Caller:
    """An application behind one way in; `say` gives the next turn for a history."""

    def __init__(self, client: Any, mode: str) -> None:
        self.client, self.mode = client, mode

    def say(self, messages: Sequence[Any], *, mode: str = "", client: Any = None, **options: Any) -> Turn:
        """One request."""
        wanted = {"model": "m", "tools": TOOLS, "messages": list(messages), **options}
        mode = mode or self.mode
        if mode != "create":
            wanted.setdefault("stream_options", {"include_usage": True})
        given = {name: value for name, value in wanted.items() if value is not None}
        return self._say(client or self.client, mode, given)

    def _say(self, client: Any, mode: str, wanted: dict[str, Any]) -> Turn:
        completions = client.chat.completions
        if mode == "create":
            return turn_of(completions.create(**wanted))
        if mode == "stream":
            state, chunks = ChatCompletionStreamState(), []
            with completions.create(stream=True, **wanted) as stream:
                for one in stream:
                    chunks.append(one)
                    state.handle_chunk(one)
            return turn_of(state.current_completion_snapshot, chunks)
        with completions.stream(**wanted) as stream:
            chunks = [event.chunk for event in stream if event.type == "chunk"]
            return turn_of(stream.current_completion_snapshot, chunks)

    def close(self) -> None:
        """End the client."""
        self.client.close()


class AsyncCaller(Caller):
    """The same over `AsyncOpenAI`, in an event loop of its own."""

    def __init__(self, client: Any, mode: str) -> None:
        super().__init__(client, mode)
        self.loop = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Carry out some work in the client's loop."""
        return self.loop.run(work)

    def _say(self, client: Any, mode: str, wanted: dict[str, Any]) -> Turn:
        return self.run(self._asay(client, mode, wanted))  # type: ignore[no-any-return]

    async def _asay(self, client: Any, mode: str, wanted: dict[str, Any]) -> Turn:
        completions = client.chat.completions
        if mode == "create":
            return turn_of(await completions.create(**wanted))
        if mode == "stream":
            state, chunks = ChatCompletionStreamState(), []
            async with await completions.create(stream=True, **wanted) as stream:
                async for one in stream:
                    chunks.append(one)
                    state.handle_chunk(one)
            return turn_of(state.current_completion_snapshot, chunks)
        async with completions.stream(**wanted) as stream:
            chunks = [event.chunk async for event in stream if event.type == "chunk"]
            return turn_of(stream.current_completion_snapshot, chunks)

    def close(self) -> None:
        self.run(self.client.close())
        self.loop.close()


class _Quick(uvicorn.Server):
    """Stops within milliseconds, and not within tenths of a second. The real thing is tested as a process."""

    async def main_loop(self) -> None:
        while not self.should_exit:
            await self.on_tick(0)
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        async with asyncio.timeout(5):
            while self.server_state.tasks:
                await asyncio.sleep(0.002)
        await self.lifespan.shutdown()


class Serving:
    """An ASGI application in a thread of its own, on a free port."""

    def __init__(self, app: Any) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(1024)
        self.root = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.url = f"{self.root}/v1"
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=5)
        self.server = _Quick(config)

    def __enter__(self) -> Serving:
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        until = time.monotonic() + 10
        while not self.server.started:
            assert time.monotonic() < until, "the proxy did not start"
            time.sleep(0.002)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.should_exit = True
        self._thread.join(10)
        self._socket.close()


def proxy_app(url: str, critic: Any, *, feedback: Any = None, limits: Any = None, **terms: Any) -> Any:
    """The proxy with the settings that `wrap` takes."""
    named = {"call_critic": critic, "request_feedback": feedback}
    critics = {name: one for name, one in named.items() if one is not None}
    return create_app(url, critics, make_relay(critics, **terms), limits=limits)


CERTIFICATES = ssl.create_default_context()
"""Loaded once: they cost a client 20 ms."""

WAYS = ("sync", "async", "proxy")
MODES = ("create", "stream", "helper")
EVERY = [f"{way}-{mode}" for way in WAYS for mode in MODES]
SOME = ["sync-create", "sync-stream", "async-helper", "proxy-create", "proxy-stream"]
"""For what does not depend on the client's kind: each runner, and both dialects of each."""

Start = Callable[..., Caller]


@contextlib.contextmanager
def starter(name: str) -> Iterator[Start]:
    """Makes callers of one way and mode: `start(upstream, critic, **settings of wrap)`."""
    way, mode = name.split("-")
    with contextlib.ExitStack() as stack:

        def start(upstream: Any, critic: Any, *, client: Mapping[str, Any] | None = None, **terms: Any) -> Caller:
            settings = {"api_key": "none", "max_retries": 0, "base_url": upstream.url, **(client or {})}
            kind = DefaultAsyncHttpxClient if way == "async" else DefaultHttpxClient
            settings["http_client"] = kind(verify=CERTIFICATES)
            made: Caller
            if way == "proxy":
                settings["base_url"] = stack.enter_context(Serving(proxy_app(upstream.url, critic, **terms))).url
                made = Caller(OpenAI(**settings), mode)
            elif way == "sync":
                made = Caller(wrap(OpenAI(**settings), critic, **terms), mode)
            else:
                made = AsyncCaller(wrap(AsyncOpenAI(**settings), critic, **terms), mode)
            stack.callback(made.close)
            return made

        yield start


def work(caller: Caller, messages: list[Any], results: Callable[[Mapping[str, Any]], str], **options: Any) -> list[Any]:
    """Run an agent to its end: what any loop around chat completions does. Returns the caller's history."""
    history = list(messages)
    for _ in range(20):
        turn = caller.say(history, **options)
        history.append(turn.message)
        if not turn.calls:
            return history
        history += [result(call, results(call)) for call in turn.calls]
    raise AssertionError("the agent did not come to an end")


def drive(
    relay: Relay, request: Mapping[str, Any], answers: Iterable[bytes], critique: Critique, *, cut: int = 2**20
) -> tuple[bytes, list[Any]]:
    """Carry out the steps of one request by hand, without any I/O.

    Args:
        request: the body, without a model.
        answers: the bodies that the upstream gives in turn.
        critique: what the critic says each time.
        cut: size of the pieces in which those bodies arrive.

    Returns:
        What the caller gets, and the bodies that went upstream.
    """
    kind = "text/event-stream" if request.get("stream") else "application/json"
    flow = relay.flow("/v1/chat/completions", {"authorization": "Bearer k"}, json.dumps(request).encode())
    sent, out, rest, given, value = [], [], b"", iter(answers), None
    with contextlib.suppress(StopIteration):
        while True:
            step, value = flow.send(value), None
            match step:
                case Send(data):
                    sent.append(json.loads(data))
                    rest, value = next(given), Answer(200, {"content-type": kind})
                case Read():
                    value, rest = rest[:cut] or None, rest[cut:]
                case Ask():
                    value = critique
                case Emit(data):
                    out.append(data)
                case Head(status, _):
                    assert status == 200
    return b"".join(out), sent


__all__ = ["Critique", "calls", "tool_call"]
