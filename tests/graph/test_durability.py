"""What a node has done is on record before the next node starts: a kill in between repeats nothing."""

from __future__ import annotations

import time
from typing import Any

from langgraph.checkpoint.memory import InMemorySaver

from caddie_sdk import CallModel, create_caddie_agent
from caddie_sdk.testing import ScriptedModel, calls, tool_call

THREAD: Any = {"configurable": {"thread_id": "t"}}


class SlowSaver(InMemorySaver):
    """A checkpointer whose disk takes its time."""

    def put(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2)
        return super().put(*args, **kwargs)


def note(text: str) -> str:
    """Write it down."""
    return f"noted {text}"


def agent_that_looks(seen: list[list[str]]) -> Any:
    saver = SlowSaver()

    def reply(call: CallModel) -> Any:
        stored = saver.get(THREAD)
        session = (stored or {}).get("channel_values", {}).get("session") or {}
        seen.append([node["message"]["role"] for node in session.get("history", {}).get("nodes", [])])
        return calls(tool_call("note", {"text": "x"})) if len(seen) == 1 else "done"

    return create_caddie_agent(ScriptedModel(reply), [note], checkpointer=saver)


def test_the_tools_results_are_stored_before_the_model_is_asked_again() -> None:
    seen: list[list[str]] = []
    assert agent_that_looks(seen).invoke({"messages": "go"}, THREAD)["answer"] == "done"
    assert seen == [["user"], ["user", "assistant", "tool"]]


def test_who_wants_speed_instead_can_have_it() -> None:
    seen: list[list[str]] = []
    agent_that_looks(seen).invoke({"messages": "go"}, THREAD, durability="exit")
    assert seen == [[], []]
