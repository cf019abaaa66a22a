"""Trajectories cut at the start of a step: where a trainer lets critiques and continuations branch off.

The session's own rules decide what the state was there: the recorded trajectory is played through a session again, up
to the step, and the history is then the recorded one, cut at that place.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caddie_sdk.commands import RunTools, ToolResult
from caddie_sdk.critique import Critique
from caddie_sdk.errors import CaddieError, DataError, SessionError
from caddie_sdk.history import History, Node
from caddie_sdk.messages import text_of
from caddie_sdk.session import Session
from caddie_sdk.tracing.sink import Trace
from caddie_sdk.trajectory import Event, read_trajectory


@dataclass(frozen=True, slots=True)
class Prefix:
    """A trajectory s_k: the task and the first k steps with their observations.

    Attributes:
        k: steps taken so far; the agent is about to take step k, counted from 0.
        session: waits for the agent's model, with the budget and the consultations of that moment. Token counts are
            those of the critic only: what each call of the agent cost is not in a recording.
        consulted: whether a consultation took place at step k of the recording.
    """

    k: int
    session: Session
    consulted: bool

    def events(self) -> tuple[Event, ...]:
        """The trajectory as a critic's prompt is rendered from it."""
        return read_trajectory(self.session.history.path(), self.session.consultations)


def prefixes(recorded: Session) -> Iterator[Prefix]:
    """Every prefix of the latest trajectory of a session, shortest first; one for each step the agent acted at.

    Raises:
        SessionError: the recording does not follow from the session's rules (another version, an edited history).
    """
    path = recorded.history.path()
    problem: SessionError | None = None
    # A history that somebody else kept was observed: its protocol had no say in it.
    for observing, start in itertools.product((False, True), _starts(path)):
        try:
            yield from list(_played(_Play(recorded, path, start, observing)))
            return
        except SessionError as error:
            problem = problem or error
    if problem is not None:
        raise problem


def _played(play: _Play) -> Iterator[Prefix]:
    # What follows the last action decides nothing any more; work that was stopped from outside ends irregularly there.
    last = max((index for index, node in enumerate(play.path) if node.kind == "action"), default=-1)
    done = -1
    while play.position <= last:
        node = play.upcoming()
        if play.session.step > done and play.at_start_of_step() and node.kind in ("action", "request", "advice"):
            done = play.session.step
            yield play.prefix()
        try:
            play.go_on(node)
        except SessionError:
            raise
        except CaddieError as error:
            raise SessionError(str(error)) from error


def prefix_lines(
    trace: Trace, steps: Container[int] | None = None, *, only_consulted: bool = False, where: tuple[str, int] = ("", 0)
) -> Iterator[dict[str, Any]]:
    """The prefixes of a trace as plain JSON, one line of an export each.

    `session` loads with `Session.load` and then waits for the agent's model; `events` is what a critic's prompt is
    rendered from; `outcome` is how the recorded trajectory went on to end.

    Args:
        trace: a recorded trajectory.
        steps: wanted lengths k; None takes all.
        only_consulted: only where a consultation took place.
        where: file and line of the trace, for errors.

    Raises:
        DataError: the recorded trajectory does not follow from the session's rules.
    """
    recorded = trace.load()
    outcome = {"answer": recorded.answer, "reason": recorded.reason, "steps": recorded.step}
    try:
        for prefix in prefixes(recorded):
            if (steps is not None and prefix.k not in steps) or (only_consulted and not prefix.consulted):
                continue
            yield {
                "version": 1,
                "id": trace.id,
                "k": prefix.k,
                "seed": recorded.config.seed,
                "consulted": prefix.consulted,
                "model": trace.model,
                "critic": trace.critic,
                "pack": trace.pack,
                "metadata": dict(trace.metadata),
                "session": prefix.session.dump(),
                "events": [event.dump() for event in prefix.events()],
                "outcome": {**outcome, "consultations": recorded.uses},
            }
    except SessionError as error:
        raise DataError(*where, "session", str(error)) from error


