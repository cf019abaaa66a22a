"""`attach`: agents of the OpenAI Agents SDK against a scripted server, with real runs, sessions and streams."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from agents import (
    Agent,
    AgentHooks,
    MaxTurnsExceeded,
    ModelProvider,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunState,
    SQLiteSession,
    TracingProcessor,
    function_tool,
    set_trace_processors,
    set_tracing_disabled,
)
from agents.models.interface import Model
from openai import AsyncOpenAI
from pydantic import BaseModel
from upstream import Scripted, Upstream, failure

from caddie_sdk import Budget, Critique
from caddie_sdk.errors import ConfigError, ConsultationError
from caddie_sdk.relay.ledger import MemoryLedger
from caddie_sdk.shells.openai_agents import CriticModel, attach
from caddie_sdk.testing import ScriptedCritic, calls, tool_call

Start = Callable[..., Upstream]
ASK, LOOK, PAY = calls(tool_call("call_critic")), calls(tool_call("search", {"query": "Ada"})), None
PAY = calls(tool_call("refund", {"order": "7"}))


@pytest.fixture(autouse=True)
def untraced() -> None:
    set_tracing_disabled(True)


@function_tool
def search(query: str) -> str:
    """Search the archive."""
    return f"found: {query}"


@function_tool
def refund(order: str) -> str:
    """Pay an order back."""
    return f"refunded {order}"


def model_of(upstream: Upstream, *, chat: bool = False) -> Model:
    client = AsyncOpenAI(base_url=upstream.url, api_key="k", max_retries=0)
    return OpenAIChatCompletionsModel("m", client) if chat else OpenAIResponsesModel("m", client)


def agent_of(upstream: Upstream, *, chat: bool = False, **settings: Any) -> Agent[Any]:
    given: dict[str, Any] = {"instructions": "Be careful.", "tools": [search, refund], **settings}
    return Agent("agent", model=model_of(upstream, chat=chat), **given)


def critic(advice: str = "go on") -> ScriptedCritic:
    return ScriptedCritic(lambda state: (f"step {state.step}, {state.trigger}", advice))


def outputs(body: dict[str, Any]) -> list[str]:
    """The tool results in a request's input."""
    return [item["output"] for item in body["input"] if item.get("type") == "function_call_output"]


def names(body: dict[str, Any]) -> list[str]:
    return [tool["name"] for tool in body.get("tools", ())]


# ---------------------------------------------------------------------- what the SDK sees


@pytest.mark.parametrize("chat", [False, True])
async def test_advice_reaches_the_model_and_nothing_else(upstreams: Start, chat: bool) -> None:
    upstream, asked = upstreams([LOOK, ASK, "Paris"], strict=True), critic()
    agent = attach(agent_of(upstream, chat=chat), asked)
    result = await Runner.run(agent, "Where was Ada born?", max_turns=2)
    assert result.final_output == "Paris"
    assert [item.type for item in result.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]
    assert "advice" not in json.dumps(result.to_input_list()).lower()
    assert "Critic feedback:\\nAnalysis: step 1, self-call" in json.dumps(upstream.requests[-1].body)
    assert result.context_wrapper.usage.requests == 3
    assert result.context_wrapper.usage.input_tokens == 300
    assert [event.kind for event in asked.seen[0].events] == ["task", "step", "proposal"]
    assert asked.seen[0].system == "Be careful."
    assert [tool["function"]["name"] for tool in asked.seen[0].tools] == ["search", "refund"]


async def test_consultations_take_no_turns(upstreams: Start) -> None:
    upstream = upstreams([ASK, ASK, ASK, "Paris"])
    result = await Runner.run(attach(agent_of(upstream), critic()), "Where?", max_turns=1)
    assert result.final_output == "Paris"
    with pytest.raises(MaxTurnsExceeded):
        await Runner.run(attach(agent_of(upstreams([LOOK, "Paris"])), critic()), "Where?", max_turns=1)


async def test_tool_use_behavior_means_what_it_meant(upstreams: Start) -> None:
    upstream = upstreams([ASK, LOOK])
    agent = attach(agent_of(upstream, tool_use_behavior="stop_on_first_tool"), critic())
    assert (await Runner.run(agent, "Where?")).final_output == "found: Ada"


