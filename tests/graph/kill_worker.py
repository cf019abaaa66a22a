"""An agent at work in a process of its own, to be killed. Run as `python kill_worker.py DB DIARY SAVER HANG`.

Everything it does depends on the thread alone, so another process can take the thread over. `HANG` names what
sleeps until the kill: `tool:<query>`, `model:<number of the call>` or `critic:<step>`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

from caddie_sdk import CallModel, Critique, Reply, Usage, create_caddie_agent
from caddie_sdk.critic import ConsultState
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, tool_call

THREAD: dict[str, Any] = {"configurable": {"thread_id": "1"}}
QUESTION = {"messages": "Where was Ada born?"}
SCRIPT = [
    calls(tool_call("search", {"query": "quick"}), tool_call("asearch", {"query": "twin"}), text="both"),
    calls(tool_call("search", {"query": "alone"}), tool_call("call_critic")),
    {"role": "assistant", "content": ""},
    calls(tool_call("asearch", {"query": "last"})),
    {"role": "assistant", "content": "Paris"},
]


class Diary:
    """What was done, line by line, in a file that outlives the process."""

    def __init__(self, path: Path, hang: str = "") -> None:
        self.path, self.hang = path, hang

    def note(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(line + "\n")

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


def build(diary: Diary, checkpointer: Any) -> Any:
    def search(query: str) -> str:
        """Search, blocking."""
        diary.note(f"start tool:{query}")
        if diary.hang == f"tool:{query}":
            time.sleep(120)
        diary.note(f"end tool:{query}")
        return f"found: {query}"

    async def asearch(query: str) -> str:
        """Search."""
        diary.note(f"start tool:{query}")
        if diary.hang == f"tool:{query}":
            await asyncio.sleep(120)
        diary.note(f"end tool:{query}")
        return f"found: {query}"

    class Model(ScriptedModel):
        async def acomplete(self, call: CallModel) -> Reply:
            number = sum(message["role"] == "assistant" for message in call.messages)
            diary.note(f"start model:{number}")
            if diary.hang == f"model:{number}":
                await asyncio.sleep(120)
            diary.note(f"end model:{number}")
            return Reply(SCRIPT[number], Usage(10, 5, 0, 1))

    class Adviser(ScriptedCritic):
        async def acritique(self, state: ConsultState) -> Critique:
            diary.note(f"start critic:{state.step}")
            if diary.hang == f"critic:{state.step}":
                await asyncio.sleep(120)
            diary.note(f"end critic:{state.step}")
            return Critique(f"analysis at {state.step}", f"advice after {len(state.events)} events")

    return create_caddie_agent(Model([]), [search, asearch], critic=Adviser([]), checkpointer=checkpointer)


def go_on(db: Path, diary: Diary, saver: str, said: Any) -> dict[str, Any]:
    """Work on the thread in this process."""
    if saver == "sync":
        with SqliteSaver.from_conn_string(str(db)) as opened:
            return build(diary, opened).invoke(said, THREAD)

    async def work() -> dict[str, Any]:
        async with AsyncSqliteSaver.from_conn_string(str(db)) as opened:
            return await build(diary, opened).ainvoke(said, THREAD)

    return asyncio.run(work())


if __name__ == "__main__":
    go_on(Path(sys.argv[1]), Diary(Path(sys.argv[2]), sys.argv[4]), sys.argv[3], QUESTION)
