"""Advice on a conversation that somebody else keeps, for one request: messages in, a critique out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from caddie_sdk.budget import Budget
from caddie_sdk.commands import Consult
from caddie_sdk.config import CALL_CRITIC, CONTROLS
from caddie_sdk.critic import ConsultState, Critic
from caddie_sdk.critique import SECTIONS, Critique, parse_critique
from caddie_sdk.errors import ConfigError, MessageError
from caddie_sdk.intervention import SelfCall
from caddie_sdk.messages import canonical, text_of
from caddie_sdk.relay.adopt import Adoption, Said, Terms, Unadopted, configure, leading_system
from caddie_sdk.relay.items import chat_tools, kind_of, read_items
from caddie_sdk.session import Session
from caddie_sdk.shells.consult import aconsult


async def advise(
    messages: str | Sequence[Any],
    tools: Sequence[Any],
    critics: Mapping[str, Critic],
    *,
    control: str = CALL_CRITIC,
    budget: Budget | None = None,
) -> Critique:
    """A critique of the conversation so far.

    Args:
        messages: the history, as chat messages or as items of the Responses API. It may end with a user turn, with a
            text of the assistant, or with the assistant's own call of the critic that this answers.
        tools: schemas of the agent's tools, in the form of either API.
        critics: control tool name to critic.
        control: which of them is asked.
        budget: limits; consultations that the history itself tells of count.

    Returns:
        A critique whose status says whether there is advice. A failed consultation raises nothing.

    Raises:
        ConfigError: there is no critic behind `control`.
        MessageError: the history or the tools have no reading as a trajectory; the text says why.
    """
    if control not in critics:
        raise ConfigError(f"there is no critic behind {control!r}; there is {', '.join(critics) or 'none'}")
    state = consult_state(messages, tools, tuple(critics), control=control, budget=budget)
    if state is None:
        return Critique(status="over_budget", detail="no consultation is left for this user turn")
    return await aconsult(critics, state)


def consult_state(
    messages: str | Sequence[Any],
    tools: Sequence[Any],
    controls: tuple[str, ...] = (CALL_CRITIC,),
    *,
    control: str = CALL_CRITIC,
    budget: Budget | None = None,
) -> ConsultState | None:
    """What a critic is shown of such a history; None when no consultation is left.

    Raises:
        MessageError: see `advise`.
    """
    terms = Terms(SelfCall(), budget or Budget(), controls)
    try:
        said = _read(messages)
        _check_results(said)
        session = _told(said, _schemas(tools), terms)
        return _state(session, said, control)
    except (Unadopted, MessageError, ConfigError) as error:
        raise MessageError(f"the conversation cannot be read: {error}") from error


def _read(messages: str | Sequence[Any]) -> list[Said]:
    """Chat messages or items, with the critiques that earlier consultations came to."""
    if not isinstance(messages, str | list | tuple) or not messages:
        raise MessageError("messages must be a list of chat messages or of Responses items, and not empty")
    for number, message in enumerate(messages if not isinstance(messages, str) else ()):
        if not isinstance(message, Mapping):
            raise MessageError(f"message {number} is a {type(message).__name__}, not an object")
    chat = not isinstance(messages, str) and any(
        item.get("tool_calls") or item.get("role") == "tool" for item in messages
    )
    if not chat:
        return _advised(read_items(messages))
    return _advised([_chat_message(number, message) for number, message in enumerate(messages)])


def _chat_message(number: int, message: Any) -> Said:
    if "role" not in message:
        raise MessageError(f"message {number} is a {kind_of(message)!r} item among chat messages: send one form")
    return Said(canonical(message), (message,))


def _advised(said: list[Said]) -> list[Said]:
    """Results of control calls that are well-formed critiques count as such."""
    asked = {
        call["id"]
        for item in said
        for call in item.message.get("tool_calls", ())
        if call["function"]["name"] in CONTROLS
    }
    return [_with_critique(item) if item.message.get("tool_call_id") in asked else item for item in said]


def _with_critique(item: Said) -> Said:
    critique = parse_critique(text_of(item.message), SECTIONS)
    return Said(item.message, item.raw, critique) if critique.ok else item


def _schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    if not isinstance(tools, list | tuple):
        raise MessageError("tools must be a list of tool schemas")
    chat = [dict(tool) for tool in tools if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)]
    schemas = chat or chat_tools(tools)
    return [schema for schema in schemas if schema["function"].get("name") not in CONTROLS]


def _told(said: Sequence[Said], tools: Sequence[Mapping[str, Any]], terms: Terms) -> Session:
    """A session that knows the history up to the assistant's turn that still waits for results, if there is one."""
    system = leading_system(said)
    session = Session(configure(system, tools, terms))
    Adoption(session, said[: _waiting(said)]).tell(len(system))
    return session


def _check_results(said: Sequence[Said]) -> None:
    """Say which call lacks its result, or which result its call; the turn at the end may still wait."""
    end, open_calls = _waiting(said), dict[str, str]()
    for item in said[:end]:
        message = item.message
        if message["role"] == "tool":
            if open_calls.pop(message["tool_call_id"], None) is None:
                raise MessageError(f"there is no open call {message['tool_call_id']!r} for a tool result to answer")
            continue
        if open_calls:
            call_id, name = next(iter(open_calls.items()))
            raise MessageError(f"the call {call_id!r} of {name!r} has no result before the next message")
        open_calls = {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}


def _waiting(said: Sequence[Said]) -> int:
    """Number of the last message with calls, where results are missing; the whole length where none are."""
    answered: set[str] = set()
    for number in range(len(said) - 1, -1, -1):
        message = said[number].message
        if message["role"] == "tool":
            answered.add(message["tool_call_id"])
            continue
        missing = {call["id"] for call in message.get("tool_calls", ())} - answered
        return number if missing else len(said)
    return len(said)


def _state(session: Session, said: Sequence[Said], control: str) -> ConsultState | None:
    if session.trajectory < 0:
        raise MessageError("there is no user message in it")
    if not session.remaining:
        return None
    waiting = _waiting(said)
    if waiting < len(said):
        with session.observe():
            command = session.model_replied(said[waiting].message)
        if isinstance(command, Consult) and command.state.control == control:
            return command.state
    return session.consult_state(control)


__all__ = ["advise", "consult_state"]
