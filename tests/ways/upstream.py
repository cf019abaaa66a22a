"""A model server on loopback, over real sockets, that plays a script: chat completions, responses, and their faults.

    with Upstream(["Paris", failure(429, retry_after=1), Scripted("London", die_after=2)]) as upstream:
        client = OpenAI(base_url=upstream.url, api_key="none")

The same reply is served as JSON or as a stream, as the request asks. `/v1/models` and `/v1/embeddings` are simple real
ones; every other path answers with what came in.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from caddie_sdk.testing import check_wire

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 10,
    "total_tokens": 110,
    "prompt_tokens_details": {"cached_tokens": 40},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
NEEDED = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/v1/embeddings": "input"}
CREATED = 1_700_000_000
_STREAMED_TEXTS = ("reasoning_content", "reasoning", "content")


@dataclass(frozen=True)
class Scripted:
    """One reply, and what is odd about it.

    Attributes:
        say: a text or an assistant message. Empty tool-call ids are filled in unless `keep_ids`.
        more: further choices, when the request asks for `n`; the first is repeated where they run out.
        status: of the HTTP answer; 0 closes the connection without a word.
        headers: added to the answer's own.
        body: sent as JSON (bytes as they are) in place of a completion or stream.
        stall: seconds before the head.
        gap: seconds before every chunk of a stream but the first.
        die_after: the connection is dropped after so many chunks; after half of the body where nothing is streamed.
        raw_chunks: what a stream says, in place of chunks made from `say`: dicts are sent as data, strings and bytes
            as they are.
        end: whether a stream of chat chunks ends with `[DONE]`.
        finish_reason: in place of `stop` or `tool_calls`; `length` makes a response incomplete.
        usage: in chat form, for both APIs; None leaves it out.
        logprobs: give them even where the request does not ask.
    """

    say: str | Mapping[str, Any] = ""
    more: Sequence[str | Mapping[str, Any]] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    stall: float = 0.0
    gap: float = 0.0
    die_after: int | None = None
    raw_chunks: Sequence[Mapping[str, Any] | str | bytes] | None = None
    end: bool = True
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = field(default_factory=lambda: USAGE)
    logprobs: bool = False
    keep_ids: bool = False


Said = str | Mapping[str, Any] | Scripted
Script = Sequence[Said] | Callable[[dict[str, Any]], Any]
"""Replies in order, or a function (also an async one) of the request body, called on the server's thread."""


@dataclass
class Request:
    """What came in, and what became of it; `items` is a responses request's whole conversation, kept state included."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: Any
    items: list[Any] = field(default_factory=list)
    at: float = field(default_factory=time.monotonic)
    chunks: int = 0
    finished: bool = False
    aborted: bool = False
    """The client hung up before the answer's end."""


def failure(
    status: int, message: str = "scripted failure", *, code: str | None = None, retry_after: float | None = None
) -> Scripted:
    """An error as OpenAI-compatible servers word it."""
    kind = "invalid_request_error" if status < 429 else "rate_limit_error" if status == 429 else "server_error"
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    return Scripted(status=status, body=_error(message, kind, code), headers=headers)


def context_overflow(limit: int = 8192, asked: int = 9000) -> Scripted:
    """A prompt that does not fit."""
    text = f"This model's maximum context length is {limit} tokens. However, your messages resulted in {asked} tokens."
    return failure(400, text, code="context_length_exceeded")


def chunk(delta: Mapping[str, Any] | None = None, finish_reason: str | None = None, index: int = 0) -> dict[str, Any]:
    """One chat chunk for `raw_chunks`."""
    choice = {"index": index, "delta": dict(delta or {}), "finish_reason": finish_reason}
    return {**_base("chat.completion.chunk", "raw", "scripted"), "choices": [choice]}


def _error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _base(kind: str, ident: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{ident}", "object": kind, "created": CREATED, "model": model}


def _pieces(text: str | None, size: int = 5) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text or ""), size)] if text else []


# Chat completions


