"""CPU per agent step: the bare openai client, Caddie's shells, and the agents of LangChain and OpenAI beside them.

    python benchmarks/overhead.py [--json PATH]

Every row runs the same task against the same zero-latency server in another process: `--steps` tool calls, then an
answer. CPU time is that of this process, all threads. Rounds are interleaved, and every figure is a median over
rounds; what a row adds is taken against the bare client of the same round, so drift of the machine cancels.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from loopback import Loopback
from rich.console import Console
from rich.table import Table

from caddie_sdk import (
    ChatEndpoint,
    CriticMiddleware,
    Session,
    SessionConfig,
    Tool,
    ToolResult,
    arun,
    create_caddie_agent,
)
from caddie_sdk.shells.wrap import wrap
from caddie_sdk.testing import ScriptedCritic, calls, tool_call

os.environ["OPENAI_API_KEY"] = "none"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

TASK = "Which city is it?"
FOUND = "A passage about the fact that was asked for."
TARGETS = {"session only": 0.1, "wrapped openai client": 0.3, "Caddie loop": 0.2, "Caddie graph": 1.5}
"""Most CPU milliseconds per step above the bare client (SPEC §9); the session alone, in all."""

PLAIN = {"CriticMiddleware": "LangChain create_agent"}
"""Rows that add to another one than the bare client."""


async def search(query: str) -> str:
    """Search the passages.

    Args:
        query: what to look for.
    """
    return FOUND


SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = Tool("search", "Search the passages.", SCHEMA, search)
CRITIC = ScriptedCritic([])

Run = Callable[[], Awaitable[str]]


def bare(url: str, wrapped: bool = False) -> Run:
    """The loop everybody writes first; with `wrapped`, the same over a wrapped client."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url, api_key="none")
    if wrapped:
        client = wrap(client, CRITIC)

    async def run() -> str:
        messages: list = [{"role": "user", "content": TASK}]
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL.schema()])
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                found = await search(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})

    return run


def session_only(steps: int) -> Run:
    """The state machine without any I/O around it."""

    async def run() -> str:
        session = Session(SessionConfig(tools=(TOOL.schema(),)))
        session.user_said(TASK)
        for step in range(steps):
            session.model_replied(calls(tool_call("search", {"query": f"fact number {step}"}, f"call_{step}")))
            session.tools_returned([ToolResult(f"call_{step}", FOUND)])
        session.model_replied({"role": "assistant", "content": "Paris"})
        return session.answer or ""

    return run


def caddie_loop(url: str) -> Run:
    """The bare loop around a session."""
    model = ChatEndpoint(url, "m")

    async def run() -> str:
        session = Session(SessionConfig(tools=(TOOL.schema(),)))
        return (await arun(session, TASK, model, [TOOL], {"call_critic": CRITIC})).answer or ""

    return run


def caddie_graph(url: str) -> Run:
    """The LangGraph agent."""
    graph = create_caddie_agent(ChatEndpoint(url, "m"), [TOOL], critic=CRITIC)

    async def run() -> str:
        return (await graph.ainvoke({"messages": TASK}))["answer"]

    return run


def langchain_agent(url: str, middleware: Sequence[Any] = ()) -> Run:
    """LangChain's `create_agent`."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(base_url=url, model="m", api_key="none"), [search], middleware=middleware)

    async def run() -> str:
        state = await agent.ainvoke({"messages": [("user", TASK)]}, {"recursion_limit": 1000})
        return state["messages"][-1].content

    return run


def with_middleware(url: str) -> Run:
    """The same agent with a critic to ask."""
    return langchain_agent(url, [CriticMiddleware(CRITIC)])


def agents_sdk(url: str) -> Run:
    """The OpenAI Agents SDK over chat completions."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(model="m", openai_client=AsyncOpenAI(base_url=url, api_key="none"))
    agent = Agent(name="bench", model=model, tools=[function_tool(search)])

    async def run() -> str:
        return (await Runner.run(agent, TASK, max_turns=1000)).final_output

    return run


async def measure(rows: dict[str, Run], steps: int, rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds per step, one figure per row and round."""
    spent: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(rounds + 1):
        for name, run in rows.items():
            started = time.process_time()
            answer = await run()
            used = (time.process_time() - started) * 1000 / (steps + 1)
            assert answer == "Paris", f"{name} answered {answer!r}"
            if number:  # the first round warms up
                spent[name].append(used)
    return spent


def summarise(spent: dict[str, list[float]]) -> list[dict]:
    """Medians, what each row adds to the bare client, and how that compares with the target."""
    base = spent["bare openai client"]
    result = []
    for name, figures in spent.items():
        added = [figure - other for figure, other in zip(figures, base, strict=True)]
        ratios = [figure / other for figure, other in zip(figures, base, strict=True)]
        alone = name == "session only"
        plain = spent.get(PLAIN.get(name, ""), figures)
        beyond = [figure - other for figure, other in zip(figures, plain, strict=True)]
        result.append(
            {
                "row": name,
                "ms_per_step": round(statistics.median(figures), 4),
                "added_ms": None if alone else round(statistics.median(added), 4),
                "added_to_plain_ms": round(statistics.median(beyond), 4) if name in PLAIN else None,
                "ratio_to_bare": round(statistics.median(ratios), 4),
                "target_ms": TARGETS.get(name),
            }
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20, help="tool calls per task")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with Loopback(options.steps) as url:
        rows: dict[str, Run] = {
            "bare openai client": bare(url),
            "session only": session_only(options.steps),
            "wrapped openai client": bare(url, wrapped=True),
            "Caddie loop": caddie_loop(url),
            "Caddie graph": caddie_graph(url),
            "LangChain create_agent": langchain_agent(url),
            "CriticMiddleware": with_middleware(url),
            "OpenAI Agents SDK": agents_sdk(url),
        }
        result = summarise(asyncio.run(measure(rows, options.steps, options.rounds)))
    table = Table(title=f"CPU per agent step, {options.steps} steps, median of {options.rounds} rounds")
    for column in ("", "ms per step", "added to bare, ms", "to its plain agent", "ratio to bare", "target, ms"):
        table.add_column(column, justify="left" if not column else "right")
    for row in result:
        cells = [row[key] for key in ("ms_per_step", "added_ms", "added_to_plain_ms", "ratio_to_bare", "target_ms")]
        table.add_row(row["row"], *("-" if cell is None else f"{cell:.3f}" for cell in cells))
    Console().print(table)
    if options.json:
        facts = {"steps": options.steps, "rounds": options.rounds, "python": sys.version.split()[0], "rows": result}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
