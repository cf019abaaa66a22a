"""A thread as its customer sees it, and as staff sees it. Advice is on neither page unless staff asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caddie_sdk.actions import strip_thinking
from caddie_sdk.history import Node
from caddie_sdk.messages import text_of
from caddie_sdk.session import Session

SORRY = "I am sorry, I could not work this out, so I have asked a colleague."

Row = dict[str, Any]


def turns(session: Session | None) -> list[list[Node]]:
    """The history from each message of the customer to the next; as many as messages have been delivered."""
    found: list[list[Node]] = []
    for node in session.history.path() if session else ():
        if node.kind == "task":
            found.append([])
        if found:
            found[-1].append(node)
    return found


def customer_view(session: Session | None, inbox: Sequence[Row], handovers: Sequence[Row]) -> list[Row]:
    """What was said, and nothing of how the answers came about."""
    entries: list[Row] = []
    worked_on = turns(session)
    for message in inbox:
        number = message["number"]
        entries.append({"from": "customer", "text": message["text"], "at": message["at"]})
        for handover in (one for one in handovers if one["turn"] == number):
            entries += _handover_for_customer(handover)
        if number <= len(worked_on):
            over = number < len(worked_on) or (session is not None and session.phase == "done")
            if answer := _answer(worked_on[number - 1]) or (SORRY if over else ""):
                entries.append({"from": "bot", "text": answer})
    return entries


def unanswered(session: Session | None) -> bool:
    """Whether the latest turn is over and has no answer: the model had none, or the history is too long for it."""
    return session is not None and session.phase == "done" and not _answer(turns(session)[-1])


def _answer(turn: Sequence[Node]) -> str:
    return next((node.meta["answer"] or "" for node in reversed(turn) if "answer" in node.meta), "")


def _handover_for_customer(handover: Row) -> list[Row]:
    entries = [{"from": "note", "text": "A colleague has been asked.", "at": handover["asked_at"]}]
    if handover["message"]:
        entries.append({"from": "staff", "text": handover["message"], "at": handover["answered_at"]})
    return entries


def staff_view(session: Session | None, inbox: Sequence[Row]) -> list[Row]:
    """The conversation with every call and its result. An advice entry holds only its number."""
    worked_on = turns(session)
    entries: list[Row] = []
    for message in inbox:
        entries.append({"kind": "customer", "text": message["text"], "at": message["at"]})
        if message["number"] <= len(worked_on):
            for node in worked_on[message["number"] - 1][1:]:
                entries += _for_staff(node)
        else:
            entries.append({"kind": "notice", "text": "not read by the bot yet"})
    return entries


def _for_staff(node: Node) -> list[Row]:
    text = text_of(node.message)
    match node.kind:
        case "action" if "answer" in node.meta:
            return [{"kind": "bot", "text": node.meta["answer"]}]
        case "action":
            said = strip_thinking(text)
            calls = [call["function"] for call in node.message.get("tool_calls", ())]
            return [{"kind": "thought", "text": said}] * bool(said) + [
                {"kind": "call", "name": call["name"], "text": call["arguments"]} for call in calls
            ]
        case "observation":
            return [{"kind": "held" if node.meta.get("control") else "result", "text": text}]
        case "advice":
            return [{"kind": "advice", "number": node.meta["consultation"]}]
        case "notice":
            return [{"kind": "notice", "text": text}]
        case _:
            return []


def advice_view(session: Session | None, number: int) -> Row | None:
    """One consultation: when it was, what came of it, and what the critic said."""
    if session is None or not 0 <= number < len(session.consultations):
        return None
    record = session.consultations[number]
    critique = record["critique"]
    return {
        "trigger": record["trigger"],
        **{name: critique.get(name) or "" for name in ("status", "analysis", "advice", "detail")},
    }
