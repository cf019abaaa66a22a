"""The LangGraph shell: an agent with `call_critic` and `request_feedback`, as a compiled graph.

The graph's state is plain JSON: the session's dump, and beside it what a caller wants to read. Any checkpointer
can store it, and a thread goes on in another process from whatever node it had reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.config import get_config, get_stream_writer
from langgraph.errors import GraphBubbleUp, GraphInterrupt
from langgraph.func import task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.managed import RemainingSteps
from typing_extensions import TypedDict  # pydantic makes JSON schemas of no other kind before Python 3.12

from caddie_sdk import _blocking, tracing
from caddie_sdk.actions import Call
from caddie_sdk.budget import Budget
from caddie_sdk.commands import CallModel, Consult, Reject, RunTools
from caddie_sdk.config import CALL_CRITIC, REQUEST_FEEDBACK, SessionConfig
from caddie_sdk.critic import Critic
from caddie_sdk.endpoint import ChatEndpoint
from caddie_sdk.errors import ConfigError, ContextOverflow, MessageError
from caddie_sdk.intervention import Intervention, Never, parse_protocol
from caddie_sdk.messages import Message, canonical, profile_for, wire
from caddie_sdk.messages import profile as profile_named
from caddie_sdk.model import ChatModel
from caddie_sdk.records import RecordError
from caddie_sdk.session import Session
from caddie_sdk.shells.consult import aconsult
from caddie_sdk.shells.langchain import LangChainModel, to_canonical, to_tools
from caddie_sdk.shells.loop import ask_model, run_call
from caddie_sdk.shells.terms import check_guards
from caddie_sdk.tools import Tool

_log = logging.getLogger(__name__)

DEFAULT_MAX_STEPS = 40
_DURABLE = {"__pregel_durability": "sync"}
"""LangGraph writes checkpoints behind the next node's back unless told otherwise; a process killed there would run the
tools of the node before once more. This is where its own `durability=` argument ends up, and that argument wins."""
_RECURSION_LIMIT = 10_000
"""LangGraph's own limit counts nodes, not steps; the session's `max_steps` is the limit that matters."""


def _incoming(_: Sequence[Message], new: Any) -> list[Message]:
    """Reducer of `messages`: what is written takes the place of what was, as plain JSON."""
    return to_canonical(new)


class AgentInput(TypedDict):
    """What `invoke` takes: the user's new turn, as text, dicts or LangChain messages."""

    messages: Any


class AgentState(TypedDict, total=False):
    """The graph's state, JSON only.

    Attributes:
        messages: in: the user's new messages; out: the whole conversation in OpenAI form.
        session: `Session.dump()`.
        answer: the final answer, or the best one so far.
        reason: why the work ended (`answer`, `max_steps`, `context_overflow`, ...).
        consultations: one record per consultation: step, control, trigger, critique.
        usage: tokens so far, `{"agent": ..., "critic": ...}`.
    """

    messages: Annotated[list[Message], _incoming]
    session: dict[str, Any]
    answer: str | None
    reason: str
    consultations: list[dict[str, Any]]
    usage: dict[str, dict[str, int]]
    remaining_steps: RemainingSteps


class AgentOutput(TypedDict, total=False):
    """What `invoke` returns."""

    messages: list[dict[str, Any]]
    answer: str | None
    reason: str
    consultations: list[dict[str, Any]]
    usage: dict[str, dict[str, int]]


