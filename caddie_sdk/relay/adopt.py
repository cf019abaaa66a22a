"""A history that others keep, told to a session as events that have already happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from caddie_sdk.budget import Budget
from caddie_sdk.commands import Consult, RunTools, ToolResult
from caddie_sdk.config import CALL_CRITIC, SessionConfig
from caddie_sdk.critique import Critique
from caddie_sdk.errors import ConfigError, SessionError
from caddie_sdk.intervention import Intervention, SelfCall
from caddie_sdk.messages import Message, text_of
from caddie_sdk.session import Session

BETWEEN = "\n\n"
"""Stands between texts that are told as one: several system messages, several model turns."""


class Unadopted(Exception):
    """The history cannot be told to a session. The text is a short reason."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a caller's history.

    Attributes:
        message: in canonical form.
        raw: as the caller wrote it: one chat message, or several items of the Responses API.
        critique: what stands behind a tool message that answers a control call, where callers see those.
        mark: what the message must share with another to count as the same; see `ledger.fingerprint`.
    """

    message: Message
    raw: tuple[Any, ...] = ()
    critique: Critique | None = None
    mark: bytes = b""


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for all requests: see `SessionConfig`."""

    protocol: Intervention = field(default_factory=SelfCall)
    budget: Budget = field(default_factory=Budget)
    controls: tuple[str, ...] = (CALL_CRITIC,)
    on_error: str = "continue"


def leading_system(said: Sequence[Said]) -> list[Said]:
    """The system messages at the head of a history; together they are the agent's system prompt."""
    return list(takewhile(lambda item: item.message["role"] == "system", said))


def configure(system: Sequence[Said], tools: Iterable[Mapping[str, Any]], terms: Terms, seed: int = 0) -> SessionConfig:
    """The configuration of a session for a history that others keep.

    Args:
        system: `leading_system` of the history.
        tools: schemas of the caller's function tools, in chat form.
        terms: protocol, limits, control tools.
        seed: source of the protocol's randomness.

    Raises:
        Unadopted: the tools cannot be told apart, or one has the name of a control tool.
    """
    try:
        return SessionConfig(
            tools=tuple(tools),
            system=BETWEEN.join(text_of(item.message) for item in system),
            protocol=terms.protocol,
            # When the work ends is the caller's to say.
            budget=replace(terms.budget, max_steps=None, min_steps=0),
            controls=terms.controls,
            profile="openai",
            on_error=terms.on_error,  # type: ignore[arg-type]  # SessionConfig checks it
            seed=seed,
            caller_owned=True,
        )
    except ConfigError as error:
        raise Unadopted(str(error)) from error


def adopted(said: Sequence[Said], tools: Iterable[Mapping[str, Any]], terms: Terms, seed: int = 0) -> Session:
    """A session that has been told a history. What comes next is what its `resume()` says.

    Raises:
        Unadopted: the history has no reading as a trajectory.
    """
    system = leading_system(said)
    session = Session(configure(system, tools, terms, seed))
    Adoption(session, said).tell(len(system))
    return session


class Adoption:
    """Tells a history to a session.

    Args:
        session: new, or at the end of what the history continues. Its configuration says `caller_owned`.
        said: the history, oldest first.
        keys: a key for each message, under which a turn that the caller does not see in full may be kept.
        entries: those turns, by key.

    Attributes:
        places: position in the session's path to number of the caller's message there.
        kept: position to the form its author wrote, for turns that were put back.
    """

    def __init__(
        self,
        session: Session,
        said: Sequence[Said],
        keys: Sequence[str] = (),
        entries: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._session, self._said = session, said
        self._keys, self._entries = keys or [""] * len(said), entries or {}
        self.places: dict[int, int] = {}
        self.kept: dict[int, tuple[Any, ...]] = {}

    def raw(self) -> dict[int, tuple[Any, ...]]:
        """Position in the session's path to the form that the author of the message there wrote."""
        return {**{at: self._said[number].raw for at, number in self.places.items()}, **self.kept}

    def tell(self, start: int = 0) -> None:
        """Tell everything from the message number `start` on.

        Raises:
            Unadopted: it has no reading as a trajectory.
        """
        number = start
        try:
            with self._session.observe():
                while number < len(self._said):
                    number += self._one(number)
        except SessionError as error:
            raise Unadopted(str(error)) from error

    def _one(self, number: int) -> int:
        """Tell one message, or the results of one turn; returns how many messages that were."""
        item, session = self._said[number], self._session
        role, may_act = item.message["role"], session.phase == "model"
        if role == "tool":
            return self._results(number)
        if role == "user":
            session.user_said(item.message)
        elif role == "system":
            session.overheard(item.message)
        elif may_act and (entry := self._entries.get(self._keys[number])) is not None:
            self.kept |= put_back(session, entry)
            return 1
        elif may_act and not self._goes_on(number):
            at = len(session.history.path())
            session.model_replied(item.message)
            self.places[at] = number
            return 1 + self._consultations(number + 1)
        else:
            session.overheard(item.message)
        self.places[len(session.history.path()) - 1] = number
        return 1

    def _goes_on(self, number: int) -> bool:
        """Whether a text is followed by more of the same speaker, as when text and calls come apart."""
        following = self._said[number + 1 : number + 2]
        return bool(following) and following[0].message["role"] == "assistant"

    def _group(self, number: int) -> list[Said]:
        """The tool messages from here on."""
        group = []
        for item in self._said[number:]:
            if item.message["role"] != "tool":
                break
            group.append(item)
        return group

    def _consultations(self, number: int) -> int:
        """Answer the control calls of the turn just told from the results that follow; how many messages if that
        was the whole turn."""
        group = {item.message["tool_call_id"]: item for item in self._group(number)}
        session, answered = self._session, False
        while isinstance(session.command, Consult) and session.turn is not None:
            due = next(call for call in session.turn["calls"] if call["do"] == "consult" and "content" not in call)
            item = group.get(due["id"])
            if item is None:
                raise Unadopted("a consultation has no result")
            answered = True
            if item.critique is None:
                session.dismissed(text_of(item.message))
            else:
                session.critic_replied(item.critique)
        return len(group) if answered and session.phase != "tools" else 0

    def _results(self, number: int) -> int:
        """All results of one turn, matched by id, or by order where ids are missing or not the ones handed out."""
        command, session = self._session.command, self._session
        hidden = {call["id"] for call in session.turn["calls"] if call["do"] != "run"} if session.turn else set()
        whole = list(enumerate(self._group(number), number))
        group = [(n, item.message) for n, item in whole if item.message["tool_call_id"] not in hidden]
        if not isinstance(command, RunTools) or len(command.calls) != len(group):
            raise Unadopted("the tool results do not match the calls before them")
        wanted, given = [call.id for call in command.calls], [message["tool_call_id"] for _, message in group]
        by_id = dict(zip(given if set(given) == set(wanted) else wanted, group, strict=True))
        at = len(session.history.path())
        session.tools_returned(ToolResult(call_id, text_of(message)) for call_id, (_, message) in by_id.items())
        for index, node in enumerate(session.history.path()[at:], at):
            if (found := by_id.get(node.message.get("tool_call_id", ""))) is not None:
                self.places[index] = found[0]
        return len(whole)


def put_back(session: Session, entry: Mapping[str, Any]) -> dict[int, tuple[Any, ...]]:
    """Play a kept turn back; returns the forms its authors wrote, by position in the session's path."""
    at = len(session.history.path())
    session.advance(entry["delta"])
    return {at + int(number): tuple(raw) for number, raw in entry["raw"].items()}
