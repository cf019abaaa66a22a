"""A server on the loopback interface that can misbehave in every way a real one does."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODELS = {"object": "list", "data": [{"id": "small", "object": "model", "owned_by": "someone"}]}


def chat(content: Any = "hello", **choice: Any) -> dict[str, Any]:
    """A chat completion."""
    return {
        "id": "1",
        "object": "chat.completion",
        "model": "small",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}, **choice}
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}},
    }


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: Any
    at: float = field(default_factory=time.monotonic)


@dataclass
class Answer:
    """`body` is sent as JSON, bytes as they are; `None` closes the connection without a word.

    `pause` seconds pass before the headers; with `drip`, each byte of the body waits that long; `hang` stops for
    good before the headers ("headers"), or after them ("body").
    """

    body: Any = field(default_factory=chat)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    pause: float = 0.0
    drip: float = 0.0
    hang: str = ""


Behaviour = Callable[[Request], Answer]


class Server:
    """What came in, and what became of the connections."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[Request] = []
        self.connections = 0
        self.open = 0
        self.left = 0
        """Connections that the client closed while an answer was due."""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def chats(self) -> list[Request]:
        return [request for request in self.requests if request.path.endswith("/chat/completions")]

    def wait_until(self, holds: Callable[[], bool], seconds: float = 3.0) -> None:
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until, vars(self)
            time.sleep(0.01)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            async for request in self._requests(reader):
                answering = asyncio.create_task(self._answer(request, writer))
                while not answering.done():
                    await asyncio.wait({answering}, timeout=0.01)
                    if reader.at_eof() and not answering.done():
                        self.left += 1
                        answering.cancel()
                        return
                if not answering.result():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            self.left += 1
        except asyncio.CancelledError:
            pass  # the server is closing
        finally:
            self.open -= 1
            writer.close()

    async def _requests(self, reader: asyncio.StreamReader) -> AsyncIterator[Request]:
        while True:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            except asyncio.IncompleteReadError:
                return
            first, *lines = head.split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name
            }
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            request = Request(first.split(" ")[1], headers, json.loads(raw) if raw else None)
            self.requests.append(request)
            yield request

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        answer = self.behaviour(request)
        await asyncio.sleep(answer.pause)
        if answer.body is None:
            return False
        if answer.hang == "headers":
            await asyncio.sleep(60)
        data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        headers = {"content-type": answer.content_type, "content-length": str(len(data)), **answer.headers}
        lines = [f"HTTP/1.1 {answer.status} X", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        await writer.drain()
        if answer.hang == "body":
            await asyncio.sleep(60)
        if answer.drip:
            for number in range(len(data)):
                writer.write(data[number : number + 1])
                await writer.drain()
                await asyncio.sleep(answer.drip)
        else:
            writer.write(data)
            await writer.drain()
        return True


@contextmanager
def rough_server(behaviour: Behaviour | Answer | list[Answer] | None = None, port: int = 0) -> Iterator[Server]:
    """A running server. A list is used up answer by answer, its last one again and again; /v1/models always works."""
    if isinstance(behaviour, list):
        rest = list(behaviour)

        def act(request: Request) -> Answer:
            if request.path.endswith("/models"):
                return Answer(MODELS)
            return rest.pop(0) if len(rest) > 1 else rest[0]

    elif callable(behaviour):
        act = behaviour
    else:
        fixed = behaviour or Answer()

        def act(request: Request) -> Answer:
            return Answer(MODELS) if request.path.endswith("/models") else fixed

    server, loop, ready = Server(act), asyncio.new_event_loop(), threading.Event()

    async def main() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", port, backlog=512)
        server.port = listening.sockets[0].getsockname()[1]
        ready.set()
        async with listening:
            await asyncio.Event().wait()

    def thread() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(main())
        except (asyncio.CancelledError, RuntimeError):
            pass

    running = threading.Thread(target=thread, daemon=True)
    running.start()
    assert ready.wait(5)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        running.join(5)
        loop.close()