def create_caddie_agent(
    model: ChatModel | BaseChatModel | str,
    tools: Sequence[Tool | BaseTool | Callable[..., Any]] = (),
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    critic: Critic | None = None,
    feedback: Critic | None = None,
    system: str = "",
    examples: Sequence[Message] = (),
    protocol: Intervention | str = "self-call",
    action_format: str = "tool-calls",
    budget: Budget | None = None,
    profile: str | None = None,
    on_error: str = "continue",
    seed: int = 0,
    checkpointer: Any = None,
    traces: tracing.TraceSink | None = None,
    interrupt_before: Sequence[str] | None = None,
    interrupt_after: Sequence[str] | None = None,
    name: str = "caddie",
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """A LangGraph agent that may consult a critic while it works.

    Args:
        model: a model name at `base_url`, a LangChain chat model, or any `ChatModel`.
        tools: LangChain tools, Caddie tools, or functions with type hints and a docstring.
        base_url: the OpenAI-compatible server of a model given by name.
        api_key: its key.
        critic: answers `call_critic`: an outside critic, usually a trained one.
        feedback: answers `request_feedback`: usually the agent's own model in the critic role.
        system: the agent's system prompt.
        examples: user and assistant turns of a worked example, for very small models.
        protocol: when to consult; an `Intervention` or its text form (`self-call`, `windowed:1-10`, ...).
        action_format: `tool-calls`, or a text format (`caddie`, `cafe`) for models without function calling.
        budget: limits; by default the paper's, and 40 steps.
        profile: what the server needs on the wire; by default chosen from the model's name.
        on_error: `continue` goes on without advice when a consultation fails, `raise` raises.
        seed: source of the protocol's randomness.
        checkpointer: any LangGraph checkpointer; threads then survive restarts, and `interrupt` works in tools.
        traces: where each finished turn is recorded, for evals and training.
        interrupt_before, interrupt_after: nodes to pause at (`agent`, `tools`, `critic`).
        name: the graph's name.

    Returns:
        A compiled graph with `invoke`, `ainvoke`, `stream` and `astream`. Input: `{"messages": ...}`.

    Raises:
        ConfigError: a setting is wrong; the message says which.
    """
    _check_types(tools, critic, feedback, system, protocol, budget)
    critics = {name: c for name, c in ((CALL_CRITIC, critic), (REQUEST_FEEDBACK, feedback)) if c is not None}
    rule = parse_protocol(protocol) if isinstance(protocol, str) else protocol
    ready = to_tools(tools)
    check_guards(rule, [tool.name for tool in ready])
    config = SessionConfig(
        tools=tuple(tool.schema() for tool in ready),
        system=system,
        examples=_shown(examples),
        format=action_format,
        protocol=rule if critics else Never(),
        budget=budget or Budget(max_steps=DEFAULT_MAX_STEPS),
        controls=tuple(critics),
        profile=profile or _profile_name(model),
        on_error=on_error,  # type: ignore[arg-type]  # SessionConfig checks it and says what is wrong
        seed=seed,
    )
    nodes = _Nodes(
        config=config,
        model=_chat_model(model, base_url, api_key),
        tools={tool.name: tool for tool in ready},
        critics=critics,
        traces=traces,
    )
    return _compiled(nodes.graph(), name, checkpointer, interrupt_before, interrupt_after)


def _compiled(
    builder: StateGraph[Any, Any, Any, Any],
    name: str,
    checkpointer: Any,
    before: Sequence[str] | None,
    after: Sequence[str] | None,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    try:
        compiled = builder.compile(
            checkpointer=checkpointer,
            interrupt_before=_pauses("interrupt_before", before, builder.nodes),
            interrupt_after=_pauses("interrupt_after", after, builder.nodes),
            name=name,
        )
    except TypeError as error:
        raise ConfigError(f"checkpointer: {error}") from error
    graph = _Agent(**vars(compiled))  # as LangGraph's own `copy` does
    # Without a checkpointer LangGraph waits for a write that never was, and fails.
    return graph.with_config(recursion_limit=_RECURSION_LIMIT, configurable=_DURABLE if checkpointer else {})


def _check_types(tools: Any, critic: Any, feedback: Any, system: Any, protocol: Any, budget: Any) -> None:
    """What a type checker would say, for those who run none: ConfigError names the setting."""
    if not isinstance(tools, list | tuple):
        raise ConfigError(f"tools must be a list of tools, not {tools!r}")
    for name, given in (("critic", critic), ("feedback", feedback)):
        if given is not None and (isinstance(given, type) or not isinstance(given, Critic)):
            raise ConfigError(f"{name} must be a Critic, with critique() and acritique(), not {given!r}")
    if not isinstance(system, str):
        raise ConfigError(f"system must be a text, not {system!r}")
    if not isinstance(protocol, str) and not all(
        hasattr(protocol, part) for part in ("self_call", "spec", "before_step", "guards")
    ):
        raise ConfigError(f"protocol must be an Intervention or its text form, not {protocol!r}")
    if not isinstance(budget, Budget | None):
        raise ConfigError(f"budget must be a Budget, not {budget!r}")


def _shown(examples: Any) -> tuple[Message, ...]:
    if not isinstance(examples, list | tuple):
        raise ConfigError(f"examples must be a list of messages, not {examples!r}")
    try:
        return tuple(canonical(example) for example in examples)
    except MessageError as error:
        raise ConfigError(f"examples: {error}") from error


def _pauses(setting: str, names: Sequence[str] | None, nodes: Iterable[str]) -> list[str] | None:
    chosen, known = [names] if isinstance(names, str) else list(names or ()), list(nodes)
    for name in chosen:
        if name not in known:
            raise ConfigError(f"{setting}: there is no node {name!r}; this agent has {', '.join(known)}")
    return chosen or None


def _chat_model(model: ChatModel | BaseChatModel | str, base_url: str | None, api_key: str | None) -> ChatModel:
    if isinstance(model, BaseChatModel):
        return LangChainModel(model)
    if isinstance(model, str):
        if not base_url:
            raise ConfigError(f"the model {model!r} is given by name, so base_url must say where it is served")
        return ChatEndpoint(base_url, model, api_key=api_key)
    if isinstance(model, type) or not isinstance(model, ChatModel):
        raise ConfigError(f"model must be a name, a LangChain chat model or a ChatModel, not {model!r}")
    return model


def _profile_name(model: Any) -> str:
    known = model if isinstance(model, str) else getattr(model, "model", None) or getattr(model, "model_name", "")
    return profile_for(str(known)).name


class _Agent(CompiledStateGraph[Any, Any, Any, Any]):
    """The compiled graph, with one span around each run. `invoke` and `ainvoke` stream as well."""

    def _span(self, config: RunnableConfig | None) -> tracing.Span:
        thread = ((config or {}).get("configurable") or {}).get("thread_id")
        return tracing.invoke_agent(self.get_name(), conversation="" if thread is None else str(thread))

    def stream(self, input: Any, config: RunnableConfig | None = None, **settings: Any) -> Iterator[Any]:
        """See `CompiledStateGraph.stream`."""
        chunks: Any = super().stream(input, config, **settings)
        with self._span(config).ending() as run, closing(chunks):
            while True:
                with run.current():  # never across a yield: the caller's own spans are not inside ours
                    try:
                        chunk = next(chunks)
                    except StopIteration:
                        return
                yield chunk

    async def astream(self, input: Any, config: RunnableConfig | None = None, **settings: Any) -> AsyncIterator[Any]:
        """See `CompiledStateGraph.astream`."""
        chunks: Any = super().astream(input, config, **settings)
        with self._span(config).ending() as run:
            try:
                while True:
                    with run.current():
                        try:
                            chunk = await anext(chunks)
                        except StopAsyncIteration:
                            return
                    yield chunk
            finally:
                with suppress(RuntimeError):  # a loop that shuts down closes the inner generator itself, meanwhile
                    await chunks.aclose()


_Work = Callable[[Any], Coroutine[Any, Any, dict[str, Any]]]


class _Node(Runnable[Any, Any]):
    """A graph node from a coroutine function. Its blocking twin waits for the same coroutine, if it has no own.

    `record` is told of each update that finishes a turn, off the event loop.
    """

    def __init__(
        self,
        name: str,
        arun: _Work,
        run: Callable[[Any], dict[str, Any]] | None = None,
        record: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.name, self._arun, self._run, self._record = name, arun, run, record

    def invoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> dict[str, Any]:
        update = self._run(input) if self._run else _blocking.run(self._arun(input))
        if self._record is not None and update["session"]["phase"] == "done":
            self._record(update["session"])
        return update

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **_: Any) -> dict[str, Any]:
        update = await self._arun(input)
        if self._record is not None and update["session"]["phase"] == "done":
            await asyncio.to_thread(self._record, update["session"])
        return update


@dataclass(frozen=True)
class _Nodes:
    """The graph's nodes: each loads the session, carries out one command, and stores the session again."""

    config: SessionConfig
    model: ChatModel
    tools: Mapping[str, Tool]
    critics: Mapping[str, Critic]
    traces: tracing.TraceSink | None = None

    def graph(self) -> StateGraph[Any, Any, Any, Any]:
        builder: StateGraph[Any, Any, Any, Any] = StateGraph(
            AgentState, input_schema=AgentInput, output_schema=AgentOutput
        )
        record = self._record if self.traces is not None else None
        builder.add_node("intake", _Node("intake", self.intake, record=record))
        builder.add_node("agent", _Node("agent", self.agent, record=record))
        critic = ["critic"] if self.critics else []
        tools = ["tools"] if self.tools else []
        builder.add_edge(START, "intake")
        builder.add_conditional_edges("intake", _route, ["agent", *critic, END])
        builder.add_conditional_edges("agent", _route, ["agent", *tools, *critic, END])
        if tools:
            builder.add_node("tools", _Node("tools", self.atools, self.run_tools, record))
            builder.add_conditional_edges("tools", _route, ["agent", *critic, END])
        if critic:
            builder.add_node("critic", _Node("critic", self.consult, record=record))
            builder.add_conditional_edges("critic", _route, ["agent", *tools, "critic", END])
        return builder

    async def intake(self, state: AgentState) -> dict[str, Any]:
        """Take the user's new messages into the session."""
        session = Session.load(state["session"], self.config) if state.get("session") else Session(self.config)
        said = state.get("messages") or []
        if not said or any(message["role"] != "user" for message in said):
            raise MessageError(
                "the agent takes new user messages only: {'messages': [{'role': 'user', 'content': ...}]}; "
                "a system prompt goes to create_caddie_agent(system=...), earlier turns live in the thread"
            )
        if session.phase in ("tools", "critic", "rejected"):
            # The user spoke again before an interrupted turn was over: close that turn, keep the history valid.
            session.stop("interrupted")
        # Several messages are one turn: after the first, a protocol may want its critic before anything else is said.
        session.user_said(said[0] if len(said) == 1 else wire(said, profile_named("compatible"))[0])
        # Until this turn has its own answer, nobody may take the earlier turn's for it.
        return {"answer": None, "reason": "", **self._update(session, state)}

    async def agent(self, state: AgentState) -> dict[str, Any]:
        """Ask the agent's model."""
        session = Session.load(state["session"], self.config)
        command = session.proceed() if isinstance(session.command, Reject) else session.command
        # The longest way back here: each critic, the tools, a consultation that the protocol wants, and this node.
        way = len(self.critics) + 1 + bool(self.critics) + 1
        if _left(state) <= way and session.phase == "model":
            # LangGraph's own limit is near: an answer now is worth more than an exception later.
            command = session.close()
        if not isinstance(command, CallModel):
            return self._update(session, state)
        try:
            reply = await ask_model(self.model, command)
        except ContextOverflow:
            session.stop("context_overflow")
        else:
            session.model_replied(reply.message, reply.usage)
            _write({"event": "reply", "message": canonical(reply.message)})
        return self._update(session, state)

    async def atools(self, state: AgentState) -> dict[str, Any]:
        """Run the calls of a turn side by side."""
        session, command = self._tool_turn(state)

        async def run(call: Call) -> dict[str, Any]:
            return asdict(await run_call(self.tools, call, passing=(GraphBubbleUp,)))

        repeatable = _as_task(run, command)
        outcomes = await asyncio.gather(*(repeatable(call) for call in command.calls), return_exceptions=True)
        return self._tools_ran(session, outcomes, state)

    def run_tools(self, state: AgentState) -> dict[str, Any]:
        """Blocking twin: LangGraph wants tasks of the kind its own call was."""
        session, command = self._tool_turn(state)

        def run(call: Call) -> dict[str, Any]:
            return asdict(_blocking.run(run_call(self.tools, call, passing=(GraphBubbleUp,))))

        repeatable = _as_task(run, command)
        if repeatable is run:
            return self._tools_ran(session, [run(call) for call in command.calls], state)
        futures = [repeatable(call) for call in command.calls]
        return self._tools_ran(session, [future.exception() or future.result() for future in futures], state)

    def _tool_turn(self, state: AgentState) -> tuple[Session, RunTools]:
        session = Session.load(state["session"], self.config)
        command = session.command
        assert isinstance(command, RunTools)
        _write({"event": "tools", "calls": [{"name": c.name, "arguments": c.raw} for c in command.calls]})
        return session, command

    def _tools_ran(self, session: Session, outcomes: Sequence[Any], state: AgentState) -> dict[str, Any]:
        if raised := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
            asked = [question for error in raised if isinstance(error, GraphInterrupt) for question in error.args[0]]
            # Siblings that interrupt are shown together, so that one `Command(resume={id: ...})` answers them all.
            raise GraphInterrupt(asked) if len(asked) > 1 else raised[0]
        session.tools_returned(outcomes)
        _write({"event": "observations", "results": [dict(result) for result in outcomes]})
        return self._update(session, state)

    async def consult(self, state: AgentState) -> dict[str, Any]:
        """Ask the critic."""
        session = Session.load(state["session"], self.config)
        command = session.command
        assert isinstance(command, Consult)
        session.critic_replied(await aconsult(self.critics, command.state))
        _write({"event": "consultation", **session.consultations[-1]})
        return self._update(session, state)

    def _update(self, session: Session, state: AgentState) -> dict[str, Any]:
        if session.phase != "done" and _left(state) <= 1:
            session.stop("max_steps")
        update: dict[str, Any] = {"session": session.dump()}
        if session.phase == "done":
            tracing.current_run().finished(session)
            update |= {
                "messages": session.transcript(),
                "answer": session.answer,
                "reason": session.reason,
                "consultations": list(session.consultations),
                "usage": {"agent": session.usage.dump(), "critic": session.critic_usage.dump()},
            }
        return update

    def _record(self, session: dict[str, Any]) -> None:
        """Write a finished turn to the traces. A full disk must not cost the user the answer."""
        assert self.traces is not None
        thread = get_config().get("configurable", {}).get("thread_id", "")
        try:
            name = tracing.model_name(self.model)
            self.traces.write(session, way="graph", model=name, conversation=str(thread))
        except RecordError as error:
            _log.warning("a trace is lost: %s", error)


def _as_task(run: Callable[[Call], Any], command: RunTools) -> Callable[[Call], Any]:
    """With siblings, a call whose neighbour interrupts must not run again on resume: LangGraph tasks see to it.

    Not only where this graph has a checkpointer: that of a graph around it does as well.
    """
    if len(command.calls) < 2:
        return run
    decorate: Any = task  # its own typing does not see through a closure
    return decorate(run, name="tool")  # type: ignore[no-any-return]


def _left(state: AgentState) -> int:
    """Nodes that LangGraph's own limit still allows, this one among them."""
    return state.get("remaining_steps", _RECURSION_LIMIT)


_NODE = {"model": "agent", "rejected": "agent", "tools": "tools", "critic": "critic", "done": END}


def _route(state: AgentState) -> str:
    return _NODE[state["session"]["phase"]]


def _write(event: dict[str, Any]) -> None:
    """Tell whoever streams with `stream_mode="custom"`."""
    get_stream_writer()(event)
