"""Agents of the OpenAI Agents SDK, with a critic attached: parity's outside view of them."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    set_tracing_disabled,
)
from callers import Seen, _read, run_tool
from openai import AsyncOpenAI
from parity_cases import TOOLS, Case
from upstream import Scripted, Upstream

from caddie_sdk.shells.openai_agents import attach

set_tracing_disabled(True)


def _tool(tool: Any) -> FunctionTool:
    async def run(context: Any, arguments: str) -> str:
        return await asyncio.to_thread(run_tool, tool.name, arguments)

    return FunctionTool(tool.name, tool.description, tool.parameters, run, strict_json_schema=False)


def play_agents(case: Case, *, chat: bool = False, stream: bool = False) -> Seen:
    """One case through `Runner`; one thing said by the user after the other, each a run that continues the last."""
    critics, seen = case.critics(), Seen()
    with Upstream([Scripted(reply, keep_ids=True) for reply in case.replies]) as upstream:
        client = AsyncOpenAI(base_url=upstream.url, api_key="k", max_retries=0)
        model = OpenAIChatCompletionsModel("m", client) if chat else OpenAIResponsesModel("m", client)
        agent = attach(
            Agent("agent", instructions=case.system or None, tools=[_tool(tool) for tool in TOOLS], model=model),
            critics.get("call_critic"),
            feedback=critics.get("request_feedback"),
            protocol=case.protocol,
            budget=case.budget,
            on_error=case.on_error,
        )
        seen.answers = asyncio.run(_run(agent, case, stream, client))
        for request in upstream.requests:
            seen.wire.append(_read(request.body))
            names = [tool.get("name") or tool["function"]["name"] for tool in request.body.get("tools", ())]
            seen.offered.append(names)
    for name, critic in critics.items():
        seen.states[name] = [state.dump() for state in getattr(critic, "seen", ())]
    return seen


async def _run(agent: Agent[Any], case: Case, stream: bool, client: AsyncOpenAI) -> list[str]:
    async with client:
        return await _turns(agent, case, stream)


async def _turns(agent: Agent[Any], case: Case, stream: bool) -> list[str]:
    items: list[Any] = []
    answers = []
    config = RunConfig(
        tool_not_found_behavior="return_error_to_model",
        tool_error_formatter=lambda failed: run_tool(failed.tool_name, "") if failed.kind == "tool_not_found" else None,
    )
    for turn in case.turns:
        items.append({"role": "user", "content": turn})
        if stream:
            result: Any = Runner.run_streamed(agent, items, max_turns=50, run_config=config)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, items, max_turns=50, run_config=config)
        items = result.to_input_list()
        answers.append(result.final_output)
    return answers
