"""What the tests of traces share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caddie_sdk import Critique, Session, SessionConfig, Tool, Usage, run
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, tool_call

QUERY = {"type": "string"}
SEARCH = {"type": "object", "properties": {"query": QUERY, "password": {"type": "string"}}}
ONE = {"type": "object", "properties": {"query": QUERY}, "required": ["query"]}
"""What a text format with one argument per action can express."""


def look(query: str, **more: str) -> dict[str, Any]:
    """The agent's turn that searches."""
    return calls(tool_call("search", {"query": query, **more}))


ASK = calls(tool_call("call_critic"))
SCRIPT = [look("a"), ASK, look("b"), calls(tool_call("search", {"query": "c"}), tool_call("call_critic")), "Paris"]


def critic() -> ScriptedCritic:
    return ScriptedCritic(
        lambda state: Critique(
            f"analysis {state.step}", f"advice {state.step}", usage=Usage(7, 3, 0, 1), model="critic-1"
        )
    )


def finished(
    replies: Sequence[Any] = SCRIPT,
    observation: str = "found",
    task: str = "Where?",
    one_argument: bool = False,
    **settings: Any,
) -> Session:
    """A session that has done its work."""
    parameters = ONE if one_argument else SEARCH
    tool = Tool("search", "Search.", parameters, lambda query, password="": f"{observation} {query}")
    session = Session(SessionConfig(tools=(tool.schema(),), **settings))
    run(session, task, ScriptedModel(replies), [tool], {"call_critic": critic()})
    return session
