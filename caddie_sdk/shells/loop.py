"""The bare loop around a session: the smallest shell, and the one the others are measured against."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping

from caddie_sdk import _blocking, tracing
from caddie_sdk.actions import Call
from caddie_sdk.commands import CallModel, Command, Consult, Finish, Reject, RunTools, ToolResult
from caddie_sdk.critic import Critic
from caddie_sdk.errors import ContextOverflow
from caddie_sdk.model import ChatModel, Reply
from caddie_sdk.session import Session
from caddie_sdk.shells.consult import aconsult, being_cancelled, check_controls
from caddie_sdk.tools import Tool


async def run_call(tools: Mapping[str, Tool], call: Call, passing: tuple[type[BaseException], ...] = ()) -> ToolResult:
    """Run one tool call. A tool that raises gives an error the agent can read; `passing` ones get through."""
    with tracing.execute_tool(call.name, call.id, call.raw) as span:
        try:
            content = await tools[call.name](**(call.arguments or {}))
        except passing:
            span.end()  # no failure: the tool waits for somebody
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if being_cancelled(error):
                raise
            span.fail(error)
            return ToolResult(call.id, f"The tool failed: {type(error).__name__}: {error}", is_error=True)
        span.returned(content)
        return ToolResult(call.id, content)


async def ask_model(model: ChatModel, call: CallModel) -> Reply:
    """One call of the agent's model."""
    with tracing.chat(model, call) as span:
        reply = await model.acomplete(call)
        span.replied(reply.message, usage=reply.usage, model=reply.model, truncated=reply.truncated)
        return reply


async def asteps(
    session: Session,
    task: str | None,
    model: ChatModel,
    tools: Iterable[Tool] = (),
    critics: Mapping[str, Critic] | None = None,
) -> AsyncIterator[Command]:
    """Drive a session to its end, yielding each command before it is carried out; the last one is `Finish`.

    Args:
        session: a new session, one that has finished a turn, or one loaded in the middle of its work.
        task: the user's turn; None continues a session where it stands.
        model: the agent's model.
        tools: what the session's tool schemas name.
        critics: control tool name to critic.

    Raises:
        EndpointError: the agent's own model failed; the session stays loadable at that point.
    """
    by_name, critics = {tool.name: tool for tool in tools}, critics or {}
    if session.config.protocol.spec != "off":
        check_controls(session.config.controls, critics)
    command = session.command if task is None else session.user_said(task)
    with tracing.invoke_agent(model=model).ending() as run:
        while not isinstance(command, Finish):
            yield command
            with run.current():
                command = await _carry_out(session, command, model, by_name, critics)
        run.finished(session)
    yield command


async def _carry_out(
    session: Session, command: Command, model: ChatModel, tools: Mapping[str, Tool], critics: Mapping[str, Critic]
) -> Command:
    match command:
        case CallModel():
            try:
                reply = await ask_model(model, command)
            except ContextOverflow:
                return session.stop("context_overflow")
            return session.model_replied(reply.message, reply.usage)
        case RunTools(calls):
            return session.tools_returned(await asyncio.gather(*(run_call(tools, call) for call in calls)))
        case Consult(state):
            return session.critic_replied(await aconsult(critics, state))
        case Reject():
            return session.proceed()
        case Finish():
            return command


async def arun(
    session: Session,
    task: str | None,
    model: ChatModel,
    tools: Iterable[Tool] = (),
    critics: Mapping[str, Critic] | None = None,
) -> Finish:
    """Drive a session to its end; see `asteps`."""
    last: Command | None = None
    async for command in asteps(session, task, model, tools, critics):
        last = command
    assert isinstance(last, Finish)
    return last


def run(
    session: Session,
    task: str | None,
    model: ChatModel,
    tools: Iterable[Tool] = (),
    critics: Mapping[str, Critic] | None = None,
) -> Finish:
    """Blocking twin of `arun`."""
    return _blocking.run(arun(session, task, model, tools, critics))
