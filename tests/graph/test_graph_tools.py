"""Tools as users have them: functions, LangChain tools of every kind, Caddie tools."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

import pytest
from graph_kit import WAYS, Invoke, contents
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, ToolException, tool
from langgraph.config import get_config
from langgraph.errors import GraphBubbleUp
from pydantic import BaseModel, Field

from caddie_sdk import Tool, create_caddie_agent
from caddie_sdk.errors import ConfigError
from caddie_sdk.shells.langchain import to_tool
from caddie_sdk.testing import ScriptedModel, calls, tool_call


@pytest.fixture(params=WAYS)
def invoke(request: pytest.FixtureRequest) -> Invoke:
    return WAYS[request.param]


def observed(invoke: Invoke, given: Any, arguments: Any) -> str:
    """What the agent reads after it called the tool."""
    name = to_tool(given).name
    agent = create_caddie_agent(ScriptedModel([calls(tool_call(name, arguments)), "Done"]), [given])
    output = invoke(agent, {"messages": "go"}, {})
    assert output["answer"] == "Done"
    (text,) = contents(output, "tool")
    return text


# ------------------------------------------------------------------ the tools


def function(town: str, people: int = 3) -> str:
    """Where people live."""
    return f"{people!r} people in {town!r}"


async def coroutine(town: str, people: int = 3) -> str:
    """Where people live."""
    await asyncio.sleep(0)
    return f"{people!r} people in {town!r}"


@tool
def decorated(town: str, people: int = 3) -> str:
    """Where people live."""
    return f"{people!r} people in {town!r}"


@tool
async def decorated_async(town: str, people: int = 3) -> str:
    """Where people live."""
    return f"{people!r} people in {town!r}"


class Place(BaseModel):
    """Arguments as a model."""

    town: str = Field(description="name of the town")
    people: int = Field(3, ge=0)


structured = StructuredTool.from_function(
    function, name="structured", description="Where people live.", args_schema=Place
)
structured_async = StructuredTool.from_function(
    coroutine=coroutine, name="structured_async", description="Where people live.", args_schema=Place
)


class Classy(BaseTool):
    """A tool as a class, with a blocking part only."""

    name: str = "classy"
    description: str = "Where people live."

    def _run(self, town: str, people: int = 3) -> str:
        return f"{people!r} people in {town!r}"


PLACE_SCHEMA = {
    "type": "object",
    "properties": {"town": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["town"],
}
ALIKE = [
    function, coroutine, decorated, decorated_async, structured, structured_async, Classy(),
    Tool("caddie", "Where people live.", PLACE_SCHEMA, function),
    Tool("caddie_async", "Where people live.", PLACE_SCHEMA, coroutine),
]  # fmt: skip


@pytest.mark.parametrize("given", ALIKE, ids=lambda given: getattr(given, "name", None) or given.__name__)
def test_kinds_of_tools(given: Any, invoke: Invoke) -> None:
    assert observed(invoke, given, {"town": "Ulm"}) == "3 people in 'Ulm'"
    assert observed(invoke, given, {"town": "Ulm", "people": 7}) == "7 people in 'Ulm'"
    failed = observed(invoke, given, {"village": "Ulm"})
    assert failed.startswith("The tool failed: ")
    assert "town" in failed or "'village'" in failed


@pytest.mark.parametrize("given", ALIKE, ids=lambda given: getattr(given, "name", None) or given.__name__)
def test_schema_of_tools(given: Any) -> None:
    schema = to_tool(given).schema()
    assert schema["type"] == "function"
    assert schema["function"]["description"] == "Where people live."
    parameters = schema["function"]["parameters"]
    assert parameters["properties"]["town"]["type"] == "string"
    assert parameters["properties"]["people"]["type"] == "integer"
    assert parameters["required"] == ["town"]
    json.dumps(schema)


def test_model_is_offered_the_tools() -> None:
    model = ScriptedModel(["Done"])
    create_caddie_agent(model, ALIKE).invoke({"messages": "go"})
    names = [entry["function"]["name"] for entry in model.seen[0].tools]
    assert names == [to_tool(given).name for given in ALIKE]


def test_nested_and_annotated_arguments(invoke: Invoke) -> None:
    def book(place: Place, way: Literal["bus", "train"], notes: Annotated[list[str], "what to mind"]) -> str:
        """Book."""
        return f"{type(place).__name__} {place.town} by {way}: {notes}"

    schema = to_tool(book).schema()["function"]["parameters"]
    assert schema["properties"]["way"]["enum"] == ["bus", "train"]
    good = {"place": {"town": "Ulm"}, "way": "bus", "notes": ["window"]}
    assert observed(invoke, book, good) == "Place Ulm by bus: ['window']"
    assert observed(invoke, book, {**good, "way": "ship"}).startswith("The tool failed: ValidationError")


# ------------------------------------------------------------------ results


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (7, "7"),
        (2.5, "2.5"),
        (None, ("null", "None")),
        (True, ("true", "True")),
        (["a", "ü"], ('["a", "ü"]', "['a', 'ü']")),
        ({"a": [1]}, ('{"a": [1]}', "{'a': [1]}")),
        ("", ""),
        ("lone \ud800", ("lone \ufffd", "lone " + "\ufffd" * 3)),
        (
            [{"type": "text", "text": "part"}],
            ("part", "[{'type': 'text', 'text': 'part'}]", '[{"type": "text", "text": "part"}]'),
        ),
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", ["function", "caddie"])
def test_results_that_are_no_text(kind: str, result: Any, text: Any, invoke: Invoke) -> None:
    def give() -> Any:
        """Give."""
        return result

    given = give if kind == "function" else Tool("give", "Give.", run=give)
    assert observed(invoke, given, {}) in (text if isinstance(text, tuple) else (text,))


def test_artifact_is_left_out(invoke: Invoke) -> None:
    @tool(response_format="content_and_artifact")
    def table(town: str) -> tuple[str, Any]:
        """Table."""
        return f"3 rows for {town}", object()

    assert observed(invoke, table, {"town": "Ulm"}) == "3 rows for Ulm"


def test_tool_that_returns_a_tool_message(invoke: Invoke) -> None:
    @tool
    def give() -> Any:
        """Give."""
        return ToolMessage("from a message", tool_call_id="other")

    assert observed(invoke, give, {}) == "from a message"


# ------------------------------------------------------------------ failures

KINDS = ["function", "async function", "caddie", "caddie async"]


@pytest.mark.parametrize(
    ("handle", "text"),
    [
        (False, "The tool failed: ToolException: no such town"),
        (True, "no such town"),
        ("sorry", "sorry"),
        (lambda error: f"handled {error}", "handled no such town"),
    ],
    ids=["unhandled", "handled", "fixed text", "function"],
)
def test_tool_exception(handle: Any, text: str, invoke: Invoke) -> None:
    def find(town: str) -> str:
        """Find."""
        raise ToolException("no such town")

    given = StructuredTool.from_function(find, handle_tool_error=handle)
    assert observed(invoke, given, {"town": "X"}) == text


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("town"),
        RuntimeError(),
        FileNotFoundError(2, "gone"),
        TimeoutError(),
        SystemExit(3),  # a command-line program called as a function
        asyncio.CancelledError(),  # a library that cancels a task of its own and lets it show
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", KINDS)
def test_failing_tool_is_an_observation(kind: str, error: BaseException, invoke: Invoke) -> None:
    def fail() -> str:
        """Fail."""
        raise error

    async def afail() -> str:
        """Fail."""
        raise error

    chosen = afail if "async" in kind else fail
    given = Tool("fail", "Fail.", run=chosen) if "caddie" in kind else chosen
    if invoke is WAYS["async"] and kind == "async function" and isinstance(error, SystemExit):
        pytest.skip("LangChain runs it as a task of its own, and asyncio lets SystemExit end the caller's loop")
    assert observed(invoke, given, {}).startswith(f"The tool failed: {type(error).__name__}")


@pytest.mark.parametrize("kind", KINDS)
def test_tool_that_forgets_the_default_of_next(kind: str, invoke: Invoke) -> None:
    """`next()` without a default raises StopIteration, which asyncio cannot carry through a future."""

    def fail() -> str:
        """Fail."""
        return next(iter(()))

    async def afail() -> str:
        """Fail."""
        return next(iter(()))

    chosen = afail if "async" in kind else fail
    given = Tool("fail", "Fail.", run=chosen) if "caddie" in kind else chosen
    assert observed(invoke, given, {}).startswith("The tool failed: RuntimeError")


def test_failing_tool_is_marked_as_an_error() -> None:
    def fail() -> str:
        """Fail."""
        raise ValueError("bad")

    agent = create_caddie_agent(ScriptedModel([calls(tool_call("fail")), "Done"]), [fail])
    events = list(agent.stream({"messages": "go"}, stream_mode="custom"))
    results = next(event["results"] for event in events if event["event"] == "observations")
    assert [(result["content"], result["is_error"]) for result in results] == [
        ("The tool failed: ValueError: bad", True)
    ]


def test_bubbling_exceptions_of_langgraph_get_through(invoke: Invoke) -> None:
    class Stop(GraphBubbleUp):
        pass

    def stop() -> str:
        """Stop."""
        raise Stop("up")

    agent = create_caddie_agent(ScriptedModel([calls(tool_call("stop")), "Done"]), [stop])
    with pytest.raises(Stop):
        invoke(agent, {"messages": "go"}, {})


def test_arguments_named_like_our_own(invoke: Invoke) -> None:
    """Keywords that collide with parameters of our own wrappers must reach the tool, or be told as its failure."""

    def odd(name: str, run: str, call: str, config_: str = "") -> str:
        """Odd."""
        return f"{name} {run} {call}"

    assert observed(invoke, odd, {"name": "a", "run": "b", "call": "c"}) == "a b c"
    caddie = Tool("odd", "Odd.", run=lambda **given: str(sorted(given)))
    assert observed(invoke, caddie, {"name": 1, "run": 2, "tools": 3}) == "['name', 'run', 'tools']"
    assert observed(invoke, caddie, {"self": 1}).startswith("The tool failed: TypeError")


def test_tools_see_the_run_configuration(invoke: Invoke) -> None:
    """A tool may look up who is asking: `config` travels into sync and async tools alike."""

    def who() -> str:
        """Who."""
        return str(get_config()["configurable"]["user"])

    async def awho() -> str:
        """Who."""
        return str(get_config()["configurable"]["user"])

    turn = calls(tool_call("who"), tool_call("awho"))
    agent = create_caddie_agent(ScriptedModel([turn, calls(tool_call("who")), "Done"]), [who, awho])
    output = invoke(agent, {"messages": "go"}, {"configurable": {"user": "Ada"}})
    assert contents(output, "tool") == ["Ada", "Ada", "Ada"]


# ------------------------------------------------------------------ what is no tool


@pytest.mark.parametrize("given", [5, None, "search", {"name": "search"}, object()], ids=repr)
def test_what_is_no_tool(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"a tool must be a caddie_sdk\.Tool, a LangChain tool or a function"):
        create_caddie_agent(ScriptedModel([]), [given])


def test_function_without_docstring() -> None:
    def bare(query: str) -> str:
        return query

    with pytest.raises(ConfigError, match=r"cannot make a tool of .*bare.*docstring"):
        create_caddie_agent(ScriptedModel([]), [bare])


def test_text_format_with_a_tool_it_cannot_express() -> None:
    with pytest.raises(ConfigError, match=r"tool 'function_' needs exactly one required string|rename|one required"):
        create_caddie_agent(
            ScriptedModel([]), [Tool("function_", "", {"type": "object", "properties": {}})], action_format="caddie"
        )