async def test_tool_is_withdrawn_and_forced_choices_are_kept(upstreams: Start) -> None:
    upstream = upstreams([ASK, LOOK, "Paris", LOOK, "Rome"])
    agent = agent_of(upstream)
    await Runner.run(attach(agent, critic(), budget=Budget(max_uses=1)), "Where?")
    offered = [names(request.body)[2:] for request in upstream.requests]
    assert offered == [["call_critic"], [], []]
    forced = agent.clone(model_settings=ModelSettings(tool_choice="search"))
    await Runner.run(attach(forced, critic()), "Where?")
    first, second = (request.body for request in upstream.requests[-2:])
    assert (names(first), first["tool_choice"]["name"]) == (["search", "refund"], "search")
    assert names(second)[-1] == "call_critic"  # the SDK resets the choice after its use


async def test_hooks_see_what_they_saw(upstreams: Start) -> None:
    seen: list[str] = []

    class Hooks(AgentHooks[Any]):
        async def on_llm_start(self, context: Any, agent: Any, system_prompt: Any, input_items: Any) -> None:
            seen.append(f"start {len(input_items)}")

        async def on_llm_end(self, context: Any, agent: Any, response: Any) -> None:
            seen.append(f"end {[item.type for item in response.output]}")

        async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
            seen.append(tool.name)

    upstream = upstreams([ASK, calls(tool_call("call_critic"), LOOK["tool_calls"][0]), "Paris"])
    await Runner.run(attach(agent_of(upstream, hooks=Hooks()), critic()), "Where?")
    assert seen == ["start 1", "end ['function_call']", "search", "start 3", "end ['message']"]


async def test_text_on_the_way_is_an_item_and_structured_output_stays_whole(upstreams: Start) -> None:
    class Town(BaseModel):
        town: str

    thought = {**ASK, "content": "Let me ask."}
    upstream = upstreams([thought, "Paris", *[thought, '{"town": "Paris"}'] * 2])
    agent = agent_of(upstream)
    result = await Runner.run(attach(agent, critic()), "Where?")
    assert [item.raw_item.content[0].text for item in result.new_items] == ["Let me ask.", "Paris"]
    assert result.final_output == "Paris"
    typed = attach(agent.clone(output_type=Town), critic())
    whole = await Runner.run(typed, "Where?")
    streamed = Runner.run_streamed(typed, "Where?")
    raw = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
    for done in (whole, streamed):
        assert done.final_output == Town(town="Paris")
        assert len(done.new_items) == 1
    text = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
    assert text == '{"town": "Paris"}'


# ---------------------------------------------------------------------- protocols


async def test_guarded_call_waits_for_advice(upstreams: Start) -> None:
    upstream = upstreams([PAY, PAY, "Done"], strict=True)
    result = await Runner.run(attach(agent_of(upstream), critic(), protocol="guarded:refund"), "Pay 7 back")
    ran = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert ran == ["refunded 7"]
    assert outputs(upstream.requests[1].body)[0].startswith("Not run yet")
    assert "step 0, guarded" in outputs(upstream.requests[1].body)[1]


async def test_forced_advice_is_asked_once_and_stays(upstreams: Start) -> None:
    upstream, asked = upstreams([LOOK, LOOK, "Paris"], strict=True), critic()
    await Runner.run(attach(agent_of(upstream), asked, protocol="fixed:1"), "Where?")
    assert [state.step for state in asked.seen] == [1]
    assert [len(outputs(request.body)) for request in upstream.requests] == [0, 2, 3]
    assert all("call_critic" not in names(request.body) for request in upstream.requests)


async def test_approval_and_resume_from_json(upstreams: Start) -> None:
    """A run that waits for a human, goes through JSON and comes back, with the advice still in place."""

    @function_tool(name_override="refund", needs_approval=True)
    def pay(order: str) -> str:
        """Pay an order back."""
        return f"refunded {order}"

    upstream, asked = upstreams([PAY, PAY, "Done"], strict=True), critic()
    agent = attach(agent_of(upstream, tools=[pay]), asked, protocol="guarded:refund")
    paused = await Runner.run(agent, "Pay 7 back")
    assert [item.name for item in paused.interruptions] == ["refund"]
    state = await RunState.from_json(agent, json.loads(json.dumps(paused.to_state().to_json())))
    state.approve(state.get_interruptions()[0])
    result = await Runner.run(agent, state)
    assert result.final_output == "Done"
    assert len(asked.seen) == 1
    found = outputs(upstream.requests[-1].body)
    assert found[0].startswith("Not run yet")
    assert "step 0, guarded" in found[1]
    assert found[2] == "refunded 7"


