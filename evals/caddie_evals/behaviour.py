"""How agents use advice: what it asks for, and whether the next action does it.

    for use in advice_uses(events):  # the events of a trajectory
        label = label_by_rule(use.advice, use.move)
        print(use.step, label.advice_class, label.uptake)

The Caddie paper (appendix H.2, figure 8) names the classes and the degrees of uptake, not how they were told apart.
The rules are ours (`behaviour_rules`), and go by words alone:

- **Class**, of the first actionable sentence. `answer`: give the final answer, or tell the user something. `search`:
  find out what is not known yet. `verify`: check what is believed against evidence, records or rules. `ask`: put a
  question to the user. `execute`: act on the world. None where nothing is asked for (praise, prohibitions).
- **Uptake**, by the agent's next action. `exact`: the act, with the target that the advice names. `partial`: the same
  kind of act on a target that is only partly the same, or a way towards it. `not followed`: something else.
  `unobservable`: no action follows, or the advice asks for none.

Rules misread some advice: `labelling` sets a model beside them and says how far the two agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from caddie_evals.behaviour_rules import AdviceClass, Move, Uptake, read_advice, read_uptake
from caddie_sdk.critique import FEEDBACK_FORMATS
from caddie_sdk.errors import ConfigError
from caddie_sdk.trajectory import Event

__all__ = ["AdviceClass", "AdviceUse", "Label", "Move", "Shares", "Uptake", "advice_uses", "label_by_rule", "shares"]

CLASSES: tuple[AdviceClass, ...] = get_args(AdviceClass)
UPTAKES: tuple[Uptake, ...] = get_args(Uptake)


@dataclass(frozen=True, slots=True)
class Label:
    """What one advice asks for and what became of it.

    Attributes:
        advice_class: of the first actionable sentence; None where there is none.
        uptake: by the next action.
    """

    advice_class: AdviceClass | None
    uptake: Uptake


@dataclass(frozen=True, slots=True)
class AdviceUse:
    """An advice with what the agent did next.

    Attributes:
        step: the agent's step at which the advice was given.
        advice: its guidance, without the analysis.
        move: the next action; None where the trajectory ended, or the agent asked again, before any.
    """

    step: int
    advice: str
    move: Move | None


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of labels, fractions that add up to 1.

    Attributes:
        classes: by advice class; the key None holds advice that asks for nothing.
        uptakes: by uptake.
        total: number of labels.
    """

    classes: dict[AdviceClass | None, float]
    uptakes: dict[Uptake, float]
    total: int


def advice_uses(events: Sequence[Event]) -> list[AdviceUse]:
    """Every advice that reached the agent, in order. Failed consultations are left out: they gave none.

    Args:
        events: a trajectory, as `caddie_sdk.trajectory.read_trajectory` gives it.
    """
    return [
        AdviceUse(event.step, _guidance(event), _next_move(events[index + 1 :]))
        for index, event in enumerate(events)
        if event.kind == "advice" and event.ok
    ]


def label_by_rule(advice: str, move: Move | None) -> Label:
    """The label that the rules give.

    Args:
        advice: the critic's guidance.
        move: what the agent did next; None for nothing.
    """
    reading = read_advice(advice)
    return Label(reading.advice_class if reading else None, read_uptake(reading, move))


def shares(labels: Iterable[Label]) -> Shares:
    """How the labels are distributed; a class or uptake that does not occur has the share 0.

    Raises:
        ConfigError: no labels.
    """
    found = list(labels)
    if not found:
        raise ConfigError("no advice to describe: no consultation gave any")
    classes = Counter(label.advice_class for label in found)
    uptakes = Counter(label.uptake for label in found)
    return Shares(
        {name: classes[name] / len(found) for name in (*CLASSES, None)},
        {name: uptakes[name] / len(found) for name in UPTAKES},
        len(found),
    )


def _guidance(event: Event) -> str:
    """The guidance of an advice event, whose text holds the analysis too; other critics write no such part."""
    for form in FEEDBACK_FORMATS.values():
        if parts := form.parse(event.raw):
            return parts[1]
    return event.text


def _next_move(events: Iterable[Event]) -> Move | None:
    """The first action after an advice. A reply in no allowed form (`note`) is none."""
    for event in events:
        if event.kind == "advice":
            return None
        if event.actions:
            return Move(actions=event.actions)
        if event.kind == "answer":
            return Move(text=event.text)
    return None
