"""The ways to call the Responses API past a critic, under one face, and what must hold for everything they return."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import uvicorn
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from upstream import CREATED, Scripted, Upstream

from caddie_sdk.shells.proxy import create_app
from caddie_sdk.shells.wrap import make_relay, wrap
from caddie_sdk.testing import ScriptedCritic, calls, tool_call

WAYS = ("sync", "async", "proxy")
HOWS = ("create", "events", "stream", "parse")
ASK = calls(tool_call("call_critic"), text="Let me ask.")
SEARCH: dict[str, Any] = {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}
REFUND: dict[str, Any] = {**SEARCH, "name": "refund"}
ADVICE = ("The river is unnamed.", "Search for zanzibar.")
SECRETS = ("call_critic", "request_feedback", "zanzibar", "Not run yet")
"""What no caller may ever see: the control tool, a critique's words, the session's own."""
USAGE = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110}


class Server:
    """One uvicorn for all tests; the application behind it is the one of the test at hand."""

    def __init__(self) -> None:
        self.app: Any = None
        self.loop = asyncio.new_event_loop()
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        config = uvicorn.Config(self._call, log_level="error", lifespan="off", interface="asgi3")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, args=([listening],), daemon=True)
        self._thread.start()

    def _run(self, sockets: list[socket.socket]) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._server.serve(sockets))

    async def _call(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    @contextmanager
    def serving(self, app: Any) -> Iterator[str]:
        """The address at which the application answers, for the length of the block."""
        context = app.router.lifespan_context(app)
        self._do(context.__aenter__())
        self.app = app
        try:
            yield self.url
        finally:
            self._do(context.__aexit__(None, None, None))

    def _do(self, work: Any) -> None:
        async def run() -> None:
            await work

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)


@functools.cache
def _server() -> Server:
    return Server()


class Caller:
    """A client of the official library with a critic on its way, called the same whatever kind it is.

    Args:
        way: one of WAYS.
        upstream: the model server.
        critic: a critic, or (analysis, advice) pairs and faults for one.
        settings: of `wrap`, or of the proxy's relay.
    """

    def __init__(self, way: str, upstream: Upstream, critic: Any, **settings: Any):
        self.critic = critic if hasattr(critic, "critique") else ScriptedCritic(critic)
        self._stack = ExitStack()
        self._loop = asyncio.Runner() if way == "async" else None
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0}
        # Nothing here speaks TLS, and reading the authorities' certificates would be most of a test's time.
        kind = DefaultAsyncHttpxClient if way == "async" else DefaultHttpxClient
        options["http_client"] = kind(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        self.client: Any
        if way == "proxy":
            app = create_app(
                upstream.url, {"call_critic": self.critic}, make_relay({"call_critic": self.critic}, **settings)
            )
            self.client = OpenAI(base_url=self._stack.enter_context(_server().serving(app)), **options)
        elif way == "async":
            self.client = wrap(AsyncOpenAI(base_url=upstream.url, **options), self.critic, **settings)
        else:
            self.client = wrap(OpenAI(base_url=upstream.url, **options), self.critic, **settings)

    def close(self) -> None:
        self.wait(self.client.close())
        self._stack.close()
        if self._loop is not None:
            self._loop.close()

    def wait(self, value: Any) -> Any:
        """A result, awaited where it must be."""
        return self._loop.run(value) if self._loop is not None and value is not None else value

    def ask(self, how: str, said: Any = "Which river?", **body: Any) -> Any:
        """The final response; streams are checked on the way."""
        body = {"model": "m", "input": said, "tools": [SEARCH, REFUND], **body}
        if how == "events":
            return checked(self.events(**body))
        if how == "stream":
            return self.wait(self._helped(body)) if self._loop is not None else self._streamed(body)
        answer = self.wait(getattr(self.client.responses, how)(**body))
        assert_nothing_hidden(answer.to_dict())
        return answer

    def events(self, **body: Any) -> list[Any]:
        """All events of `create(stream=True)`."""
        stream = self.wait(self.client.responses.create(**body, stream=True))
        return self.wait(_all(stream)) if self._loop is not None else list(stream)

    def _streamed(self, body: Mapping[str, Any]) -> Any:
        with self.client.responses.stream(**body) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert checked(events).to_dict() == final.to_dict()
        return final

    async def _helped(self, body: Mapping[str, Any]) -> Any:
        async with self.client.responses.stream(**body) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert checked(events).to_dict() == final.to_dict()
        return final


async def _all(stream: Any) -> list[Any]:
    return [event async for event in stream]


def assert_nothing_hidden(*shown: Any) -> None:
    """No word of what belongs between model and critic; the extension field may tell, so it is left out."""
    for one in shown:
        text = json.dumps({key: value for key, value in one.items() if key != "caddie"})
        for secret in SECRETS:
            assert secret not in text, f"{secret!r} shows in {text}"


def checked(events: Sequence[Any]) -> Any:
    """The final response of a whole stream, whose events must tell one consistent story."""
    checked_json([event.to_dict() for event in events])
    return events[-1].response


def checked_json(raw: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`checked` for events as they came.

    Events are numbered without a gap, items too; what opened is what closed, and the final response has exactly the
    items that the events told, in their order, with the same ids and contents.
    """
    assert [event["sequence_number"] for event in raw] == list(range(len(raw)))
    assert raw[0]["type"] == "response.created"
    assert raw[-1]["type"] in ("response.completed", "response.incomplete")
    assert [event["type"] for event in raw].count("response.created") == 1
    final = raw[-1]["response"]
    for event in raw[:-1]:
        if "response" in event:
            for name in ("id", "previous_response_id", "tools", "created_at"):
                assert event["response"].get(name) == final.get(name)
            assert_nothing_hidden(event["response"])
        else:
            assert_nothing_hidden(event)
    assert_nothing_hidden(final)
    added = [event for event in raw if event["type"] == "response.output_item.added"]
    done = [event for event in raw if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == list(range(len(added)))
    assert sorted(event["output_index"] for event in done) == list(range(len(added)))
    open_now: set[int] = set()
    for event in raw:
        if event["type"] == "response.output_item.added":
            open_now.add(event["output_index"])
        elif "output_index" in event:
            assert event["output_index"] in open_now
    told = {event["output_index"]: event["item"] for event in done}
    assert [_plain(told[index]) for index in sorted(told)] == [_plain(item) for item in final["output"]]
    for one in added:
        assert one["item"]["id"] == told[one["output_index"]]["id"]
        assert one["item"].get("call_id") == told[one["output_index"]].get("call_id")
    return dict(final)


def _plain(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item without what the client's own parsing adds to it."""
    plain = {key: value for key, value in item.items() if key != "parsed_arguments"}
    if isinstance(plain.get("content"), list):
        plain["content"] = [{k: v for k, v in part.items() if k != "parsed"} for part in plain["content"]]
    return plain


# ---------------------------------------------------------------------- replies of any items


def message(text: str, ident: str = "msg_1") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": ident, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def function_call(name: str, ident: str, arguments: str = "{}", status: str = "completed") -> dict[str, Any]:
    call = {"id": f"fc_{ident}", "type": "function_call", "call_id": f"call_{ident}", "name": name}
    return {**call, "arguments": arguments, "status": status}


def reasoning(ident: str, **more: Any) -> dict[str, Any]:
    return {"id": f"rs_{ident}", "type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], **more}


def items(output: Sequence[Mapping[str, Any]], ident: str = "resp_x", status: str = "completed", **more: Any) -> Any:
    """A script entry: a response of these items, as JSON or as a stream, as the request asks."""

    def reply(body: Mapping[str, Any]) -> Scripted:
        response = {
            "id": ident, "object": "response", "created_at": CREATED, "model": "m", "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(output), "parallel_tool_calls": True, "tool_choice": body.get("tool_choice", "auto"),
            "tools": body.get("tools", []), "store": body.get("store", True), "usage": USAGE,
            "previous_response_id": body.get("previous_response_id"),
        }  # fmt: skip
        if body.get("stream"):
            return Scripted(raw_chunks=list(events_of(response)), **more)
        return Scripted(body=response, **more)

    return reply


def events_of(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A response as the events of a stream; deltas of texts and arguments only, as nothing else is cut."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    plain: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(response["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        opened = {**item, "status": "in_progress"} if "status" in item else item
        middle: list[dict[str, Any]] = []
        if item["type"] == "message":
            opened = {**opened, "content": []}
            where, part = {**at, "content_index": 0}, item["content"][0]
            middle = [{"type": "response.content_part.added", **where, "part": {**part, "text": ""}}]
            said = [part["text"][n : n + 4] for n in range(0, len(part["text"]), 4)]
            middle += [{"type": "response.output_text.delta", **where, "delta": d, "logprobs": []} for d in said]
            middle += [{"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []}]
            middle += [{"type": "response.content_part.done", **where, "part": part}]
        if item["type"] == "function_call":
            opened = {**opened, "arguments": ""}
            kind = "response.function_call_arguments"
            middle = [{"type": f"{kind}.delta", **at, "delta": item["arguments"]}]
            middle += [{"type": f"{kind}.done", **at, "name": item["name"], "arguments": item["arguments"]}]
        plain.append({"type": "response.output_item.added", "output_index": index, "item": opened})
        plain += middle
        plain.append({"type": "response.output_item.done", "output_index": index, "item": item})
    plain.append({"type": f"response.{response['status']}", "response": dict(response)})
    return ({**event, "sequence_number": number} for number, event in enumerate(plain))


def script(*replies: Any) -> Any:
    """Replies in order, `items(...)` among them."""
    rest = iter(replies)

    def reply(body: Mapping[str, Any]) -> Any:
        said = next(rest, None)
        assert said is not None, f"the script of {len(replies)} replies is used up"
        return said(body) if callable(said) else said

    return reply


def kinds(sent: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a list of items is made of, for assertions."""
    return [
        {"function_call": "call", "function_call_output": "result"}.get(str(item.get("type")), "")
        or str(item.get("role") or item.get("type"))
        for item in sent
    ]


def result(call: Any, output: Any = "found") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}
