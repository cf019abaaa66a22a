"""An OpenAI-compatible server on the loopback interface that says what it is told to say."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer:
    """`url` to point a client at; `requests` are the bodies that came in.

    A reply is a text, an assistant message, or a pair of status and error body.
    """

    def __init__(self, url: str, replies: Sequence[Any]) -> None:
        self.url, self.replies = url, list(replies)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.requests.append(body)
        said = self.replies.pop(0)
        if isinstance(said, tuple):
            return said
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        calls = [{**call, "id": call["id"] or f"server_{n}"} for n, call in enumerate(message.get("tool_calls", ()))]
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": {**message}}
        if calls:
            choice["message"] |= {"tool_calls": calls, "content": message.get("content") or None}
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
        usage["prompt_tokens_details"] = {"cached_tokens": 4}  # type: ignore[assignment]
        return 200, {
            "id": "1", "object": "chat.completion", "created": 1, "model": "scripted",
            "choices": [choice], "usage": usage,
        }  # fmt: skip


@contextmanager
def scripted_server(replies: Sequence[Any]) -> Iterator[ScriptedServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            scripted.keys.append(self.headers.get("authorization"))
            assert self.path == "/v1/chat/completions", self.path
            status, answer = scripted.answer(body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    scripted = ScriptedServer(f"http://127.0.0.1:{server.server_port}", replies)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield scripted
    finally:
        server.shutdown()
        server.server_close()
