"""`CriticMiddleware`: an agent of LangChain's `create_agent` may consult a critic while it works.

All of it happens around the model call, in the graph's own model node. The session's dump lies in the graph's state, so
any checkpointer keeps it; the middleware itself remembers nothing about a thread. Advice becomes a message of the
thread, so it stays in view, and every consultation ends the node: it is stored before anything else is tried.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, NotRequired

try:
    from langchain.agents.middleware import (
        AgentMiddleware,
        AgentState,
        ExtendedModelResponse,
        ModelRequest,
        ModelResponse,
    )
    from langchain.agents.middleware.types import PrivateStateAttr
except ImportError as error:
    from caddie_sdk.errors import MissingExtra

    raise MissingExtra("CriticMiddleware", "langchain") from error
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.types import Command

from caddie_sdk.budget import Budget
from caddie_sdk.commands import Consult
from caddie_sdk.config import CONTROLS, SessionConfig, tool_name
from caddie_sdk.critic import ConsultState, Critic
from caddie_sdk.critique import Critique
from caddie_sdk.errors import ConfigError, SessionError
from caddie_sdk.intervention import Intervention
from caddie_sdk.relay.adopt import Unadopted, configure
from caddie_sdk.relay.exchange import function_tools
from caddie_sdk.session import NOT_OFFERED, Session
from caddie_sdk.shells.consult import aconsult, consult
from caddie_sdk.shells.terms import agree, check_guards, named_critics
from caddie_sdk.shells.thread import Turn, digest, history, last_user_turn, said, sendable, tell, unasked

log = logging.getLogger("caddie.middleware")

KEY = "caddie"
"""Where the session lies in the graph's state: `{"session": Session.dump(), "count", "digest", "last"}`."""


class CriticState(AgentState[Any]):
    """The agent's state with the session in it."""

    caddie: NotRequired[Annotated[dict[str, Any], PrivateStateAttr]]


Flow = Generator[ConsultState | ModelRequest[Any], Any, Any]
"""Asks for critiques and for model calls; returns what the model node is to store."""


