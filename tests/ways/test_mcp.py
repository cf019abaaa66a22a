"""The MCP server and `caddie mcp`, with the real client of the mcp package over pipes and over HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import Client, StdioServerParameters
from upstream import Scripted, Upstream, failure

from caddie_sdk import Budget, Critique
from caddie_sdk.errors import ConfigError, MessageError
from caddie_sdk.relay.advise import advise, consult_state
from caddie_sdk.shells.mcp import make_server
from caddie_sdk.testing import ScriptedCritic, calls, tool_call

Start = Callable[..., Upstream]
CADDIE = str(Path(sys.executable).parent / "caddie")
GOOD = "Analysis: The builder is known.\nAdvices for next steps: Answer with the name."
TASK = {"role": "user", "content": "Who built it?"}
LOOK = calls(tool_call("search", {"query": "it"}, "c1"))
FOUND = {"role": "tool", "tool_call_id": "c1", "content": "Piet built it."}
ASK = calls(tool_call("call_critic", id="c2"))
TOOL = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": {"type": "object"}}}
DEAD = "http://127.0.0.1:9"


def shown(body: dict[str, Any]) -> str:
    """All that a critic's model was sent."""
    return "\n".join(str(message["content"]) for message in body["messages"])


def stdio(*words: str) -> StdioServerParameters:
    return StdioServerParameters(command=CADDIE, args=["mcp", *words])


@contextmanager
def running(*words: str) -> Iterator[str]:
    """A `caddie` server; its URL."""
    process = subprocess.Popen([CADDIE, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.startswith("http://127.0.0.1:"), line
        yield line
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
        assert process.stdout is not None
        process.stdout.close()


def text_of(result: Any) -> str:
    assert len(result.content) == 1
    return str(result.content[0].text)


# ---------------------------------------------------------------------- over pipes and HTTP


async def test_stdio(upstreams: Start) -> None:
    critic = upstreams(lambda body: GOOD)
    async with Client(stdio("--critic", critic.url)) as client:
        (tool,) = (await client.list_tools()).tools
        assert tool.name == "call_critic"
        types = {name: schema["type"] for name, schema in tool.input_schema["properties"].items()}
        assert types == {"messages": "array", "tools": "array", "session_id": "string"}
        assert set(tool.output_schema["properties"]) == {"status", "analysis", "advice", "detail", "seconds"}
        result = await client.call_tool("call_critic", {"messages": [TASK, LOOK, FOUND], "tools": [TOOL]})
    assert not result.is_error
    assert text_of(result) == GOOD
    assert result.structured_content["status"] == "ok"
    assert result.structured_content["analysis"] == "The builder is known."
    assert result.structured_content["advice"] == "Answer with the name."
    assert result.structured_content["seconds"] > 0
    told = shown(critic.chats[0])
    assert all(words in told for words in ("Who built it?", "Piet built it.", "search"))


async def test_http_and_twenty_at_once(upstreams: Start) -> None:
    async def play(body: dict[str, Any]) -> str:
        await asyncio.sleep(0.2)
        topic = shown(body).split("topic ")[1].split("!")[0]
        return f"Analysis: about {topic}.\nAdvices for next steps: answer {topic}."

    critic = upstreams(play)
    with running("mcp", "--transport", "http", "--critic", critic.url) as url:
        async with Client(url) as client:
            asked = [[{"role": "user", "content": f"topic {n}!"}] for n in range(20)]
            results = await asyncio.gather(*(client.call_tool("call_critic", {"messages": each}) for each in asked))
    assert [result.structured_content["advice"] for result in results] == [f"answer {n}." for n in range(20)]
    assert critic.peak >= 10


async def test_dead_critic_is_a_status_and_may_come_back(upstreams: Start) -> None:
    asked = {"messages": [TASK]}
    async with Client(stdio("--critic", DEAD, "--timeout", "5")) as client:
        for _ in range(2):
            result = await client.call_tool("call_critic", asked)
            assert not result.is_error
            assert result.structured_content["status"] == "unavailable"
            assert "no advice this time (unavailable" in text_of(result)
    # Down at the start, there for the second call.
    with Upstream(lambda body: GOOD) as first:
        port = first.url.split(":")[2].split("/")[0]
    async with Client(stdio("--critic", f"http://127.0.0.1:{port}")) as client:
        before = await client.call_tool("call_critic", asked)
        server = subprocess.Popen([sys.executable, str(Path(__file__).parents[1] / "cli" / "openai_server.py"), port])
        try:
            for _ in range(100):
                after = await client.call_tool("call_critic", asked)
                if after.structured_content["status"] == "ok":
                    break
                await asyncio.sleep(0.1)
        finally:
            server.terminate()
            server.wait(10)
    assert [before.structured_content["status"], after.structured_content["status"]] == ["unavailable", "ok"]


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (failure(500), "unavailable"),
        (failure(401), "refused"),
        ("I like it.", "malformed"),
        (Scripted(GOOD, stall=5), "timeout"),
    ],
)
async def test_failing_critic_is_a_status(upstreams: Start, said: Any, status: str) -> None:
    critic = upstreams(lambda body: said)
    async with Client(stdio("--critic", critic.url, "--timeout", "1.5")) as client:
        result = await client.call_tool("call_critic", {"messages": [TASK]})
    assert not result.is_error
    assert result.structured_content["status"] == status
    assert result.structured_content["advice"] == ""


