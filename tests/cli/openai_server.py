"""An OpenAI-compatible server on loopback, over real sockets, that says what a function tells it to say.

Run as a script it plays an agent that searches, consults where it may, and answers: `python openai_server.py PORT`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from caddie_sdk.testing import check_wire

GOOD = "Analysis: The builder is known.\nAdvices for next steps: Answer with the name."
CONTROLS = ("call_critic", "request_feedback")


@dataclass(frozen=True)
class Said:
    """An HTTP answer as it is, after `delay` seconds; status 0 closes the connection without one."""

    status: int = 200
    body: Any = b""
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0


Behaviour = Callable[[dict[str, Any]], Any]
"""Takes a chat request, gives a text, an assistant message, or a `Said`."""


def call(name: str, arguments: str = "{}") -> dict[str, Any]:
    """An assistant message that calls one tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def agent(*, query: str = "lighthouse of Greave", answer: str = "Piet Corran", critique: Any = GOOD) -> Behaviour:
    """Searches once, consults where a control tool is offered, answers; gives `critique` when asked as the critic."""

    def play(body: dict[str, Any]) -> Any:
        if not body.get("tools"):
            return critique
        results = sum(message["role"] == "tool" for message in body["messages"])
        control = next((t["function"]["name"] for t in body["tools"] if t["function"]["name"] in CONTROLS), "")
        script: list[Any] = [call("search", json.dumps({"query": query}))]
        script += [call(control)] if control else []
        return script[results] if results < len(script) else answer

    return play


class Server:
    """`url` to point a client at; `chats` are the request bodies so far, `keys` their authorization headers, and
    `broken` is what a strict server would have refused in them.

    `behaviour` may be changed between requests.
    """

    def __init__(self, behaviour: Behaviour, models: tuple[str, ...] = ("scripted",)) -> None:
        self.behaviour, self.models = behaviour, models
        self.listing: Said | None = None
        self.url = ""
        self.chats: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.broken: list[str] = []

    def answer(self, path: str, raw: bytes) -> Said:
        """What is said to one request."""
        if path == "/v1/models":
            return self.listing or Said(body={"object": "list", "data": [{"id": name} for name in self.models]})
        self.chats.append(json.loads(raw))
        try:
            check_wire(self.chats[-1]["messages"])
        except AssertionError as error:
            self.broken.append(str(error))
        said = self.behaviour(self.chats[-1])
        return said if isinstance(said, Said) else Said(body=_completion(said))


def _completion(said: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": said} if isinstance(said, str) else said
    usage: dict[str, Any] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    usage["prompt_tokens_details"] = {"cached_tokens": 40}
    choice = {"index": 0, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop", "message": message}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._say(server.answer(self.path, b""))

        def do_POST(self) -> None:
            server.keys.append(self.headers.get("authorization"))
            self._say(server.answer(self.path, self.rfile.read(int(self.headers["content-length"]))))

        def _say(self, said: Said) -> None:
            time.sleep(said.delay)
            if not said.status:
                self.close_connection = True
                return
            data = said.body if isinstance(said.body, bytes) else json.dumps(said.body).encode()
            self.send_response(said.status)
            for name, value in {"content-type": "application/json", **said.headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            try:
                self.wfile.write(data)
            except OSError:
                pass  # the client has gone

    return Handler


@contextmanager
def serving(behaviour: Behaviour, models: tuple[str, ...] = ("scripted",), port: int = 0) -> Iterator[Server]:
    """A server for the length of a `with` block."""
    server = Server(behaviour, models)
    http = ThreadingHTTPServer(("127.0.0.1", port), _handler(server))
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
    assert server.broken == []


if __name__ == "__main__":
    with serving(agent(), port=int(sys.argv[1])) as running:
        print(running.url, flush=True)
        threading.Event().wait()