class CriticMiddleware(AgentMiddleware[Any, Any, Any]):
    """Lets an agent of `create_agent` consult a critic, and holds back what must wait for advice.

    Put it before middleware that filters tools, so that it sees all of them.

    Args:
        critic: answers `call_critic`.
        feedback: answers `request_feedback`.
        protocol: when to consult; an `Intervention` or its text form (`self-call`, `guarded:refund`, ...).
        budget: limits; when the work ends is LangChain's to say, so `max_steps` and `min_steps` mean nothing here.
        on_error: `continue` goes on without advice when a consultation fails; `raise` raises ConsultationError.
        seed: source of the protocol's randomness.

    Raises:
        ConfigError: a setting is wrong; at the first model call, if a guarded tool does not exist or a tool has the
            name of a control tool.
    """

    state_schema = CriticState

    def __init__(
        self,
        critic: Critic | None = None,
        *,
        feedback: Critic | None = None,
        protocol: Intervention | str = "self-call",
        budget: Budget | None = None,
        on_error: str = "continue",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._critics = named_critics(critic, feedback, "CriticMiddleware")
        self._terms = agree(self._critics, protocol, budget, on_error)
        self._seed = seed
        # Without a tool to run, `create_agent` builds a graph that never comes back to the model.
        self.tools = [_stand_in(name) for name in self._critics]
        self._latest: tuple[list[Any], list[Any], SessionConfig] | None = None

    # ------------------------------------------------------------------ what LangChain calls

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]
    ) -> ExtendedModelResponse[Any]:
        """See `AgentMiddleware`."""
        flow = self._flow(request)
        answer: Any = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            asked = isinstance(step, ConsultState)
            answer = consult(self._critics, step) if asked else handler(step)  # type: ignore[arg-type]

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]
    ) -> ExtendedModelResponse[Any]:
        """See `AgentMiddleware`."""
        flow = self._flow(request)
        answer: Any = None
        while True:
            try:
                step = flow.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            asked = isinstance(step, ConsultState)
            answer = await (aconsult(self._critics, step) if asked else handler(step))  # type: ignore[arg-type]

    # ------------------------------------------------------------------ one pass through the model node

    def _flow(self, request: ModelRequest[Any]) -> Flow:
        own, messages = self._own(request), history(request.state["messages"], request.messages)
        found = self._session(request, own, messages)
        if found is None:
            return (yield request.override(tools=own, messages=sendable(request.messages)))
        session, mark = found
        session.resume()
        yield from self._consult(session, request)
        if shown := unasked(session, mark):
            # LangChain stores the advice and comes back here: the model node is the next one again.
            return self._result(session, messages, shown)
        response = yield self._sent(request, own, session)
        if not response.result or not isinstance(response.result[0], AIMessage):
            return response
        turn = Turn(session, response.result[0])
        yield from self._consult(session, request)
        return self._result(session, messages, turn.shown(), response)

    def _consult(self, session: Session, request: ModelRequest[Any]) -> Generator[ConsultState, Critique, None]:
        while isinstance(command := session.command, Consult):
            session.critic_replied((yield command.state))
            if request.runtime is not None:
                request.runtime.stream_writer({"event": "consultation", **session.consultations[-1]})

    def _sent(self, request: ModelRequest[Any], own: list[Any], session: Session) -> ModelRequest[Any]:
        """The request, with the control tools that the session offers now."""
        return request.override(tools=[*own, *session.controls_offered], messages=sendable(request.messages))

    def _result(
        self, session: Session, messages: Sequence[Any], shown: list[Any], response: ModelResponse[Any] | None = None
    ) -> ExtendedModelResponse[Any]:
        """What the model node stores: the messages, and the session that has been told them."""
        told, rest = [*messages, *shown], response.result[1:] if response else []
        structured = response.structured_response if response else None
        if structured is not None and tell(session, rest):
            told += rest
            session.stop("answer")
        kept = {"session": session.dump(), "count": len(told), "digest": digest(told), "last": shown[-1].id}
        return ExtendedModelResponse(ModelResponse([*shown, *rest], structured), Command(update={KEY: kept}))

    # ------------------------------------------------------------------ the thread's session

    def _session(self, request: ModelRequest[Any], own: list[Any], messages: list[Any]) -> tuple[Session, int] | None:
        """The session that has been told the thread, and where in its path begins what it was told just now."""
        config = self._config(request, own, messages)
        kept: Any = request.state.get(KEY)
        before = _loaded(kept, config)
        if before and kept["digest"] == digest(messages[: kept["count"]]):
            mark = len(before.history.path())
            if tell(before, messages[kept["count"] :]):
                return before, mark
        lead = len(list(takewhile(_is_system, messages)))
        for start in (lead, last_user_turn(messages)):
            session = Session(config)
            if tell(session, messages[start:]):
                if before := _loaded(kept, config):
                    _carry_over(session, before, kept["last"], messages)
                return session, len(session.history.path())
        log.warning("no advice for this model call: its messages have no reading as a trajectory")
        return None

    def _own(self, request: ModelRequest[Any]) -> list[Any]:
        """The agent's tools, without our stand-ins."""
        return [tool for tool in request.tools if not (getattr(tool, "metadata", None) or {}).get(KEY)]

    def _config(self, request: ModelRequest[Any], own: list[Any], messages: Sequence[Any]) -> SessionConfig:
        leading = [request.system_message] if request.system_message else []
        system = [*leading, *takewhile(_is_system, messages)]
        texts, latest = [message.content for message in system], self._latest
        if latest and latest[0] == texts and _same(latest[1], own):
            return latest[2]
        schemas = function_tools(tool if isinstance(tool, dict) else convert_to_openai_tool(tool) for tool in own)
        hint = " (middleware that filters tools belongs after CriticMiddleware)"
        check_guards(self._terms.protocol, [tool_name(schema) for schema in schemas], hint)
        try:
            config = configure([item for one in system for item in said(one)], schemas, self._terms, self._seed)
        except Unadopted as reason:
            raise ConfigError(str(reason)) from reason
        self._latest = texts, own, config
        return config


def _loaded(kept: Mapping[str, Any] | None, config: SessionConfig) -> Session | None:
    """The stored session under the present settings. None where there is none that this version can read."""
    try:
        return Session.load(kept["session"], config) if kept else None
    except SessionError as error:
        log.warning("a thread's session is read anew from its messages: %s", error)
        return None


def _carry_over(session: Session, before: Session, last_id: str, messages: Sequence[Any]) -> None:
    """The thread was shortened or edited: what has been counted and spent stays so.

    Args:
        session: has been told the thread as it is now.
        before: the session as it was stored.
        last_id: of the message that it was told last.
        messages: the thread as it is now.
    """
    ended, mark = before.phase == "done", len(before.history.path())
    last = next((at for at, message in enumerate(messages, 1) if message.id == last_id), None)
    new = [] if last is None else messages[last:]
    if last is not None and tell(before, new):
        session.advance(before.since(before.mark()))
        # Advice that waited for the tools to return went with the old history, and nobody has read it.
        session.fresh_advice = session.fresh_advice and not unasked(before, mark)
    else:
        if not ended and not any(isinstance(message, HumanMessage) for message in new):
            session.uses = max(session.uses, before.uses)
        session.session_uses = max(session.session_uses, before.session_uses)
    session.usage, session.critic_usage = before.usage, before.critic_usage


def _is_system(message: Any) -> bool:
    return isinstance(message, SystemMessage)


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


def _stand_in(name: str) -> StructuredTool:
    """The control tool as LangChain's tool node knows it. Its calls are answered before they get there."""

    def answer() -> str:
        return NOT_OFFERED

    return StructuredTool.from_function(answer, name=name, description=CONTROLS[name], metadata={KEY: True})