# ---------------------------------------------------------------------- beside a proxy


async def test_session_of_a_proxy(upstreams: Start) -> None:
    model, critic = upstreams(["Piet, I think."]), upstreams(lambda body: GOOD)
    with running("proxy", "--upstream", model.url, "--critic", critic.url) as proxy:
        async with httpx.AsyncClient() as http:
            body = {"model": "m", "messages": [TASK], "caddie": {"session": "chat-7"}}
            answer = await http.post(f"{proxy}/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "Piet, I think."
        async with Client(stdio("--proxy", proxy)) as client:
            known = await client.call_tool("call_critic", {"session_id": "chat-7"})
            unknown = await client.call_tool("call_critic", {"session_id": "chat-8"})
            given = await client.call_tool("call_critic", {"messages": [TASK], "tools": [TOOL]})
    assert text_of(known) == text_of(given) == GOOD
    assert "Piet, I think." in shown(critic.chats[0])
    assert unknown.is_error
    assert "chat-8" in text_of(unknown)
    assert "\n" not in text_of(unknown)


async def test_proxy_that_is_down_or_odd(upstreams: Start) -> None:
    async with Client(make_server(proxy=DEAD)) as client:
        result = await client.call_tool("call_critic", {"session_id": "chat-7"})
    assert (result.is_error, result.structured_content["status"]) == (False, "unavailable")
    for status, body in ((200, "no json"), (500, "{}"), (200, "[]")):

        def odd(request: httpx.Request, status: int = status, body: str = body) -> httpx.Response:
            return httpx.Response(status, text=body)

        server = make_server(proxy="http://proxy/v1", api_key="k", transport=httpx.MockTransport(odd))
        async with Client(server) as client:
            result = await client.call_tool("call_critic", {"session_id": "chat-7"})
        assert (result.is_error, result.structured_content["status"]) == (False, "unavailable")


# ---------------------------------------------------------------------- what a caller gets wrong


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "give either messages"),
        ({"messages": [TASK], "session_id": "7"}, "give either messages"),
        ({"session_id": "7"}, "started without --proxy"),
        ({"session_id": 7}, "session_id must be a text"),
        ({"messages": []}, "not empty"),
        ({"messages": {"role": "user"}}, "must be a list"),
        ({"messages": 7}, "must be a list"),
        ({"messages": [TASK], "tools": "search"}, "tools must be a list"),
        ({"messages": ["hi"]}, "message 0 is a str"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "wizard"),
        ({"messages": [{"role": "system", "content": "hi"}]}, "no user message"),
        ({"messages": [TASK, LOOK, TASK]}, "'c1' of 'search' has no result"),
        ({"messages": [TASK, FOUND]}, "no open call 'c1'"),
        ({"messages": [TASK], "tools": [TOOL, TOOL]}, "'search' is used twice"),
        ({"messages": [LOOK, {"type": "reasoning", "summary": []}]}, "send one form"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "more than the 2,000 allowed"),
        ({"messages": [TASK], "tools": [{"x": "x" * 3000}]}, "more than the 2,000 allowed"),
    ],
)
async def test_bad_input_is_one_line(asked: dict[str, Any], said: str) -> None:
    critic = ScriptedCritic([])
    async with Client(make_server(critic, max_bytes=2000)) as client:
        result = await client.call_tool("call_critic", asked)
    assert result.is_error
    assert said in text_of(result)
    assert "\n" not in text_of(result)
    assert not critic.seen