async def test_guarded_handoff(upstreams: Start) -> None:
    over = calls(tool_call("transfer_to_second"))
    upstream = upstreams([over, over, "Hello"], strict=True)
    second = Agent("second", model=model_of(upstream))
    agent = attach(agent_of(upstream, handoffs=[second]), critic(), protocol="guarded:transfer_to_second")
    assert (await Runner.run(agent, "Let me talk to somebody")).last_agent is second
    assert outputs(upstream.requests[1].body)[0].startswith("Not run yet")


def test_run_sync(upstreams: Start) -> None:
    agent = attach(agent_of(upstreams([ASK, "Paris", ASK, "Rome"])), critic())
    assert [Runner.run_sync(agent, said).final_output for said in ("Ada?", "Bob?")] == ["Paris", "Rome"]


async def test_trace_names_the_consultation_and_tells_nothing_of_it(upstreams: Start) -> None:
    seen: list[Any] = []

    class Processor(TracingProcessor):
        def on_trace_start(self, trace: Any) -> None: ...

        def on_trace_end(self, trace: Any) -> None: ...

        def on_span_start(self, span: Any) -> None: ...

        def on_span_end(self, span: Any) -> None:
            seen.append(span.export()["span_data"])

        def shutdown(self) -> None: ...

        def force_flush(self) -> None: ...

    set_tracing_disabled(False)
    set_trace_processors([Processor()])
    try:
        await Runner.run(attach(agent_of(upstreams([ASK, "Paris"])), critic("secret advice")), "Where?")
    finally:
        set_trace_processors([])
        set_tracing_disabled(True)
    (span,) = [data for data in seen if data.get("name") == "caddie.call_critic"]
    assert span["data"] == {"trigger": "self-call", "step": 0, "status": "ok"}


# ---------------------------------------------------------------------- whose history is whose


async def test_concurrent_runs_of_one_agent(upstreams: Start) -> None:
    def play(body: dict[str, Any]) -> Any:
        topic, found = body["input"][0]["content"], outputs(body)
        if not found:
            return calls(tool_call("call_critic"), tool_call("search", {"query": topic}))
        return ASK if len(found) == 2 else f"answer {topic}"

    upstream = upstreams(play, strict=True)
    asked = ScriptedCritic(lambda state: ("on", f"advice for {state.events[0].text}"))
    agent = attach(agent_of(upstream), asked)
    results = await asyncio.gather(*(Runner.run(agent, f"topic {n}") for n in range(20)))
    assert [result.final_output for result in results] == [f"answer topic {n}" for n in range(20)]
    assert len(asked.seen) == 40
    for request in upstream.requests:
        topic = request.body["input"][0]["content"]
        for told in outputs(request.body):
            assert told == f"found: {topic}" or f"advice for {topic}\n" in told


@pytest.mark.parametrize("shared", [True, False])
async def test_handoff(upstreams: Start, shared: bool) -> None:
    """The second agent's critic reads all that was seen; with a ledger in common its model sees the advice, too."""
    look = calls(tool_call("search", {"query": "Ada"}, "call_" + uuid4().hex))
    over = calls(tool_call("transfer_to_second"))
    upstream = upstreams([ASK, look, over, ASK, "Paris"], strict=True)
    ledger = MemoryLedger()
    first_critic, second_critic = critic("first advice"), critic("second advice")
    kept = {"ledger": ledger} if shared else {}
    second = attach(Agent("second", model=model_of(upstream), tools=[search]), second_critic, **kept)
    first = attach(agent_of(upstream, handoffs=[second]), first_critic, **kept)
    result = await Runner.run(first, "Where?")
    assert (result.final_output, result.last_agent.name) == ("Paris", "second")
    assert [len(first_critic.seen), len(second_critic.seen)] == [1, 1]
    names_shown = [tool["function"]["name"] for tool in first_critic.seen[0].tools]
    assert names_shown == ["search", "refund", "transfer_to_second"]
    last = "\n".join(outputs(upstream.requests[-1].body))
    assert "found: Ada" in last
    assert "second advice" in last
    assert ("first advice" in last) is shared
    assert second_critic.seen[0].remaining == (1 if shared else 2)


