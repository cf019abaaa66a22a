"""The messages of a LangChain thread, told to a session; and what a session has said, as messages of the thread."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from caddie_sdk.commands import Finish
from caddie_sdk.config import CONTROLS
from caddie_sdk.critique import Critique
from caddie_sdk.errors import MessageError
from caddie_sdk.history import Node
from caddie_sdk.messages import Message, ToolCall, canonical, parse_arguments, wire_arguments
from caddie_sdk.relay.adopt import Adoption, Said, Unadopted
from caddie_sdk.session import NONE_LEFT, Session
from caddie_sdk.shells.langchain import read_reply, to_canonical

# ---------------------------------------------------------------------- thread to session


def said(message: BaseMessage) -> list[Said]:
    """A message of the thread as a session is told it.

    Raises:
        MessageError: it has no canonical form.
    """
    if isinstance(message, AIMessage):
        return [Said(read_reply(message).message)]
    if not isinstance(message, ToolMessage):
        return [Said(item) for item in to_canonical([message])]
    critique, kept = None, message.artifact
    if message.name in CONTROLS and isinstance(kept, Mapping) and "status" in kept:
        critique = Critique.load(kept)
    if isinstance(message.content, str):
        plain = {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
        return [Said(canonical(plain), (), critique)]
    return [Said(item, (), critique) for item in to_canonical([message])]


def tell(session: Session, messages: Sequence[BaseMessage]) -> bool:
    """Tell a session what has happened. False when it cannot be told, or when no model is to speak then."""
    starts = [at for at, message in enumerate(messages) if at and isinstance(message, HumanMessage)]
    try:
        for begin, end in pairwise([0, *starts, len(messages)]):
            turn, last = messages[begin:end], session.history.head
            if session.phase == "model" and turn and isinstance(turn[0], HumanMessage) and last and last.kind != "task":
                session.stop("answer")  # LangChain ended the work on a tool's result
            Adoption(session, [item for message in turn for item in said(message)]).tell()
    except (MessageError, Unadopted):
        return False
    return session.phase == "model"


def history(state: Sequence[BaseMessage], sent: Sequence[BaseMessage]) -> list[BaseMessage]:
    """The thread as it will be stored after this model call.

    Args:
        state: the messages of the graph's state.
        sent: those that are about to be sent. LangChain has answered calls there whose arguments could not be parsed.
    """
    messages = list(state)
    if not any(isinstance(message, AIMessage) and message.invalid_tool_calls for message in messages):
        return messages
    known = {message.tool_call_id for message in messages if isinstance(message, ToolMessage)}
    late = {m.tool_call_id: m for m in sent if isinstance(m, ToolMessage) and m.tool_call_id not in known}
    result: list[BaseMessage] = []
    for message in messages:
        result.append(message)
        if isinstance(message, AIMessage):
            result += [late.pop(call["id"]) for call in message.invalid_tool_calls if call["id"] in late]
    return result


def last_user_turn(messages: Sequence[BaseMessage]) -> int:
    """Where the last user turn begins."""
    return max((at for at, message in enumerate(messages) if isinstance(message, HumanMessage)), default=0)


def digest(messages: Sequence[BaseMessage]) -> str:
    """Equal for equal histories, in any process."""
    state = hashlib.blake2b(digest_size=12)
    for message in messages:
        facts: tuple[Any, ...] = (message.content,)
        if isinstance(message, AIMessage):
            facts = ("assistant", message.content, message.tool_calls, message.invalid_tool_calls)
        elif isinstance(message, ToolMessage):
            facts = ("tool", message.content, message.tool_call_id)
        else:
            facts = (message.type, message.content)
        state.update(repr(facts).encode("utf-8", "surrogatepass"))
    return state.hexdigest()


def sendable(messages: Sequence[BaseMessage]) -> list[Any]:
    """A copy as strict servers want it: the results of a turn in the order of its calls, all arguments JSON objects."""
    result: list[BaseMessage] = []
    ranks: dict[str | None, int] = {}
    group: list[BaseMessage] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            group.append(message)
            continue
        result += _ranked(group, ranks)
        group = []
        if isinstance(message, AIMessage):
            calls: list[Any] = [*message.tool_calls, *message.invalid_tool_calls]
            ranks = {call["id"]: rank for rank, call in enumerate(calls)}
        result.append(_parsed(message) if isinstance(message, AIMessage) else message)
    return result + _ranked(group, ranks)


def _ranked(group: list[Any], ranks: Mapping[str | None, int]) -> list[Any]:
    return sorted(group, key=lambda message: ranks.get(message.tool_call_id, len(ranks)))


def _parsed(message: AIMessage) -> AIMessage:
    """With calls that can be sent in place of those whose arguments were no JSON object."""
    if not message.invalid_tool_calls:
        return message
    calls = [
        _call(str(call["name"]), parse_arguments(wire_arguments(call["args"] or "")), call["id"])
        for call in message.invalid_tool_calls
    ]
    return message.model_copy(update={"tool_calls": [*message.tool_calls, *calls], "invalid_tool_calls": []})


def _call(name: str, arguments: Mapping[str, Any] | None, call_id: str | None) -> Any:
    return {"name": name, "args": dict(arguments or {}), "id": call_id, "type": "tool_call"}


# ---------------------------------------------------------------------- session to thread


def unasked(session: Session, mark: int) -> list[BaseMessage]:
    """Advice that nobody called for, stored since the place `mark` in the session's path: pairs of call and result."""
    path = session.history.path()
    nodes = [node for at, node in enumerate(path) if at >= mark and "request" in (node.kind, path[at - 1].kind)]
    return list(_messages(session, nodes))


