"""A chat-completions server on loopback that answers at once, in a process of its own.

It plays an agent that calls `search` in its first `--steps` turns and then answers with `--tokens` words. What a
client spends on a step is then its own overhead and nothing else. Whoever asks for a stream gets one, a chunk per
word, each in a write of its own as from a model that decodes. Any GET lists the models, and how many chats were served
so far. Run it directly to have its port printed, or use `Loopback` to start one.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType

_JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def text(tokens: int) -> str:
    """The answer of so many words."""
    return "Paris" + " indeed" * (tokens - 1)


def completion(request: dict, steps: int, tokens: int = 1) -> dict:
    """The answer to one request: a tool call while there are steps left, then text."""
    taken = sum(message["role"] == "assistant" for message in request["messages"])
    message: dict = {"role": "assistant", "content": text(tokens)}
    if taken < steps:
        arguments = json.dumps({"query": f"fact number {taken}"})
        call = {"id": f"call_{taken}", "type": "function", "function": {"name": "search", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if taken < steps else "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": request.get("model", "loopback"),
        "choices": [choice],
        "usage": _USAGE,
    }


def _deltas(message: dict) -> Iterator[dict]:
    yield {"role": "assistant", "content": None if message["content"] is None else ""}
    words = (message["content"] or "").split(" ")
    yield from ({"content": word if not number else f" {word}"} for number, word in enumerate(words) if word)
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index, **call}]}


def stream(answer: dict, usage: bool) -> list[bytes]:
    """The same answer as HTTP chunks of server-sent events."""
    choice = answer["choices"][0]
    shared = {"id": answer["id"], "object": "chat.completion.chunk", "created": 0, "model": answer["model"]}
    choices: list[dict] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in _deltas(choice["message"])]
    choices.append({"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]})
    events = [{**shared, "choices": [one]} for one in choices]
    if usage:
        events.append({**shared, "choices": [], "usage": answer["usage"]})
    lines = [b"data: %s\n\n" % json.dumps(event).encode() for event in events]
    return [b"%x\r\n%s\r\n" % (len(line), line) for line in (*lines, b"data: [DONE]\n\n")]


async def _serve(steps: int, latency: float, tokens: int) -> None:
    served = 0
    # without steps every answer is the same: rendering it once leaves the machine to what is measured
    same = functools.cache(lambda model, usage: stream(completion({"messages": [], "model": model}, 0, tokens), usage))

    async def send_stream(request: dict, writer: asyncio.StreamWriter) -> None:
        usage = bool((request.get("stream_options") or {}).get("include_usage"))
        chunks = stream(completion(request, steps, tokens), usage) if steps else same(request.get("model", ""), usage)
        writer.write(_SSE_HEAD)
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
                request = json.loads(await reader.readexactly(length) or b"{}")
                if latency:
                    await asyncio.sleep(latency)
                served += bool(length)
                if request.get("stream"):
                    await send_stream(request, writer)
                    continue
                models = {"object": "list", "data": [{"id": "loopback"}], "served": served}
                body = json.dumps(completion(request, steps, tokens) if length else models).encode()
                writer.write(_JSON_HEAD % len(body) + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


class Loopback:
    """Starts the server in a process of its own: `with Loopback(steps=20) as url: ...`."""

    def __init__(self, steps: int, latency: float = 0.0, tokens: int = 1) -> None:
        options = {"--steps": steps, "--latency": latency, "--tokens": tokens}
        self._command = [sys.executable, __file__, *(str(word) for option in options.items() for word in option)]

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def __enter__(self) -> str:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        return f"http://127.0.0.1:{self._process.stdout.readline().strip()}/v1"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds to wait before each answer")
    parser.add_argument("--tokens", type=int, default=1, help="words of the answer")
    options = parser.parse_args()
    asyncio.run(_serve(options.steps, options.latency, options.tokens))