async def test_handoff_to_an_agent_without_a_critic(upstreams: Start) -> None:
    upstream = upstreams([ASK, calls(tool_call("transfer_to_plain")), "Paris"], strict=True)
    first = attach(agent_of(upstream, handoffs=[Agent("plain", model=model_of(upstream))]), critic())
    assert (await Runner.run(first, "Where?")).final_output == "Paris"
    assert "call_critic" not in json.dumps(upstream.requests[-1].body)


async def test_agent_as_tool_has_a_trajectory_of_its_own(upstreams: Start) -> None:
    upstream = upstreams(
        [ASK, calls(tool_call("expert", {"input": "Ada?"})), ASK, "Paris", ASK, "It is Paris"], strict=True
    )
    inner_critic, outer_critic = critic("inner"), critic("outer")
    inner = attach(Agent("inner", model=model_of(upstream)), inner_critic)
    outer = attach(agent_of(upstream, tools=[inner.as_tool("expert", "Knows.")]), outer_critic)
    assert (await Runner.run(outer, "Where?")).final_output == "It is Paris"
    assert [[event.kind for event in state.events] for state in outer_critic.seen] == [
        ["task", "proposal"], ["task", "proposal", "advice", "step", "proposal"]
    ]  # fmt: skip
    assert [state.events[0].text for state in inner_critic.seen] == ["Ada?"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_session_over_several_runs(upstreams: Start, tmp_path: Path, streamed: bool) -> None:
    upstream, asked = upstreams([ASK, LOOK, "Paris", ASK, "Rome", "Oslo"], strict=True), critic()
    session = SQLiteSession("7", tmp_path / "chat.db")

    async def run(agent: Agent[Any], said: str) -> Any:
        if not streamed:
            return (await Runner.run(agent, said, session=session)).final_output
        result = Runner.run_streamed(agent, said, session=session)
        async for _ in result.stream_events():
            pass
        return result.final_output

    agent = attach(agent_of(upstream), asked, ledger=tmp_path / "ledger.db")
    assert await run(agent, "And Ada?") == "Paris"
    assert await run(agent, "And Bob?") == "Rome"
    # Another process: nothing but the two files is left.
    again = attach(agent_of(upstream), asked, ledger=tmp_path / "ledger.db")
    assert await run(again, "And Eve?") == "Oslo"
    told = outputs(upstream.requests[-1].body)
    assert ["Critic feedback" in text for text in told] == [True, False, True]
    assert "call_critic" not in json.dumps(await session.get_items())
    assert [state.remaining for state in asked.seen] == [2, 2]


async def test_instructions_that_change_lose_nothing(upstreams: Start) -> None:
    clock = iter(range(100))
    look = calls(tool_call("search", {"query": "Ada"}, "call_" + uuid4().hex))
    upstream, asked = upstreams([ASK, look, ASK, "Paris"], strict=True), critic()
    agent = agent_of(upstream, instructions=lambda context, agent: f"It is {next(clock)} o'clock.")
    await Runner.run(attach(agent, asked), "Where?")
    assert [request.body["instructions"][6] for request in upstream.requests] == ["0", "0", "1", "1"]
    assert [state.system for state in asked.seen] == ["It is 0 o'clock.", "It is 1 o'clock."]
    assert ["Critic feedback" in text for text in outputs(upstream.requests[-1].body)] == [True, False, True]


async def test_same_words_under_other_instructions_share_no_advice(upstreams: Start) -> None:
    """Two customers who say the same, and hear the same, have instructions of their own that a critic has read."""
    upstream = upstreams([ASK, "Hello!", ASK, "Hello!", *["Bye!"] * 2, ASK, failure(500), "Hello!"], strict=True)
    asked = ScriptedCritic(lambda state: ("read", state.system))
    agent = attach(agent_of(upstream, instructions=lambda context, agent: f"The customer is {context.context}."), asked)
    said: list[Any] = [{"role": "user", "content": "Hi"}]
    for customer in ("Ada", "Bob"):
        told = (await Runner.run(agent, said, context=customer)).to_input_list()
    for customer in ("Ada", "Bob"):
        await Runner.run(agent, [*told, *said], context=customer)
        body = upstream.requests[-1].body
        assert [f"The customer is {customer}." in text for text in outputs(body)] == [True]
    with pytest.raises(Exception, match="scripted failure"):
        await Runner.run(agent, "Hello?", context="Ada")
    await Runner.run(agent, "Hello?", context="Bob")
    assert outputs(upstream.requests[-1].body) == []


async def test_history_that_the_server_keeps(upstreams: Start) -> None:
    upstream, asked = (
        upstreams([calls(tool_call("call_critic"), *LOOK["tool_calls"]), ASK, "Paris", "Rome"], strict=True),
        critic(),
    )
    agent = attach(agent_of(upstream), asked)
    first = await Runner.run(agent, "And Ada?", auto_previous_response_id=True)
    assert first.final_output == "Paris"
    await Runner.run(agent, "And Bob?", previous_response_id=first.last_response_id)
    assert len(upstream.requests[1].body["input"]) == 2  # the results of both calls, and nothing that is known there
    whole = [item.get("output") for item in upstream.requests[-1].items if item.get("type") == "function_call_output"]
    assert ["Critic feedback" in text for text in whole] == [True, False, True]
    kinds = [event.kind for event in asked.seen[1].events]
    assert kinds == ["task", "proposal", "advice", "outcome", "proposal"]


async def test_run_that_continues_the_last_response_of_another(upstreams: Start) -> None:
    upstream, asked = upstreams([ASK, LOOK, "Paris", ASK, "Rome"], strict=True), critic()
    agent = attach(agent_of(upstream), asked)
    first = await Runner.run(agent, "And Ada?")
    second = await Runner.run(agent, "And Bob?", previous_response_id=first.last_response_id)
    assert second.final_output == "Rome"
    assert [len(request.body["input"]) for request in upstream.requests[3:]] == [1, 1]
    expected = ["task", "proposal", "advice", "step", "answer", "user", "proposal"]
    assert [event.kind for event in asked.seen[1].events] == expected


async def test_conversation_that_the_server_keeps(upstreams: Start) -> None:
    upstream, asked = upstreams([ASK, LOOK, "Paris", ASK, "Rome"]), critic()
    agent = attach(agent_of(upstream), asked)
    for said in ("And Ada?", "And Bob?"):
        await Runner.run(agent, said, conversation_id="conv_1")
    sent = [
        [item.get("content") or item["output"][:15] for item in request.body["input"]] for request in upstream.requests
    ]
    assert sent == [["And Ada?"], ["Critic feedback"], ["found: Ada"], ["And Bob?"], ["Critic feedback"]]
    assert all(request.body["conversation"] == "conv_1" for request in upstream.requests)
    expected = ["task", "proposal", "advice", "step", "answer", "user", "proposal"]
    assert [event.kind for event in asked.seen[1].events] == expected


@pytest.mark.parametrize("store", [False, None])
async def test_reasoning_of_a_hidden_turn(upstreams: Start, store: bool | None) -> None:
    upstream = upstreams([{**ASK, "reasoning_content": "hm"}, "Paris"])
    agent = agent_of(upstream, model_settings=ModelSettings(store=store))
    await Runner.run(attach(agent, critic()), "Where?")
    sent = [item.get("type", "message") for item in upstream.requests[1].body["input"]]
    told = ["function_call", "function_call_output"]
    assert sent == (["message", *told] if store is False else ["message", "reasoning", *told])


async def test_unknown_history_of_the_server_passes(upstreams: Start) -> None:
    upstream = upstreams(["Paris", "Rome"])
    first = await Runner.run(agent_of(upstream), "And Ada?")
    agent = attach(agent_of(upstream), critic())
    result = await Runner.run(agent, "And Bob?", previous_response_id=first.last_response_id)
    assert result.final_output == "Rome"
    assert names(upstream.requests[-1].body) == ["search", "refund"]


# ---------------------------------------------------------------------- other models


async def test_model_of_the_run_takes_the_agents_place(upstreams: Start) -> None:
    """Without a critic of its own it sees the SDK's history; attached, it has one."""
    mine, other = upstreams([ASK, LOOK, "Paris", "Oslo"], strict=True), upstreams(["Rome", ASK, "Bonn"], strict=True)
    agent, asked = attach(agent_of(mine), critic("mine")), critic("other")
    first = await Runner.run(agent, "And Ada?")
    second = await Runner.run(
        agent,
        [*first.to_input_list(), {"role": "user", "content": "And Bob?"}],
        run_config=RunConfig(model=model_of(other)),
    )
    assert second.final_output == "Rome"
    assert outputs(other.requests[0].body) == ["found: Ada"]
    attached = RunConfig(model=attach(model_of(other), asked))
    third = await Runner.run(
        agent, [*second.to_input_list(), {"role": "user", "content": "And Eve?"}], run_config=attached
    )
    assert third.final_output == "Bonn"
    assert "other" in outputs(other.requests[-1].body)[-1]
    # Back with its own model, the agent's earlier advice is there again.
    await Runner.run(agent, [*third.to_input_list(), {"role": "user", "content": "And Max?"}])
    assert ["mine" in text for text in outputs(mine.requests[-1].body)] == [True, False]


async def test_provider_of_the_run(upstreams: Start) -> None:
    upstream = upstreams([ASK, "Paris"])

    class Own(ModelProvider):
        def get_model(self, model_name: str | None) -> Model:
            assert model_name == "big"
            return model_of(upstream)

    config = RunConfig(model_provider=attach(Own(), critic()))
    result = await Runner.run(Agent("agent", model="big", tools=[search]), "Where?", run_config=config)
    assert result.final_output == "Paris"
    assert len(upstream.requests) == 2


async def test_model_by_name(upstreams: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = upstreams([ASK, "Paris"])
    monkeypatch.setenv("OPENAI_BASE_URL", upstream.url)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    bare = Agent("agent", model="gpt-5", tools=[search])
    agent = attach(bare, critic())
    assert agent.model_settings == bare.model_settings != ModelSettings()
    assert (await Runner.run(agent, "Where?")).final_output == "Paris"
    assert [request.body["model"] for request in upstream.requests] == ["gpt-5", "gpt-5"]
    assert upstream.requests[0].body["reasoning"] == {"effort": bare.model_settings.reasoning.effort}


# ---------------------------------------------------------------------- streams


@pytest.mark.parametrize("chat", [False, True])
async def test_stream_shows_text_at_once_and_no_control_calls(upstreams: Start, chat: bool) -> None:
    mixed = {**calls(*ASK["tool_calls"], *LOOK["tool_calls"]), "content": "One moment."}
    upstream = upstreams([{**ASK, "content": "Let me ask."}, mixed, "Paris"], strict=True)
    counted = ModelSettings(include_usage=True if chat else None)
    result = Runner.run_streamed(attach(agent_of(upstream, chat=chat, model_settings=counted), critic()), "Where?")
    raw = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    assert result.final_output == "Paris"
    assert "call_critic" not in "".join(event.model_dump_json() for event in raw)
    text = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
    assert text == "Let me ask.One moment.Paris"
    assert [event.type for event in raw].count("response.created") == 2
    ends = [event.response for event in raw if event.type == "response.completed"]
    assert [[item.type for item in end.output] for end in ends] == [
        ["message", "message", "function_call"],
        ["message"],
    ]
    for number, end in enumerate(ends):
        part = raw if not number else raw[raw.index(next(e for e in raw if e.type == "response.completed")) + 1 :]
        added = [event for event in part if event.type == "response.output_item.added"][: len(end.output)]
        assert [event.output_index for event in added] == list(range(len(end.output)))
    assert result.context_wrapper.usage.requests == 3
    assert result.context_wrapper.usage.output_tokens == 30


async def test_guarded_call_does_not_show_before_it_may_run(upstreams: Start) -> None:
    upstream = upstreams([PAY, PAY, "Done"])
    result = Runner.run_streamed(attach(agent_of(upstream), critic(), protocol="guarded:refund"), "Pay 7 back")
    seen = [event async for event in result.stream_events()]
    called = [event for event in seen if event.type == "run_item_stream_event" and event.name == "tool_called"]
    assert len(called) == 1
    done = [
        event.data.item.type
        for event in seen
        if event.type == "raw_response_event" and event.data.type == "response.output_item.done"
    ]
    assert done == ["function_call", "message"]


async def test_broken_stream_is_the_callers_to_see(upstreams: Start) -> None:
    upstream = upstreams([ASK, Scripted("Paris", die_after=3)])
    result = Runner.run_streamed(attach(agent_of(upstream), critic()), "Where?")
    with pytest.raises(Exception, match=r"Connection error|peer closed"):
        async for _ in result.stream_events():
            pass


async def test_leaving_a_stream_ends_the_request(upstreams: Start) -> None:
    upstream = upstreams([ASK, Scripted("Paris " * 200, gap=0.02)])
    result = Runner.run_streamed(attach(agent_of(upstream), critic()), "Where?")
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            result.cancel()
    upstream.wait_until(lambda: upstream.requests[-1].aborted)


# ---------------------------------------------------------------------- faults


class Slow:
    def critique(self, state: Any) -> Critique:
        raise AssertionError("the SDK is async")

    async def acritique(self, state: Any) -> Critique:
        await asyncio.sleep(30)
        return Critique("late", "late")


@pytest.mark.parametrize(
    ("broken", "status"),
    [
        (ScriptedCritic(lambda state: RuntimeError("bug")), "failed"),
        (ScriptedCritic(lambda state: Critique(status="unavailable")), "unavailable"),
        (Slow(), "timeout"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_broken_critic_stops_nobody(upstreams: Start, broken: Any, status: str, streamed: bool) -> None:
    upstream = upstreams([ASK, "Paris"])
    agent = attach(agent_of(upstream), broken, budget=Budget(timeout=0.1))
    if streamed:
        result: Any = Runner.run_streamed(agent, "Where?")
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "Where?")
    assert result.final_output == "Paris"
    assert f"none this time ({status})" in outputs(upstream.requests[-1].body)[0]


async def test_slow_critic_leaves_time_to_a_model_with_a_deadline(upstreams: Start) -> None:
    upstream = upstreams([ASK, "Paris"])
    agent = attach(agent_of(upstream, model_settings=ModelSettings(timeout=1.0)), Slow())
    assert (await Runner.run(agent, "Where?")).final_output == "Paris"
    assert "(timeout)" in outputs(upstream.requests[-1].body)[0]


async def test_raise_is_for_those_who_want_it(upstreams: Start) -> None:
    down = ScriptedCritic(lambda state: Critique(status="unavailable", detail="down"))
    with pytest.raises(ConsultationError, match="down"):
        await Runner.run(attach(agent_of(upstreams([ASK])), down, on_error="raise"), "Where?")


async def test_second_attempt_does_not_ask_again(upstreams: Start) -> None:
    upstream, asked = upstreams([ASK, failure(500), "Paris"], strict=True), critic()
    agent = attach(agent_of(upstream), asked)
    with pytest.raises(Exception, match="scripted failure"):
        await Runner.run(agent, "Where?")
    assert (await Runner.run(agent, "Where?")).final_output == "Paris"
    assert len(asked.seen) == 1
    assert len(outputs(upstream.requests[-1].body)) == 1


async def test_cancelled_run_cancels_the_critic(upstreams: Start) -> None:
    ended = asyncio.Event()

    class Waiting(Slow):
        async def acritique(self, state: Any) -> Critique:
            try:
                return await super().acritique(state)
            finally:
                ended.set()

    task = asyncio.create_task(Runner.run(attach(agent_of(upstreams([ASK])), Waiting()), "Where?"))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 2)


# ---------------------------------------------------------------------- settings


def test_wrong_settings_are_told_at_once() -> None:
    class Quiet(Model):
        async def get_response(self, *args: Any, **more: Any) -> Any: ...

        def stream_response(self, *args: Any, **more: Any) -> Any: ...

    agent = Agent("agent", tools=[search], model=Quiet())
    for wrong, said in (
        (lambda: attach(agent), "needs a critic"),
        (lambda: attach("agent", critic()), "takes an Agent"),  # type: ignore[type-var]
        (lambda: attach(agent, ScriptedCritic), "must have critique"),  # type: ignore[arg-type]
        (lambda: attach(agent, critic(), protocol="guarded:refnd"), "no tool 'refnd' to guard"),
        (lambda: attach(agent, critic(), protocol="sometimes"), "unknown intervention protocol"),
        (lambda: attach(agent, critic(), on_error="shout"), "on_error"),
        (lambda: attach(attach(agent, critic()), critic()), "has a critic already"),
        (lambda: attach(agent.clone(tools=[function_tool(name_override="call_critic")(len)]), critic()), "rename it"),
    ):
        with pytest.raises(ConfigError, match=said):
            wrong()
    attached = attach(agent, critic())
    assert agent.model is not attached.model
    assert isinstance(attached.model, CriticModel)
    assert attached.tools == agent.tools


def test_missing_package_is_named() -> None:
    code = (
        "import sys; sys.modules['agents'] = None\n"
        "from caddie_sdk.errors import MissingExtra\n"
        "try:\n    import caddie_sdk.shells.openai_agents\n"
        "except MissingExtra as error:\n    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'caddie-sdk[openai-agents]'" in ran.stdout
