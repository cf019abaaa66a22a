"""Parity's outside view of `CriticMiddleware`: `create_agent` with a real chat model against a scripted server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from callers import SCHEMAS, Seen, run_tool
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from parity_cases import Case
from upstream import Scripted, Upstream

from caddie_sdk.messages import canonical
from caddie_sdk.shells.middleware import CriticMiddleware

LANGCHAINS_WORDS = ("unknown tool", "nothing but unknown tools", "broken JSON", "wrong arguments", "a list")
"""Cases in which LangChain itself answers a call, or ends the work, in its own words."""


def fits(case: Case) -> bool:
    """Whether `create_agent` can play it, of the cases that a caller who owns the tools can."""
    return not case.native_only and not any(case.name.endswith(words) for words in LANGCHAINS_WORDS)


def _tool(schema: dict[str, Any]) -> StructuredTool:
    function = schema["function"]

    def run(**arguments: Any) -> str:
        return run_tool(function["name"], json.dumps(arguments, ensure_ascii=False))

    async def arun(**arguments: Any) -> str:
        return await asyncio.to_thread(run, **arguments)

    return StructuredTool(
        name=function["name"],
        description=function["description"],
        args_schema=function["parameters"],
        func=run,
        coroutine=arun,
    )


def play(case: Case, way: str) -> Seen:
    """One case; `way` is `invoke`, `ainvoke`, `stream` or `astream`."""
    critics, seen = case.critics(), Seen()
    middleware = CriticMiddleware(
        critics.get("call_critic"),
        feedback=critics.get("request_feedback"),
        protocol=case.protocol,
        budget=case.budget,
        on_error=case.on_error,
        seed=case.seed,
    )
    with Upstream([Scripted(reply, keep_ids=True) for reply in case.replies], strict=True) as upstream:
        model = ChatOpenAI(base_url=upstream.url, api_key="k", model="m", max_retries=0, streaming="stream" in way)
        agent = create_agent(
            model,
            [_tool(schema) for schema in SCHEMAS],
            system_prompt=case.system or None,
            middleware=[middleware],
            checkpointer=InMemorySaver(),
        )
        with asyncio.Runner() as runner:
            for turn in case.turns:
                messages = _run(agent, {"messages": [("user", turn)]}, way, runner)
                seen.answers.append(messages[-1].text)
        for request in upstream.requests:
            seen.wire.append([dict(canonical(message)) for message in request.body["messages"]])
            seen.offered.append([tool["function"]["name"] for tool in request.body.get("tools", ())])
    for name, critic in critics.items():
        seen.states[name] = [state.dump() for state in getattr(critic, "seen", ())]
    return seen


def _run(agent: Any, said: Any, way: str, runner: asyncio.Runner) -> list[Any]:
    thread: Any = {"configurable": {"thread_id": "1"}}

    async def last() -> Any:
        return [state async for state in agent.astream(said, thread, stream_mode="values")][-1]

    if way == "invoke":
        state = agent.invoke(said, thread)
    elif way == "stream":
        state = list(agent.stream(said, thread, stream_mode="values"))[-1]
    else:
        state = runner.run(agent.ainvoke(said, thread) if way == "ainvoke" else last())
    return state["messages"]  # type: ignore[no-any-return]