def _tokens(pieces: Sequence[str]) -> dict[str, Any]:
    content = [
        {"token": piece, "logprob": -0.25, "bytes": list(piece.encode()), "top_logprobs": []} for piece in pieces
    ]
    return {"content": content, "refusal": None}


def _reason(reply: Scripted, message: Mapping[str, Any]) -> str:
    return reply.finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")


def _completion(reply: Scripted, messages: list[dict[str, Any]], body: Mapping[str, Any], ident: str) -> dict[str, Any]:
    choices = []
    for index, message in enumerate(messages):
        logprobs = _tokens(_pieces(message["content"])) if reply.logprobs or body.get("logprobs") else None
        reason = _reason(reply, message)
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
    usage = {} if reply.usage is None else {"usage": reply.usage}
    return {**_base("chat.completion", ident, body.get("model") or "scripted"), "choices": choices, **usage}


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    rest = {key: value for key, value in message.items() if key not in (*_STREAMED_TEXTS, "tool_calls")}
    yield {**rest, "content": None if message["content"] is None else ""}
    for name in _STREAMED_TEXTS:
        for piece in _pieces(message.get(name)):
            yield {name: piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        begun = {**call, "function": {**call["function"], "arguments": ""}}
        yield {"tool_calls": [{"index": index, **begun}]}
        for piece in _pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _chunks(
    reply: Scripted, messages: list[dict[str, Any]], body: Mapping[str, Any], ident: str
) -> Iterator[dict[str, Any]]:
    counted = bool((body.get("stream_options") or {}).get("include_usage"))
    base = _base("chat.completion.chunk", ident, body.get("model") or "scripted")
    if counted:
        base["usage"] = None
    asked = reply.logprobs or body.get("logprobs")

    def choices(index: int, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for delta in _deltas(message):
            logprobs = _tokens([delta["content"]]) if asked and delta.get("content") else None
            yield {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        yield {"index": index, "delta": {}, "logprobs": None, "finish_reason": _reason(reply, message)}

    # servers send the chunks of several choices mixed together
    for row in itertools.zip_longest(*(choices(index, message) for index, message in enumerate(messages))):
        yield from ({**base, "choices": [choice]} for choice in row if choice is not None)
    if counted and reply.usage is not None:
        yield {**base, "choices": [], "usage": reply.usage}


# Responses


def _output(message: Mapping[str, Any], ident: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought:
        content = [{"type": "reasoning_text", "text": thought}]
        items.append({"id": f"rs_{ident}", "type": "reasoning", "summary": [], "content": content})
    if message["content"]:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{ident}", "type": "message", "role": "assistant", "content": [part]})
    for number, call in enumerate(message.get("tool_calls", ())):
        item = {"id": f"fc_{ident}_{number}", "type": "function_call", "call_id": call["id"], **call["function"]}
        items.append(item)
    return [{**item, "status": "completed"} for item in items]


def _response(reply: Scripted, message: Mapping[str, Any], body: Mapping[str, Any], ident: str) -> dict[str, Any]:
    cut = reply.finish_reason == "length"
    echoed = {name: body.get(name) for name in ("instructions", "metadata", "previous_response_id", "temperature")}
    return {
        "id": f"resp_{ident}",
        "object": "response",
        "created_at": CREATED,
        "model": body.get("model") or "scripted",
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(message, ident),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "store": body.get("store", True),
        "usage": None if reply.usage is None else _response_usage(reply.usage),
        **echoed,
    }


def _response_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
        "input_tokens_details": {"cached_tokens": 0, **(usage.get("prompt_tokens_details") or {})},
        "output_tokens_details": {"reasoning_tokens": 0, **(usage.get("completion_tokens_details") or {})},
    }


def _events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    plain = itertools.chain(
        ({"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")),
        *(_item_events(index, item) for index, item in enumerate(response["output"])),
        [{"type": f"response.{response['status']}", "response": response}],
    )
    return ({**event, "sequence_number": number} for number, event in enumerate(plain))


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    at = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        began, middle = {**item, "arguments": ""}, _call_events(at, item)
    else:
        began, middle = {**item, "content": []}, _text_events(at, item)
    yield {"type": "response.output_item.added", "output_index": index, "item": {**began, "status": "in_progress"}}
    yield from middle
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(at: Mapping[str, Any], item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind, said = "response.function_call_arguments", {"name": item["name"], "arguments": item["arguments"]}
    yield from ({"type": f"{kind}.delta", **at, "delta": piece} for piece in _pieces(item["arguments"]))
    yield {"type": f"{kind}.done", **at, **said}


def _text_events(at: Mapping[str, Any], item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    part = item["content"][0]
    kind, at = f"response.{part['type']}", {**at, "content_index": 0}
    extra: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield from ({"type": f"{kind}.delta", **at, "delta": piece, **extra} for piece in _pieces(part["text"]))
    yield {"type": f"{kind}.done", **at, "text": part["text"], **extra}
    yield {"type": "response.content_part.done", **at, "part": part}


# What strict servers refuse


def _wire(messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        check_wire(messages)
    except AssertionError as error:
        return str(error)
    return ""


def _user_after_tool(messages: Sequence[Mapping[str, Any]]) -> str:
    roles = [message.get("role") for message in messages]
    return "Unexpected role 'user' after role 'tool'" if ("tool", "user") in itertools.pairwise(roles) else ""


def _alternating(messages: Sequence[Mapping[str, Any]]) -> str:
    roles = [message.get("role") for message in messages if message.get("role") not in ("system", "developer")]
    if any(one == other != "tool" for one, other in itertools.pairwise(roles)):
        return "Conversation roles must alternate user/assistant/user/assistant/..."
    return ""


def _second_system(messages: Sequence[Mapping[str, Any]]) -> str:
    late = any(message.get("role") in ("system", "developer") for message in messages[1:])
    return "System message must be at the beginning." if late else ""


RULES: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    "wire": _wire,
    "user-after-tool": _user_after_tool,
    "alternating": _alternating,
    "second-system": _second_system,
}


def _unpaired(items: Sequence[Any]) -> str:
    called = [item["call_id"] for item in items if item.get("type") == "function_call"]
    answered = [item["call_id"] for item in items if item.get("type") == "function_call_output"]
    for stray in (one for one in answered if one not in called):
        return f"No tool call found for function call output with call_id {stray}."
    for open_call in (one for one in called if one not in answered):
        return f"No tool output found for function call {open_call}."
    return ""


# The server


class Upstream:
    """A server for the length of a `with` block.

    Args:
        script: see `Script`.
        strict: refuse, with status 400, a chat history that `check_wire` refuses, and a response's calls and outputs
            that do not belong together.
        refuse: further rules by name: `user-after-tool`, `alternating`, `second-system`.
        key: what `Authorization: Bearer` must say, else 401.
        models: what `/v1/models` lists.

    Attributes:
        url: ends in `/v1`.
        requests: all that came in, in order.
        refused: what the rules said to requests.
        problems: faults of the script itself; the `with` block ends with an AssertionError if there are any.
        peak: most requests that were in the works at one time.
    """

    def __init__(
        self,
        script: Script,
        *,
        strict: bool = False,
        refuse: Collection[str] = (),
        key: str | None = None,
        models: Sequence[str] = ("scripted",),
    ) -> None:
        self._script = script if callable(script) else list(script)
        self._left = 0 if callable(script) else len(self._script)  # type: ignore[arg-type]
        self._strict, self._key, self._models = strict, key, models
        self._rules = [RULES[name] for name in ("wire",) * strict + tuple(refuse)]
        self._ids = itertools.count(1)
        self._kept: dict[str, list[Any]] = {}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._open = 0
        self.url = ""
        self.requests: list[Request] = []
        self.refused: list[str] = []
        self.problems: list[str] = []
        self.peak = 0

    def __enter__(self) -> Upstream:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10), "the server did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert error or not self.problems, f"the script failed: {self.problems}"

    @property
    def chats(self) -> list[dict[str, Any]]:
        """The bodies of the chat requests."""
        return [request.body for request in self.requests if request.path == "/v1/chat/completions"]

    def raise_if_unused(self) -> None:
        """Raises AssertionError where the list was longer than what was asked for."""
        assert not self._left, f"{self._left} of {len(self._script)} scripted replies were not asked for"  # type: ignore[arg-type]

    def wait_until(self, holds: Callable[[], bool], seconds: float = 5.0) -> None:
        """Wait for what the server will notice soon, as an aborted request."""
        until = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < until, self.requests
            time.sleep(0.005)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _read(reader)) is not None:
                self.requests.append(request)
                if not await self._attend(request, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _attend(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer while watching whether the client is still there; True keeps the connection."""
        self._open += 1
        self.peak = max(self.peak, self._open)
        answering = asyncio.ensure_future(self._answer(request, writer))
        try:
            while not answering.done():
                await asyncio.wait({answering}, timeout=0.01)
                if not answering.done() and (reader.at_eof() or reader.exception()):
                    request.aborted = not request.finished
                    return False
            return answering.result()
        except ConnectionError:
            request.aborted = not request.finished
            return False
        finally:
            answering.cancel()
            self._open -= 1

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        reply, events = await self._plan(request)
        await asyncio.sleep(reply.stall)
        if not reply.status:
            return False
        if reply.body is None and events is not None:
            await _stream(request, reply, list(events), writer)
        else:
            await _whole(request, reply, writer)
        return request.finished

    async def _plan(self, request: Request) -> tuple[Scripted, Iterator[bytes] | None]:
        """The reply, and its stream where one is asked for; without one the reply's body is set."""
        if self._key is not None and request.headers.get("authorization") != f"Bearer {self._key}":
            return failure(401, "Incorrect API key provided.", code="invalid_api_key"), None
        place = (request.method, request.path)
        if place == ("GET", "/v1/models"):
            data = [{"id": name, "object": "model", "created": CREATED, "owned_by": "tests"} for name in self._models]
            return Scripted(body={"object": "list", "data": data}), None
        needed = NEEDED.get(request.path) if request.method == "POST" else None
        if needed and (not isinstance(request.body, dict) or needed not in request.body):
            return failure(400, f"Missing required parameter: '{needed}'.", code="missing_required_parameter"), None
        if place == ("POST", "/v1/embeddings"):
            return Scripted(body=_embeddings(request.body)), None
        if place == ("POST", "/v1/chat/completions"):
            return await self._chat(request.body)
        if place == ("POST", "/v1/responses"):
            return await self._respond(request)
        echo = {"method": request.method, "path": request.path, "query": request.query, "body": request.body}
        return Scripted(body=echo), None

    async def _chat(self, body: dict[str, Any]) -> tuple[Scripted, Iterator[bytes] | None]:
        for rule in self._rules:
            if complaint := rule(body["messages"]):
                self.refused.append(complaint)
                return failure(400, complaint), None
        reply, ident = await self._next(body), self._ident()
        if reply.body is not None:
            return reply, None
        said = [*(reply.say, *reply.more), *[reply.say] * (body.get("n") or 1)][: body.get("n") or 1]
        messages = [self._message(one, reply.keep_ids) for one in said]
        if not body.get("stream"):
            return _with_body(reply, _completion(reply, messages, body, ident)), None
        chunks = _chunks(reply, messages, body, ident) if reply.raw_chunks is None else reply.raw_chunks
        return reply, itertools.chain(map(_sse, chunks), [b"data: [DONE]\n\n"] * reply.end)

    async def _respond(self, request: Request) -> tuple[Scripted, Iterator[bytes] | None]:
        body, previous = request.body, request.body.get("previous_response_id")
        if previous is not None and previous not in self._kept:
            text = f"Previous response with id '{previous}' not found."
            return failure(400, text, code="previous_response_not_found"), None
        given = body["input"]
        new = [{"role": "user", "content": given}] if isinstance(given, str) else given
        request.items = [*self._kept.get(previous or "", ()), *new]
        if self._strict and (complaint := _unpaired(request.items)):
            self.refused.append(complaint)
            return failure(400, complaint), None
        reply = await self._next(body)
        if reply.body is not None:
            return reply, None
        response = _response(reply, self._message(reply.say, reply.keep_ids), body, self._ident())
        if response["store"] is not False:
            self._kept[response["id"]] = [*request.items, *response["output"]]
        if not body.get("stream"):
            return _with_body(reply, response), None
        return reply, map(_sse, _events(response) if reply.raw_chunks is None else reply.raw_chunks)

    async def _next(self, body: dict[str, Any]) -> Scripted:
        try:
            if callable(self._script):
                said = self._script(body)
                said = await said if inspect.isawaitable(said) else said
            else:
                assert self._left, f"the script of {len(self._script)} replies is used up"
                said = self._script[-self._left]
                self._left -= 1
        except Exception as error:  # noqa: BLE001 - a script is a test's code: report whatever it does
            self.problems.append(f"{type(error).__name__}: {error}")
            return failure(400, f"the script failed: {error}", code="script")  # a status that clients do not retry
        return said if isinstance(said, Scripted) else Scripted(said)

    def _message(self, said: str | Mapping[str, Any], keep_ids: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", **({"content": said} if isinstance(said, str) else said)}
        made = [dict(call) for call in message.pop("tool_calls", None) or ()]
        for call in made if not keep_ids else ():
            call["id"] = call.get("id") or f"call_{self._ident()}"
        message["content"] = message.get("content") or (None if made else "")
        return message | ({"tool_calls": made} if made else {})

    def _ident(self) -> str:
        return f"{next(self._ids):06d}"


def _with_body(reply: Scripted, body: dict[str, Any]) -> Scripted:
    return Scripted(body=body, status=reply.status, headers=reply.headers, stall=reply.stall, die_after=reply.die_after)


def _sse(event: Mapping[str, Any] | str | bytes) -> bytes:
    if isinstance(event, (str, bytes)):
        return event.encode() if isinstance(event, str) else event
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


def _embeddings(body: Mapping[str, Any]) -> dict[str, Any]:
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    data = [{"object": "embedding", "index": at, "embedding": [len(text), at]} for at, text in enumerate(texts)]
    usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
    return {"object": "list", "data": data, "model": body.get("model"), "usage": usage}


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
    if "chunked" in headers.get("transfer-encoding", ""):
        raw = await _read_chunked(reader)
    else:
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
    method, target, _ = first.split(" ")
    address = urlsplit(target)
    try:
        body = json.loads(raw) if raw else None
    except ValueError:
        body = raw.decode("latin-1")  # an upload, for the echo
    return Request(method, address.path, parse_qs(address.query), headers, body)


async def _read_chunked(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(parts)


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Scripted", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _whole(request: Request, reply: Scripted, writer: asyncio.StreamWriter) -> None:
    data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
    data = b"" if request.method == "HEAD" else data
    headers = {"content-type": "application/json", "content-length": str(len(data)), **reply.headers}
    request.finished = reply.die_after is None
    writer.write(_head(reply.status, headers) + (data if request.finished else data[: len(data) // 2]))
    await writer.drain()


async def _stream(request: Request, reply: Scripted, events: Sequence[bytes], writer: asyncio.StreamWriter) -> None:
    headers = {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked", **reply.headers}
    writer.write(_head(reply.status, headers))
    await writer.drain()
    for event in events[: reply.die_after]:
        if request.chunks:
            await asyncio.sleep(reply.gap)
        request.chunks += 1
        # told before it is sent: a client that has seen all of it may look at once
        request.finished = request.chunks == len(events)
        writer.write(b"%x\r\n%s\r\n" % (len(event), event) + b"0\r\n\r\n" * request.finished)
        await writer.drain()