async def test_oversized_request_over_http(upstreams: Start) -> None:
    critic = upstreams(lambda body: GOOD)
    with running("mcp", "--transport", "http", "--critic", critic.url, "--max-body-mb", "1") as url:
        async with httpx.AsyncClient() as http:
            answer = await http.post(url, content=b"x" * 2**21, headers={"content-type": "application/json"})
        async with Client(url) as client:
            result = await client.call_tool(
                "call_critic", {"messages": [{"role": "user", "content": "x" * (2**20 + 9)}]}
            )
    assert answer.status_code == 413
    assert result.is_error
    assert "allowed here" in text_of(result)
    assert not critic.chats


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--critic", "nonsense"], "--critic nonsense"),
        (["--critic", "self"], "--critic self"),
        (["--critic", "off"], "needs a critic"),
        (["--transport", "pigeon"], "--transport pigeon"),
        (["--proxy", "ftp://x"], "http:// or https://"),
        (["--proxy", DEAD, "--proxy-key-env", "NO_SUCH"], "NO_SUCH"),
    ],
)
def test_wrong_options(words: list[str], said: str) -> None:
    ran = subprocess.run([CADDIE, "mcp", *words], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert said in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_wrong_settings() -> None:
    for wrong in (
        make_server,
        lambda: make_server(ScriptedCritic),  # type: ignore[arg-type]
        lambda: make_server(ScriptedCritic([]), max_bytes=0),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_missing_package_is_named() -> None:
    code = (
        "import sys; sys.modules['mcp.server'] = None\n"
        "from caddie_sdk.errors import MissingExtra\n"
        "try:\n    import caddie_sdk.shells.mcp\n"
        "except MissingExtra as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'caddie-sdk[mcp]'" in ran.stdout


# ---------------------------------------------------------------------- what the critic is shown


def kinds(messages: list[Any], **more: Any) -> list[str]:
    state = consult_state(messages, [TOOL], **more)
    assert state is not None
    return [event.kind for event in state.events]


ANSWER = {"role": "assistant", "content": "Piet."}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([TASK], ["task"]),
        ([TASK, LOOK, FOUND], ["task", "step"]),
        ([TASK, LOOK, FOUND, ANSWER], ["task", "step", "answer"]),
        ([TASK, ANSWER, TASK], ["task", "answer", "user"]),
        ([TASK, LOOK, FOUND, ASK], ["task", "step", "proposal"]),
        ([TASK, calls(*ASK["tool_calls"], *LOOK["tool_calls"])], ["task", "proposal"]),
        ([TASK, calls(*ASK["tool_calls"], *LOOK["tool_calls"]), FOUND], ["task", "proposal"]),
        ([TASK, LOOK], ["task", "step"]),
        (
            [{"role": "system", "content": "Be careful."}, TASK, ANSWER, {"role": "system", "content": "Hm."}],
            ["task", "answer"],
        ),
    ],
)
def test_ends_of_a_history(messages: list[Any], expected: list[str]) -> None:
    assert kinds(messages) == expected


def test_items_tell_the_same_as_messages() -> None:
    items = [
        TASK,
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": '{"query": "it"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Piet built it."},
        {"type": "function_call", "call_id": "c2", "name": "call_critic", "arguments": "{}"},
    ]
    flat = {"type": "function", "name": "search", "description": "Search.", "parameters": {"type": "object"}}
    chat = consult_state([TASK, LOOK, FOUND, ASK], [TOOL])
    assert chat is not None
    assert consult_state(items, [flat]) == chat
    assert consult_state([*items[:2], *items[2:]], [flat, {**flat, "name": "call_critic"}]) == chat
    assert chat.step == 1
    assert chat.events[1].observations == ("Piet built it.",)


