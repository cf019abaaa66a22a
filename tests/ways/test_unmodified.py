"""Other people's clients, unmodified, run a tool-using task through `caddie proxy` to its end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from upstream import Upstream

from caddie_sdk.testing import calls, tool_call

set_tracing_disabled(True)

CADDIE = Path(sys.prefix) / "bin" / "caddie"
TASK = "Where is order 7?"
ADVICE = "Look the order up before you answer."
ANSWER = "Order 7 is on its way."
FOUND = "shipped on Monday"
SCRIPT = [
    calls(tool_call("call_critic", id="c1")),
    calls(tool_call("look_up", {"order": "7"}, "c2"), tool_call("call_critic", id="c3")),
    ANSWER,
]


def look_up(order: str) -> str:
    """Look an order up.

    Args:
        order: its number.
    """
    return FOUND


SCHEMA = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look an order up.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}


@contextmanager
def proxy(upstream: Upstream, critic: Upstream) -> Iterator[str]:
    command = [CADDIE, "proxy", "--upstream", upstream.url, "--critic", critic.url, "--pack", "support"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        assert process.wait(20) == 0


# ------------------------------------------------------------------ the clients


def official(url: str, stream: bool) -> str:
    client, messages = OpenAI(base_url=url, api_key="k"), [{"role": "user", "content": TASK}]
    while True:
        if stream:
            with client.chat.completions.stream(model="scripted", messages=messages, tools=[SCHEMA]) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = (
                client.chat.completions.create(model="scripted", messages=messages, tools=[SCHEMA]).choices[0].message
            )
        if not message.tool_calls:
            return message.content or ""
        asked = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in message.tool_calls
        ]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": asked})
        for call in message.tool_calls:
            found = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


def langchain(url: str, stream: bool) -> str:
    agent = create_agent(ChatOpenAI(base_url=url, model="scripted", api_key="k", streaming=stream), [look_up])
    said = {"messages": [("user", TASK)]}
    if not stream:
        return str(agent.invoke(said)["messages"][-1].content)
    pieces = [
        str(message.content)
        for message, where in agent.stream(said, stream_mode="messages")
        if where["langgraph_node"] == "model"
    ]
    assert len([piece for piece in pieces if piece]) > 1, "the text did not come in pieces"
    return "".join(pieces)


def agents_sdk(kind: Any) -> Callable[[str, bool], str]:
    async def run(url: str, stream: bool) -> str:
        model = kind(model="scripted", openai_client=AsyncOpenAI(base_url=url, api_key="k"))
        agent = Agent(name="shop", model=model, tools=[function_tool(look_up)])
        if not stream:
            return str((await Runner.run(agent, TASK)).final_output)
        running = Runner.run_streamed(agent, TASK)
        kinds = [event.type async for event in running.stream_events()]
        assert kinds.count("raw_response_event") > 5
        return str(running.final_output)

    return lambda url, stream: asyncio.run(run(url, stream))


CLIENTS: dict[str, Callable[[str, bool], str]] = {
    "openai": official,
    "langchain": langchain,
    "agents, chat": agents_sdk(OpenAIChatCompletionsModel),
    "agents, responses": agents_sdk(OpenAIResponsesModel),
}


# ------------------------------------------------------------------ the test


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
def test_task_is_done_with_advice(client: str, stream: bool) -> None:
    critique = f"Analysis: Nothing is known yet.\nAdvices for next steps: {ADVICE}"
    with Upstream(SCRIPT, strict=True) as upstream, Upstream([critique, critique]) as critic:
        with proxy(upstream, critic) as url:
            assert CLIENTS[client](url, stream) == ANSWER
        upstream.raise_if_unused()
        critic.raise_if_unused()
    asked = [request for request in upstream.requests if request.path in ("/v1/chat/completions", "/v1/responses")]
    assert [bool(request.body.get("stream")) for request in asked] == [stream] * 3
    seen = [json.dumps(request.body) for request in asked]
    assert [text.count(ADVICE) for text in seen] == [0, 1, 2]
    assert [text.count(FOUND) for text in seen] == [0, 0, 1]
    assert all(request.headers["authorization"] == "Bearer k" for request in asked)
    assert "Bearer k" not in json.dumps([request.headers for request in critic.requests])