class _Play:
    """A recorded trajectory, played again."""

    def __init__(self, recorded: Session, path: Sequence[Node], start: int, observing: bool) -> None:
        self.recorded, self.path = recorded, path
        before = path[:start]
        earlier = _consulted(before)
        session = recorded.fork()
        session.history = _cut(recorded, before)
        # The state between two trajectories; `user_said` sets what a new one starts with.
        session.phase, session.turn = ("done" if before else "ready"), None
        session.trajectory -= 1
        session.session_uses -= max(len(recorded.consultations) - earlier, 0)
        session.consultations = recorded.consultations[:earlier]
        session.usage, session.critic_usage = type(session.usage)(), type(session.usage)()
        for record in session.consultations:
            session.critic_usage += Critique.load(record["critique"]).usage
        session.observing = observing
        self.session = session
        self.checked = start

    @property
    def position(self) -> int:
        """How many nodes of the recording have been played."""
        return len(self.session.history.path())

    def upcoming(self) -> Node:
        """The next recorded node."""
        self._compare()
        return self.path[self.position]

    def at_start_of_step(self) -> bool:
        """Whether the agent is about to act, perhaps after a consultation that the protocol wants first."""
        session = self.session
        return session.phase == "model" or (session.phase == "critic" and not (session.turn or {}).get("calls"))

    def prefix(self) -> Prefix:
        """The state at this place, with the recorded history up to here."""
        session = self.session.fork()
        session.history = _cut(self.recorded, self.path[: self.position])
        session.phase, session.turn, session.observing = "model", None, False
        session.synthetic = self.recorded.synthetic
        here = (session.trajectory, session.step)
        consulted = any((record["trajectory"], record["step"]) == here for record in self.recorded.consultations)
        return Prefix(session.step, session, consulted)

    def go_on(self, node: Node) -> None:
        """Let happen what happened next."""
        session = self.session
        match session.phase:
            case "critic":
                self._consult(node)
            case "tools":
                session.tools_returned(self._results())
            case "rejected":
                session.proceed()
            case "done" if node.kind == "task" and session.trajectory == self.recorded.trajectory:
                raise SessionError(f"the recording departs from the session's rules: a task begins at node {node.id}")
            case _ if node.kind == "task":
                session.user_said(node.message)
            case "model" if node.kind == "action":
                session.model_replied(node.message)
            case _ if node.kind in ("system", "action"):
                session.overheard(node.message)
            case phase:
                raise SessionError(f"node {node.id} ({node.kind}) of the recording cannot follow in phase {phase!r}")

    def _consult(self, node: Node) -> None:
        number = len(self.session.consultations)
        forced = not (self.session.turn or {}).get("calls")
        if forced and node.kind not in ("request", "advice"):
            # The recording was made without this consultation (under another protocol, or by a caller).
            self.session.phase, self.session.turn = "model", None
            return
        record = self.recorded.consultations[number] if number < len(self.recorded.consultations) else {}
        if record.get("trajectory") != self.session.trajectory:
            raise SessionError(f"the recording departs from the session's rules: it lacks consultation {number}")
        self.session.critic_replied(Critique.load(record["critique"]))

    def _results(self) -> list[ToolResult]:
        """The recorded observations of the calls that are to run."""
        command, turn = self.session.command, self.session.turn
        assert isinstance(command, RunTools)
        assert turn is not None
        rest = self.path[self.position :]
        by_id = {node.message.get("tool_call_id"): node for node in rest if node.message["role"] == "tool"}
        spans = next((_spans(node) for node in rest if node.kind == "observation"), [])
        in_text = dict(zip([call["id"] for call in turn["calls"] if not call.get("control")], spans, strict=False))
        results = []
        for call in command.calls:
            if (node := by_id.get(call.id)) is not None:
                results.append(ToolResult(call.id, text_of(node.message), bool(node.meta.get("error"))))
            elif call.id in in_text:
                results.append(ToolResult(call.id, in_text[call.id]))
        return results

    def _compare(self) -> None:
        """What the session has written since must be what was recorded; ids of its own making may differ."""
        played = self.session.history.path()
        for index in range(self.checked, len(played)):
            if index >= len(self.path) or _essence(played[index]) != _essence(self.path[index]):
                raise SessionError(f"the recording departs from the session's rules at message {index}")
        self.checked = len(played)


def _starts(path: Sequence[Node]) -> list[int]:
    """Where the latest trajectory may begin, likeliest first.

    A user may speak within a trajectory too, and the history does not tell that from a new task at the same step. What
    is certain: a task begins a trajectory where there was none, after an action that ended one, and where the count of
    steps starts over. Later ones are tried when the recording does not follow from that.
    """
    tasks = [index for index, node in enumerate(path) if node.kind == "task" and node.step == 0]
    certain = [at for at in tasks if at == 0 or path[at - 1].kind in ("system", "action") or path[at - 1].step > 0]
    return [at for at in tasks if at >= (certain or tasks)[-1]]


def _consulted(path: Sequence[Node]) -> int:
    """How many consultations a history tells of."""
    return 1 + max((node.meta["consultation"] for node in path if "consultation" in node.meta), default=-1)


def _cut(recorded: Session, path: Sequence[Node]) -> History:
    """The recorded history up to a place, without what came after it or on other branches."""
    dump = recorded.history.dump()
    kept = {node.id for node in path}
    nodes = [item for item in dump["nodes"] if item["id"] in kept]
    return History.load({**dump, "head": path[-1].id if path else None, "archived": [], "nodes": nodes})


def _essence(node: Node) -> tuple[Any, ...]:
    message: Mapping[str, Any] = node.message
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return node.kind, node.step, message["role"], message.get("content"), calls


def _spans(node: Node) -> list[str]:
    """The tools' own words in an observation of a text format."""
    text = text_of(node.message)
    return [text[start:end] for start, end in node.meta.get("spans", ())]