async def test_earlier_advice_counts_and_is_seen() -> None:
    """A framework that runs `call_critic` itself sends back what the tool said."""
    told = {"role": "tool", "tool_call_id": "c2", "content": GOOD}
    before = [TASK, ASK, told]
    again = calls(tool_call("call_critic", id="c3"))
    state = consult_state([*before, again], [], budget=Budget(max_uses=2))
    assert state is not None
    assert [event.kind for event in state.events] == ["task", "proposal", "advice", "proposal"]
    assert "Answer with the name." in state.events[2].text
    assert state.remaining == 0
    critic = ScriptedCritic([])
    spent = await advise([*before, again], [], {"call_critic": critic}, budget=Budget(max_uses=1))
    assert (spent.status, len(critic.seen)) == ("over_budget", 0)
    # Words that are no critique are no use of one.
    refused = {**told, "content": "There is no advice this time (timeout)."}
    other = consult_state([TASK, ASK, refused, again], [], budget=Budget(max_uses=1))
    assert other is not None
    assert [event.kind for event in other.events] == ["task", "proposal", "proposal"]


async def test_limits_of_an_agent_do_not_matter() -> None:
    critic = ScriptedCritic([("a", "b")])
    budget = Budget(max_steps=1, min_steps=1, max_tokens=99)
    got = await advise([TASK, LOOK, FOUND, ANSWER, TASK, ANSWER, TASK], [TOOL], {"call_critic": critic}, budget=budget)
    assert (got.status, got.advice) == ("ok", "b")
    assert critic.seen[0].max_tokens == 99


async def test_critic_behind_another_control_and_none() -> None:
    feedback = ScriptedCritic([Critique("", "well done")])
    both = {"call_critic": ScriptedCritic([]), "request_feedback": feedback}
    turn = calls(tool_call("call_critic", id="a"), tool_call("request_feedback", id="b"))
    assert (await advise([TASK, turn], [], both, control="request_feedback")).advice == "well done"
    assert feedback.seen[0].control == "request_feedback"
    with pytest.raises(ConfigError, match="no critic behind 'nobody'"):
        await advise([TASK], [], both, control="nobody")


async def test_critic_that_raises_is_a_status_and_bad_history_an_error() -> None:
    broken = ScriptedCritic(lambda state: RuntimeError("bug"))
    assert (await advise([TASK], [], {"call_critic": broken})).status == "failed"
    for bad in ([], "", {}, [None], [{"role": "tool", "tool_call_id": "x", "content": "y"}], [{"content": "no role"}]):
        with pytest.raises(MessageError) as caught:
            await advise(bad, [], {"call_critic": broken})  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    with pytest.raises(MessageError, match="tools must be a list"):
        await advise([TASK], "search", {"call_critic": broken})


async def test_question_as_a_text_is_a_conversation() -> None:
    critic = ScriptedCritic([("a", "b")])
    assert (await advise("Who built it?", [], {"call_critic": critic})).ok
    assert json.dumps(critic.seen[0].dump())
