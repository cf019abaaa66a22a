"""Spans over the loop and the graph, as a real OpenTelemetry SDK exports them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command, interrupt
from opentelemetry import trace
from opentelemetry._logs import _internal as logs
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from caddie_sdk import Budget, Critique, Session, SessionConfig, Tool, Usage, arun, create_caddie_agent, run, tracing
from caddie_sdk.errors import ContextOverflow, EndpointTimeout
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, tool_call

SECRET = "sk-abcdef0123456789abcdef"
TASK, FOUND, ADVICE, ANSWER = (
    "where was Ada Vance born",
    "on the isle of Greave",
    "look at the census",
    "in Greave town",
)
LOOK = calls(tool_call("search", {"query": "Ada Vance", "api_key": SECRET}, id="call_a"))
ASK = calls(tool_call("call_critic", id="call_b"))
SCRIPT = [LOOK, ASK, ANSWER]
USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4, calls=1)


def search_tool(run: Callable[..., Any] | None = None) -> Tool:
    parameters = {"type": "object", "properties": {"query": {"type": "string"}, "api_key": {"type": "string"}}}
    return Tool("search", "Search.", parameters, run or (lambda query, api_key="": f"{FOUND}, {SECRET}"))


def critic(*said: Any) -> ScriptedCritic:
    critique = Critique("thin evidence", ADVICE, raw=f"Analysis: thin evidence\nAdvices for next steps: {ADVICE}",
                        usage=Usage(90, 9, 0, 1), model="critic-1@0123456789abcdef")  # fmt: skip
    return ScriptedCritic(said or [critique] * 9)


class Named(ScriptedModel):
    """A scripted model behind a URL, as a `ChatEndpoint` is."""

    model = "qwen3-4b"
    base_url = "http://models.example:8000/v1"


def through_loop(replies: Sequence[Any] = SCRIPT, said: Any = None, tool: Tool | None = None) -> Any:
    tool = tool or search_tool()
    session = Session(SessionConfig(tools=(tool.schema(),), budget=Budget(max_steps=9)))
    return run(session, TASK, Named(replies, USAGE), [tool], {"call_critic": said or critic()})


def through_graph(replies: Sequence[Any] = SCRIPT, said: Any = None, tool: Tool | None = None) -> Any:
    agent = create_caddie_agent(Named(replies, USAGE), [tool or search_tool()], critic=said or critic())
    return agent.invoke({"messages": TASK})


def through_async_graph(replies: Sequence[Any] = SCRIPT, said: Any = None, tool: Tool | None = None) -> Any:
    agent = create_caddie_agent(Named(replies, USAGE), [tool or search_tool()], critic=said or critic())
    return asyncio.run(agent.ainvoke({"messages": TASK}))


WAYS = pytest.mark.parametrize("way", [through_loop, through_graph, through_async_graph])


def by_start(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def named(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    (span,) = [span for span in exporter.get_finished_spans() if span.name == name]
    return span


def everything(exporter: InMemorySpanExporter) -> str:
    return "\n".join(span.to_json() for span in exporter.get_finished_spans())


# ------------------------------------------------------------------ names, parents, attributes


@WAYS
def test_names_kinds_and_parents(way: Callable[..., Any], exported: InMemorySpanExporter) -> None:
    way()
    spans = by_start(exported)
    assert [(span.name, span.kind) for span in spans] == [
        ("invoke_agent caddie", SpanKind.INTERNAL),
        ("chat qwen3-4b", SpanKind.CLIENT),
        ("execute_tool search", SpanKind.INTERNAL),
        ("chat qwen3-4b", SpanKind.CLIENT),
        ("chat critic-1@0123456789abcdef", SpanKind.CLIENT),
        ("chat qwen3-4b", SpanKind.CLIENT),
    ]
    root, *inside = spans
    assert root.parent is None
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in inside)
    assert {span.context.trace_id for span in spans} == {root.context.trace_id}
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    assert all(root.start_time <= span.start_time and span.end_time <= root.end_time for span in inside)


@WAYS
def test_attributes(way: Callable[..., Any], exported: InMemorySpanExporter) -> None:
    way()
    root, chat, tool, _, advice, last = by_start(exported)
    assert dict(root.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "caddie",
        "gen_ai.agent.name": "caddie",
        **({"gen_ai.request.model": "qwen3-4b"} if way is through_loop else {}),
        "caddie.reason": "answer",
        "caddie.steps": 1,
        "caddie.consultations": 1,
        "caddie.protocol": "self-call",
    }
    assert dict(chat.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "qwen3-4b",
        "gen_ai.response.model": "scripted",
        "gen_ai.response.finish_reasons": ("tool_call",),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "server.address": "models.example",
        "server.port": 8000,
        "caddie.role": "agent",
    }
    assert dict(tool.attributes or {}) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "call_a",
    }
    assert dict(advice.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "custom",
        "gen_ai.response.model": "critic-1@0123456789abcdef",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 90,
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.request.max_tokens": 512,
        "caddie.role": "critic",
        "caddie.control": "call_critic",
        "caddie.trigger": "self-call",
        "caddie.step": 1,
        "caddie.remaining": 2,
        "caddie.status": "ok",
    }
    assert (last.attributes or {})["gen_ai.response.finish_reasons"] == ("stop",)


@WAYS
def test_the_evaluation_event_belongs_to_the_run(way: Callable[..., Any], exported: InMemorySpanExporter) -> None:
    way()
    (event,) = named(exported, "invoke_agent caddie").events
    assert event.name == "gen_ai.evaluation.result"
    assert dict(event.attributes or {}) == {
        "gen_ai.evaluation.name": "caddie.advice",
        "gen_ai.evaluation.score.label": "ok",
        "caddie.status": "ok",
        "caddie.control": "call_critic",
        "caddie.trigger": "self-call",
        "caddie.step": 1,
        "caddie.remaining": 2,
    }
    assert not [event for span in by_start(exported)[1:] for event in span.events]


def test_every_attribute_is_one_of_the_conventions_or_our_own(exported: InMemorySpanExporter) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    tracing.configure(content=True)
    through_loop()
    through_loop(said=critic(RuntimeError("down")))
    events = [event for span in by_start(exported) for event in span.events]
    used = {name for holder in [*by_start(exported), *events] for name in holder.attributes or {}}
    assert len({name for name in used if name.startswith("gen_ai.")} & known) >= 15
    others = {name for name in used - known if not name.startswith(("caddie.", "server."))}
    assert others <= {"error.type"}


def test_advice_goes_to_the_log_where_the_application_collects_those(
    exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, provider = InMemoryLogRecordExporter(), LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(records))
    monkeypatch.setattr(logs, "_LOGGER_PROVIDER", provider)
    through_loop()
    root = named(exported, "invoke_agent caddie")
    assert not root.events
    (data,) = records.get_finished_logs()
    assert data.log_record.event_name == "gen_ai.evaluation.result"
    assert data.log_record.span_id == root.context.span_id
    assert dict(data.log_record.attributes)["gen_ai.evaluation.score.label"] == "ok"


def test_a_consultation_outside_of_any_run_holds_its_own_event(exported: InMemorySpanExporter) -> None:
    from caddie_sdk.critic import ConsultState
    from caddie_sdk.shells.consult import consult

    said = consult({"call_critic": critic()}, ConsultState("call_critic", "guarded", 4, ()))
    assert said.ok
    (span,) = exported.get_finished_spans()
    assert [event.name for event in span.events] == ["gen_ai.evaluation.result"]
    assert (span.events[0].attributes or {})["caddie.trigger"] == "guarded"


def test_each_turn_of_a_thread_is_a_run_of_one_conversation(exported: InMemorySpanExporter) -> None:
    agent = create_caddie_agent(Named(["one", "two"]), name="shop", checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "customer-7"}}
    for text in ("a", "b"):
        agent.invoke({"messages": text}, config)
    runs = [span for span in by_start(exported) if span.name == "invoke_agent shop"]
    assert [(span.attributes or {})["gen_ai.conversation.id"] for span in runs] == ["customer-7"] * 2
    assert runs[0].context.trace_id != runs[1].context.trace_id


def test_a_run_lies_inside_the_applications_own_span(exported: InMemorySpanExporter) -> None:
    with trace.get_tracer("app").start_as_current_span("request") as request:
        through_graph()
    assert named(exported, "invoke_agent caddie").parent.span_id == request.get_span_context().span_id


def test_spans_of_a_tool_lie_inside_its_execution(exported: InMemorySpanExporter) -> None:
    def run(query: str, api_key: str = "") -> str:
        with trace.get_tracer("app").start_as_current_span("sql"):
            return "found"

    for way in (through_loop, through_graph, through_async_graph):
        exported.clear()
        way(tool=search_tool(run))
        assert named(exported, "sql").parent.span_id == named(exported, "execute_tool search").context.span_id


@pytest.mark.parametrize("asynchronous", [False, True])
def test_who_reads_a_stream_keeps_their_own_current_span(asynchronous: bool, exported: InMemorySpanExporter) -> None:
    agent = create_caddie_agent(Named(SCRIPT), [search_tool()], critic=critic())
    seen = []

    async def read() -> None:
        async for _ in agent.astream({"messages": TASK}, stream_mode="custom"):
            seen.append(trace.get_current_span().get_span_context().is_valid)

    if asynchronous:
        asyncio.run(read())
    else:
        for _ in agent.stream({"messages": TASK}, stream_mode="custom"):
            seen.append(trace.get_current_span().get_span_context().is_valid)
    assert len(seen) == 6
    assert not any(seen)
    assert len(by_start(exported)) == 6


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stream_that_is_abandoned_ends_its_run(asynchronous: bool, exported: InMemorySpanExporter) -> None:
    agent = create_caddie_agent(Named(SCRIPT), [search_tool()], critic=critic())

    async def read() -> None:
        stream: Any = agent.astream({"messages": TASK}, stream_mode="custom")
        await anext(stream)
        await stream.aclose()

    if asynchronous:
        asyncio.run(read())
    else:
        stream: Any = agent.stream({"messages": TASK}, stream_mode="custom")
        next(stream)
        stream.close()
    root = named(exported, "invoke_agent caddie")
    assert root.status.status_code == StatusCode.UNSET
    assert "error.type" not in (root.attributes or {})


# ------------------------------------------------------------------ content


@WAYS
def test_no_content_by_default(way: Callable[..., Any], exported: InMemorySpanExporter) -> None:
    way()
    text = everything(exported)
    assert "chat qwen3-4b" in text
    for content in (TASK, FOUND, ADVICE, ANSWER, SECRET, "Ada Vance", "thin evidence", "query"):
        assert content not in text


@WAYS
@pytest.mark.parametrize("switch", ["argument", "environment"])
def test_content_when_asked_for_is_there_without_secrets(
    way: Callable[..., Any], switch: str, exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switch == "argument":
        tracing.configure(content=True)
    else:
        monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "SPAN_ONLY")
    way()
    text = everything(exported)
    for content in (TASK, FOUND, ADVICE, ANSWER, "Ada Vance", "thin evidence"):
        assert content in text
    assert SECRET not in text
    tool = dict(named(exported, "execute_tool search").attributes or {})
    assert json.loads(str(tool["gen_ai.tool.call.arguments"])) == {"query": "Ada Vance", "api_key": "[redacted]"}
    assert tool["gen_ai.tool.call.result"] == f"{FOUND}, [redacted]"
    root, first, *_, last = by_start(exported)
    assert json.loads(str((first.attributes or {})["gen_ai.input.messages"])) == [
        {"role": "user", "parts": [{"type": "text", "content": TASK}]}
    ]
    (told,) = json.loads(str((first.attributes or {})["gen_ai.output.messages"]))
    arguments = {"query": "Ada Vance", "api_key": "[redacted]"}
    assert told == {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "call_a", "name": "search", "arguments": arguments}],
        "finish_reason": "tool_call",
    }
    asked = json.loads(str((last.attributes or {})["gen_ai.input.messages"]))
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "assistant", "tool"]
    assert asked[2]["parts"] == [{"type": "tool_call_response", "id": "call_a", "response": f"{FOUND}, [redacted]"}]
    assert ADVICE in str((root.events[0].attributes or {})["gen_ai.evaluation.explanation"])


def test_false_wins_over_the_environment(exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    tracing.configure(content=False)
    through_loop()
    assert TASK not in everything(exported)


def test_the_users_redactor_is_used(exported: InMemorySpanExporter) -> None:
    tracing.configure(content=True, redactor=tracing.Redactor(patterns=("Ada [A-Z][a-z]+",)))
    through_loop()
    text = everything(exported)
    assert "Ada Vance" not in text
    assert "where was [redacted] born" in text


def test_content_that_cannot_be_checked_is_left_out_and_breaks_nothing(exported: InMemorySpanExporter) -> None:
    deep: Any = "core"
    for _ in range(5000):
        deep = [deep]
    tracing.configure(content=True)
    with tracing.execute_tool("search", "1", deep):
        pass
    (span,) = exported.get_finished_spans()
    assert (span.attributes or {})["gen_ai.tool.call.arguments"] == "[not recorded: RecursionError]"


# ------------------------------------------------------------------ failures


@WAYS
@pytest.mark.parametrize("content", [False, True])
def test_a_model_that_fails(way: Callable[..., Any], content: bool, exported: InMemorySpanExporter) -> None:
    tracing.configure(content=content)
    with pytest.raises(EndpointTimeout):
        way([LOOK, EndpointTimeout(f"{TASK} took too long, {SECRET}")])
    root, _, _, failed = by_start(exported)
    for span in (root, failed):
        assert span.status.status_code == StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "caddie_sdk.errors.EndpointTimeout"
        assert span.status.description == (f"{TASK} took too long, [redacted]" if content else None)
        assert not span.events  # an exception event would hold its words and a stack trace


@WAYS
def test_a_context_that_overflows_fails_the_call_and_not_the_run(
    way: Callable[..., Any], exported: InMemorySpanExporter
) -> None:
    way([LOOK, ContextOverflow("too long")])
    root, _, _, failed = by_start(exported)
    assert (failed.attributes or {})["error.type"] == "caddie_sdk.errors.ContextOverflow"
    assert root.status.status_code == StatusCode.UNSET
    assert (root.attributes or {})["caddie.reason"] == "context_overflow"


@WAYS
def test_a_tool_that_fails(way: Callable[..., Any], exported: InMemorySpanExporter) -> None:
    def broken(query: str, api_key: str = "") -> str:
        raise KeyError(f"no row for {query}")

    way(tool=search_tool(broken))
    span = named(exported, "execute_tool search")
    assert span.status.status_code == StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "KeyError"
    assert "no row" not in everything(exported)
    assert named(exported, "invoke_agent caddie").status.status_code == StatusCode.UNSET


@WAYS
@pytest.mark.parametrize(
    ("said", "status"),
    [
        (RuntimeError("thin evidence"), "failed"),
        (Critique(status="timeout", detail="thin evidence"), "timeout"),
        (Critique(status="malformed", raw="thin evidence"), "malformed"),
    ],
)
def test_a_critic_that_fails(way: Callable[..., Any], said: Any, status: str, exported: InMemorySpanExporter) -> None:
    way(said=critic(said))
    span = next(span for span in by_start(exported) if (span.attributes or {}).get("caddie.role") == "critic")
    assert span.status.status_code == StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == status
    root = named(exported, "invoke_agent caddie")
    (event,) = root.events
    facts = dict(event.attributes or {})
    assert facts["gen_ai.evaluation.score.label"] == facts["error.type"] == facts["caddie.status"] == status
    assert root.status.status_code == StatusCode.UNSET
    assert "thin evidence" not in everything(exported)


def test_a_tool_that_waits_for_a_human_has_not_failed(exported: InMemorySpanExporter) -> None:
    def pay(query: str) -> str:
        """Pay."""
        return str(interrupt("may I?"))

    agent = create_caddie_agent(
        Named([calls(tool_call("pay", {"query": "x"})), "done"]), [pay], checkpointer=InMemorySaver()
    )
    config: Any = {"configurable": {"thread_id": "1"}}
    agent.invoke({"messages": "pay"}, config)
    agent.invoke(Command(resume="yes"), config)
    spans = by_start(exported)
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    assert sum(span.name == "execute_tool pay" for span in spans) == 2
    first, second = [span for span in spans if span.name == "invoke_agent caddie"]
    assert "caddie.reason" not in (first.attributes or {})
    assert (second.attributes or {})["caddie.reason"] == "answer"


async def test_cancelled_work_says_so(exported: InMemorySpanExporter) -> None:
    async def slow(query: str, api_key: str = "") -> str:
        await asyncio.sleep(60)
        return ""

    tool = search_tool(slow)
    session = Session(SessionConfig(tools=(tool.schema(),)))
    work = asyncio.create_task(arun(session, TASK, Named(SCRIPT), [tool], {"call_critic": critic()}))
    await asyncio.sleep(0.1)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    for name in ("execute_tool search", "invoke_agent caddie"):
        assert (named(exported, name).attributes or {})["error.type"] == "asyncio.exceptions.CancelledError"


# ------------------------------------------------------------------ side by side


@pytest.mark.parametrize("graph", [False, True])
async def test_twenty_runs_at_once_do_not_mix(graph: bool, exported: InMemorySpanExporter) -> None:
    async def slow(query: str, api_key: str = "") -> str:
        await asyncio.sleep(0.01)
        return FOUND

    tool, twice = search_tool(slow), calls(*[tool_call("search", {"query": str(i)}) for i in range(2)])

    async def one(number: int) -> None:
        replies = [twice, ASK, ANSWER]
        if graph:
            agent = create_caddie_agent(Named(replies), [tool], critic=critic(), name=f"run{number}")
            await agent.ainvoke({"messages": TASK})
        else:
            session = Session(SessionConfig(tools=(tool.schema(),)))
            await arun(session, TASK, Named(replies), [tool], {"call_critic": critic()})

    await asyncio.gather(*(one(number) for number in range(20)))
    spans = by_start(exported)
    roots = [span for span in spans if span.parent is None]
    assert len(roots) == 20
    assert all(span.name.startswith("invoke_agent") for span in roots)
    for root in roots:
        inside = [span.name.split()[0] for span in spans if span.parent and span.parent.span_id == root.context.span_id]
        assert inside == ["chat", "execute_tool", "execute_tool", "chat", "chat", "chat"]
        assert len(root.events) == 1


# ------------------------------------------------------------------ off

WITHOUT = """\
import sys
import caddie_sdk
from caddie_sdk import Session, SessionConfig, run, tracing
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, tool_call
assert "opentelemetry" not in sys.modules
sys.modules["opentelemetry"] = None  # as if it were not installed
critics = {"call_critic": ScriptedCritic([("a", "b")])}
end = run(Session(SessionConfig()), "x", ScriptedModel([calls(tool_call("call_critic")), "done"]), [], critics)
assert end.answer == "done"
assert tracing.chat("m") is tracing.invoke_agent() is tracing.execute_tool("t") is tracing.current_run()
print("fine")
"""


def test_without_opentelemetry_nothing_is_imported_and_everything_works() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("fine\n", "")


@pytest.mark.parametrize("installed", [True, False], ids=["no provider", "not imported"])
def test_a_span_that_is_off_costs_next_to_nothing(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not installed:
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    model = Named(["x"])
    reply = {"role": "assistant", "content": "x"}

    def once() -> None:
        with tracing.chat(model) as span:
            span.replied(reply, usage=USAGE, model="m")

    assert tracing.chat(model).on is False
    seconds = min(timeit.repeat(once, number=5000, repeat=5)) / 5000
    print(f"{seconds * 1e6:.2f} microseconds a span")
    assert seconds < 5e-6
