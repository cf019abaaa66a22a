"""Agents that keep their own history and run their own tools, as users write them: parity's outside view.

Each plays one case against a scripted model server, through a wrapped client or the proxy, and notes what the server
was sent, what the critics were shown, and what the caller was answered.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvicorn
from openai import AsyncOpenAI, OpenAI
from parity_cases import TOOLS, Case

from caddie_sdk.messages import canonical
from caddie_sdk.relay.items import flat_tool, read_items
from caddie_sdk.relay.live import LiveSessions
from caddie_sdk.shells.proxy import create_app
from caddie_sdk.shells.wrap import make_relay, wrap

sys.path.insert(0, str(Path(__file__).parents[1] / "ways"))
from upstream import Scripted, Upstream

BY_NAME = {tool.name: tool for tool in TOOLS}
NAMES = ", ".join(BY_NAME)


@dataclass
class Seen:
    """What one way in showed of a case."""

    wire: list[list[dict[str, Any]]] = field(default_factory=list)
    offered: list[list[str]] = field(default_factory=list)
    states: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)


def run_tool(name: str, raw: str) -> str:
    """A caller's own tools, with the words that our loop has for what goes wrong."""
    if name not in BY_NAME:
        return f"There is no tool {name!r}. Tools: {NAMES}."
    try:
        arguments = json.loads(raw or "{}")
        assert isinstance(arguments, dict)
    except (ValueError, AssertionError):
        return "The arguments were not a JSON object, so the tool was not run. Send a JSON object."
    try:
        return asyncio.run(BY_NAME[name](**arguments))
    except Exception as error:  # noqa: BLE001 - as the loop does
        return f"The tool failed: {type(error).__name__}: {error}"


def chat(ask: Callable[[list[Any]], dict[str, Any]], case: Case) -> list[str]:
    """The loop everybody writes first, over chat completions."""
    messages: list[Any] = [{"role": "system", "content": case.system}] if case.system else []
    answers = []
    for turn in case.turns:
        messages.append({"role": "user", "content": turn})
        while True:
            message = ask(messages)
            messages.append(message)
            if not message.get("tool_calls"):
                answers.append(message.get("content") or "")
                break
            for call in message["tool_calls"]:
                found = run_tool(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
    return answers


def responses(ask: Callable[[list[Any]], list[dict[str, Any]]], case: Case) -> list[str]:
    """The same over the Responses API."""
    items: list[Any] = []
    answers = []
    for turn in case.turns:
        items.append({"role": "user", "content": turn})
        while True:
            output = ask(items)
            items += output
            asked = [item for item in output if item["type"] == "function_call"]
            if not asked:
                texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
                answers.append("\n\n".join(texts))
                break
            for call in asked:
                found = run_tool(call["name"], call["arguments"])
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": found})
    return answers


def _plain(message: Any) -> dict[str, Any]:
    return message.model_dump(exclude_none=True)  # type: ignore[no-any-return]


SCHEMAS = [tool.schema() for tool in TOOLS]
FLAT = [flat_tool(schema) for schema in SCHEMAS]


def by_create(client: Any, case: Case) -> list[str]:
    def ask(messages: list[Any]) -> dict[str, Any]:
        return _plain(client.chat.completions.create(model="m", messages=messages, tools=SCHEMAS).choices[0].message)

    return chat(ask, case)


def by_stream(client: Any, case: Case) -> list[str]:
    def ask(messages: list[Any]) -> dict[str, Any]:
        with client.chat.completions.stream(model="m", messages=messages, tools=SCHEMAS) as stream:
            message = _plain(stream.get_final_completion().choices[0].message)
        for call in message.get("tool_calls", ()):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        return message

    return chat(ask, case)


def by_async(client: Any, case: Case) -> list[str]:
    with asyncio.Runner() as runner:

        def ask(messages: list[Any]) -> dict[str, Any]:
            answer = runner.run(client.chat.completions.create(model="m", messages=messages, tools=SCHEMAS))
            return _plain(answer.choices[0].message)

        # The caller's tools start loops of their own, which no running loop allows; so each request runs by itself.
        return chat(ask, case)


def by_responses(client: Any, case: Case) -> list[str]:
    def ask(items: list[Any]) -> list[dict[str, Any]]:
        answer = client.responses.create(model="m", input=items, tools=FLAT, instructions=case.system or None)
        return [_plain(item) for item in answer.output]

    return responses(ask, case)


def by_responses_stream(client: Any, case: Case) -> list[str]:
    def ask(items: list[Any]) -> list[dict[str, Any]]:
        with client.responses.stream(model="m", input=items, tools=FLAT, instructions=case.system or None) as stream:
            answer = stream.get_final_response()
        output = [_plain(item) for item in answer.output]
        for item in output:
            item.pop("parsed_arguments", None)
        return output

    return responses(ask, case)


def play(case: Case, drive: Callable[[Any, Case], list[str]], *, proxied: bool = False, remembers: bool = True) -> Seen:
    """One case through a wrapped client, or through the proxy; without `remembers`, each request as after a restart."""
    critics, seen = case.critics(), Seen()
    settings: dict[str, Any] = {"protocol": case.protocol, "budget": case.budget, "on_error": case.on_error}
    with ExitStack() as stack:
        if not remembers:
            stack.enter_context(patch.object(LiveSessions, "put", lambda *_: None))
        upstream = stack.enter_context(Upstream([Scripted(reply, keep_ids=True) for reply in case.replies]))
        kind = AsyncOpenAI if drive is by_async else OpenAI
        if proxied:
            app = create_app(upstream.url, critics, make_relay(critics, **settings))
            client = kind(base_url=stack.enter_context(Serving(app)).url, api_key="k", max_retries=0)
        else:
            bare = kind(base_url=upstream.url, api_key="k", max_retries=0)
            client = wrap(bare, critics.get("call_critic"), feedback=critics.get("request_feedback"), **settings)
        seen.answers = drive(client, case)
        for request in upstream.requests:
            seen.wire.append(_read(request.body))
            names = [tool.get("name") or tool["function"]["name"] for tool in request.body.get("tools", ())]
            seen.offered.append(names)
    for name, critic in critics.items():
        seen.states[name] = [state.dump() for state in getattr(critic, "seen", ())]
    return seen


def _read(body: dict[str, Any]) -> list[dict[str, Any]]:
    if "messages" in body:
        return [dict(canonical(message)) for message in body["messages"]]
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return [*system, *(dict(said.message) for said in read_items(body["input"]))]


class Serving:
    """An ASGI application on a free port of loopback, in a thread."""

    def __init__(self, app: Any) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))

    def __enter__(self) -> Serving:
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)
