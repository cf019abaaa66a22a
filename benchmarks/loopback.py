"""A chat-completions server on loopback that answers at once, in a process of its own.

It plays an agent that calls `search` in its first `--steps` turns and then answers. What a client spends on a step
is then its own overhead and nothing else. Run it directly to have its URL printed, or use `Loopback` to start one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from types import TracebackType

_MODELS = {"object": "list", "data": [{"id": "loopback"}]}
_USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def completion(request: dict, steps: int) -> dict:
    """The answer to one request: a tool call while there are steps left, then text."""
    taken = sum(message["role"] == "assistant" for message in request["messages"])
    message: dict = {"role": "assistant", "content": "Paris"}
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


async def _serve(steps: int, latency: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
                request = json.loads(await reader.readexactly(length) or b"{}")
                if latency:
                    await asyncio.sleep(latency)
                answer = completion(request, steps) if length else _MODELS
                body = json.dumps(answer).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
                    + body
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


class Loopback:
    """Starts the server in a process of its own: `with Loopback(steps=20) as url: ...`."""

    def __init__(self, steps: int, latency: float = 0.0) -> None:
        self._command = [sys.executable, __file__, "--steps", str(steps), "--latency", str(latency)]

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
    options = parser.parse_args()
    asyncio.run(_serve(options.steps, options.latency))