class Turn:
    """A reply of the model, and what the session answers of it.

    Args:
        session: waits for the model.
        reply: what the model said.
    """

    def __init__(self, session: Session, reply: AIMessage) -> None:
        self._session, self._reply = session, reply
        self._at = len(session.history.path())
        read = read_reply(reply)
        session.model_replied(read.message, read.usage)

    def shown(self) -> list[BaseMessage]:
        """The reply, and after it all that the session has answered: advice, refusals, held calls.

        The calls that are left without an answer are for LangChain to run.
        """
        session = self._session
        stored = session.history.path()[self._at].message
        reply = _as_stored(self._reply, stored.get("tool_calls", ()))
        names = {call["id"]: call["name"] for call in reply.tool_calls}
        return [reply, *self._answers(names), *self._last_words(reply)]

    def _answers(self, names: Mapping[str | None, str]) -> Iterator[BaseMessage]:
        session = self._session
        if session.turn is None:
            yield from _messages(session, session.history.path()[self._at + 1 :], names)
            return
        for call in session.turn["calls"]:
            if call["do"] != "run":
                yield _result(session, call["id"], call["content"], call["name"], call.get("consultation"))

    def _last_words(self, reply: AIMessage) -> Iterator[BaseMessage]:
        """The session has ended the work on a reply with calls; LangChain ends on one without."""
        command = self._session.command
        if isinstance(command, Finish) and reply.tool_calls:
            yield AIMessage(command.answer or str(reply.text) or NONE_LEFT, id=_new_id())


def _as_stored(reply: AIMessage, calls: Sequence[ToolCall]) -> AIMessage:
    """The reply with the ids that the session gave to its calls.

    Control calls take no arguments, so broken ones are none: they become calls that can be answered.
    """
    parsed, broken = list(reply.tool_calls), list(reply.invalid_tool_calls)
    same = all(call["id"] == stored["id"] for call, stored in zip([*parsed, *broken], calls, strict=True))
    changes: dict[str, Any] = {} if reply.id else {"id": _new_id()}
    if not same or any(call["name"] in CONTROLS for call in broken):
        ids = iter([call["id"] for call in calls])
        parsed = [{**call, "id": next(ids)} for call in parsed]
        broken = [{**call, "id": next(ids)} for call in broken]
        for call in [call for call in broken if call["name"] in CONTROLS]:
            broken.remove(call)
            parsed.append(_call(str(call["name"]), {}, call["id"]))
        changes |= {"tool_calls": parsed, "invalid_tool_calls": broken}
    return reply.model_copy(update=changes) if changes else reply


def _messages(session: Session, nodes: Sequence[Node], names: Mapping[str | None, str] | None = None) -> Iterator[Any]:
    """Stored requests, and results of control or held calls, as messages of the thread."""
    known = dict(names or {})
    for node in nodes:
        message = node.message
        if node.kind == "request":
            known |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
            yield _request(message)
        elif message["role"] == "tool":
            call_id = message["tool_call_id"]
            number = node.meta.get("consultation")
            yield _result(session, call_id, str(message["content"]), known.get(call_id, ""), number)


def _request(message: Message) -> AIMessage:
    calls = [
        _call(call["function"]["name"], parse_arguments(call["function"]["arguments"]), call["id"])
        for call in message["tool_calls"]
    ]
    return AIMessage("", tool_calls=calls, id=_new_id())


def _result(session: Session, call_id: str, content: str, name: str, number: int | None) -> ToolMessage:
    """The result of one call; with the critique as its artifact where there is one."""
    critique = None if number is None else session.consultations[number]["critique"]
    return ToolMessage(content, tool_call_id=call_id, name=name, artifact=critique, id=_new_id())


def _new_id() -> str:
    return str(uuid4())
