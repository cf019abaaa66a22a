"""A history read as a trajectory: task, steps, advice, in the order in which a critic should see them.

The history holds messages; this module says what they mean, from the facts the session noted when it stored
them and never by looking for markers in text, which a tool's output could forge. The renderer, the records of
the command line and the evals all read trajectories here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from caddie_sdk.critique import Critique
from caddie_sdk.history import Node
from caddie_sdk.messages import text_of

EventKind = Literal["task", "user", "step", "proposal", "outcome", "advice", "answer", "note"]


@dataclass(frozen=True, slots=True)
class Action:
    """A call as the agent wrote it: tool name and arguments text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    `step` is an action with its observations. Where a consultation falls into a turn, the turn is told as
    `proposal` (what the agent is about to do), `advice`, then `outcome` (the observations), so that the story
    up to a consultation reads the same when it is told again later: prompts stay append-only.

    Attributes:
        kind: see above; `task` is the first user turn, `user` a later one.
        step: index of the agent step.
        text: what was said: task, thought, advice, answer.
        actions: what the agent does or proposes.
        observations: one per action, in order.
        control: which control tool an advice answers.
        ok: False for a consultation that gave no advice.
        raw: the critic's own text of an advice.
    """

    kind: EventKind
    step: int = 0
    text: str = ""
    actions: tuple[Action, ...] = ()
    observations: tuple[str, ...] = ()
    control: str = ""
    ok: bool = True
    raw: str = ""

    def dump(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Event:
        """Read back from `dump()`."""
        return cls(
            **{
                **data,
                "actions": tuple(Action(**action) for action in data.get("actions", ())),
                "observations": tuple(data.get("observations", ())),
            }
        )


def read_trajectory(path: Sequence[Node], consultations: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    """The events of an active path.

    Args:
        path: nodes, root first. It may end with an action whose results are still to come.
        consultations: the session's records, to which advice nodes point.
    """
    events: list[Event] = []
    for head, rest in _turns(path):
        if head.kind == "action":
            events += _turn(head, rest, consultations)
        else:
            first = not any(event.kind == "task" for event in events)
            events.append(Event("task" if first else "user", head.step, text_of(head.message)))
            events += _advice(rest, consultations)
    return tuple(events)


def _turns(path: Sequence[Node]) -> Iterable[tuple[Node, list[Node]]]:
    """Each task or action with the nodes that belong to it."""
    head: Node | None = None
    rest: list[Node] = []
    for node in path:
        if node.kind in ("task", "action"):
            if head is not None:
                yield head, rest
            head, rest = node, []
        elif head is not None:
            rest.append(node)
    if head is not None:
        yield head, rest


def _turn(head: Node, rest: list[Node], consultations: Sequence[Mapping[str, Any]]) -> list[Event]:
    meta = head.meta
    if "problem" in meta:
        note = "The agent's reply was in none of the allowed forms."
        return [Event("note", head.step, note), *_advice(rest, consultations)]
    if "answer" in meta:
        return [Event("answer", head.step, str(meta["answer"]))]
    thought, actions = str(meta.get("thought", text_of(head.message))), _actions(head)
    observations = tuple(text for node in rest if node.kind == "observation" for text in _observed(node))
    if not meta.get("consults"):
        # A protocol may have forced a consultation after this step: its advice follows the whole step.
        step = [Event("step", head.step, thought, actions, observations)] if actions or observations else []
        return [*step, *_advice(rest, consultations)]
    # The step this turn made may itself have called for a consultation, whose critic has seen the outcome.
    later = [node for node in rest if node.kind == "advice" and _asked_at(node, consultations) > head.step]
    within = [node for node in rest if node not in later]
    told = [Event("proposal", head.step, thought, actions), *_advice(within, consultations)]
    if observations:
        told.append(Event("outcome", head.step, "", (), observations))
    return [*told, *_advice(later, consultations)]


def _asked_at(advice: Node, consultations: Sequence[Mapping[str, Any]]) -> int:
    """The agent's step at the time of a consultation; its advice is stored when that step is over."""
    return int(consultations[advice.meta["consultation"]]["step"])


def _actions(head: Node) -> tuple[Action, ...]:
    """The calls of an action node; calls of the critic are not among them."""
    if "calls" in head.meta:
        return tuple(Action(call["name"], call["arguments"]) for call in head.meta["calls"])
    controls = head.meta.get("controls", ())
    return tuple(
        Action(call["function"]["name"], call["function"]["arguments"])
        for call in head.message.get("tool_calls", ())
        if call["id"] not in controls
    )


def _observed(node: Node) -> list[str]:
    """The tool results in an observation, without the words the session put around them."""
    if node.meta.get("control"):
        return []
    text = text_of(node.message)
    spans = node.meta.get("spans")
    return [text] if spans is None else [text[start:end] for start, end in spans]


def _advice(rest: Iterable[Node], consultations: Sequence[Mapping[str, Any]]) -> list[Event]:
    events = []
    for node in rest:
        if node.kind == "advice":
            record = consultations[node.meta["consultation"]]
            critique = record["critique"]
            ok = critique["status"] == "ok"
            events.append(
                Event(
                    "advice",
                    node.step,
                    _text(critique),
                    control=record["control"],
                    ok=ok,
                    raw=critique["raw"] or _sections(critique),
                )
            )
    return events


def _sections(critique: Mapping[str, Any]) -> str:
    """What a critic of two sections would have written, where its own text was not recorded."""
    return Critique.load(critique).text if critique["analysis"] else ""


def _text(critique: Mapping[str, Any]) -> str:
    analysis, advice = str(critique["analysis"]), str(critique["advice"])
    return f"{analysis}\n{advice}".strip()
