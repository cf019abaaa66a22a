"""What the agent can do. Each tool knows from the running thread whose records it may touch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langgraph.config import get_config
from langgraph.types import interrupt

from examples.support_bot.mailroom import Mailroom
from examples.support_bot.shop import Refused, Shop, return_key

IRREVERSIBLE = ("start_return", "exchange_item", "cancel_order")
"""The tools before which the critic is consulted."""


@dataclass(frozen=True)
class Case:
    """Where a tool runs.

    Attributes:
        thread: the conversation.
        customer: whose it is.
        turn: number of the customer's message that is being worked on.
        place: the step of the graph; the same when the step is run again after an interrupt or a crash.
    """

    thread: str
    customer: str
    turn: int
    place: str

    @classmethod
    def here(cls) -> Case:
        """The case of the running tool."""
        known = get_config()["configurable"]
        return cls(known["thread_id"], known["customer"], known["turn"], known["checkpoint_ns"])


def shop_tools(shop: Shop, mailroom: Mailroom, *, approve_above: int) -> list[Callable[..., str]]:
    """The tools over a shop.

    Args:
        shop: its records.
        mailroom: where questions to colleagues go.
        approve_above: cents; a return that pays back more waits for a colleague's approval.
    """
    return [*_reading(shop), *_changing(shop, mailroom, approve_above), _handing_over(mailroom)]


def _reading(shop: Shop) -> list[Callable[..., str]]:
    def find_customer() -> str:
        """The customer you are talking with: name, address, and a list of their orders."""
        return _told(lambda: shop.customer(Case.here().customer))

    def look_up_order(order_id: str) -> str:
        """An order of the customer: status, dates, items with their identifiers, payment."""
        return _told(lambda: shop.order(Case.here().customer, order_id))

    def list_returnable_items(order_id: str) -> str:
        """Which items of an order may be returned or exchanged, why not, and the variants to exchange for."""
        return _told(lambda: shop.returnable(Case.here().customer, order_id))

    def refund_status(order_id: str) -> str:
        """The refunds of an order and whether they have been paid."""
        return _told(lambda: shop.refunds(Case.here().customer, order_id))

    return [find_customer, look_up_order, list_returnable_items, refund_status]


def _changing(shop: Shop, mailroom: Mailroom, approve_above: int) -> list[Callable[..., str]]:
    def start_return(order_id: str, item_ids: list[str], reason: str) -> str:
        """Return items of an order and refund them. Cannot be undone; the customer must have agreed to exactly this."""

        def work() -> dict[str, Any]:
            case = Case.here()
            if (done := shop.outcome(return_key(case.thread, order_id, item_ids))) is not None:
                return done
            cents = shop.return_value(case.customer, order_id, item_ids)
            if cents > approve_above:
                summary = f"Return of {', '.join(item_ids)} from {order_id}, reason: {reason}"
                answer = _ask_colleague(mailroom, case, "approval", summary, cents)
                if answer["decision"] != "approve":
                    raise Refused(f"a colleague denied this refund. Message: {answer['message'] or 'none'}")
            return shop.start_return(case.thread, case.customer, order_id, item_ids, reason)

        return _told(work)

    def exchange_item(order_id: str, item_id: str, variant_id: str) -> str:
        """Exchange an item for another variant. Cannot be undone; the customer must have agreed to exactly this."""
        case = Case.here()
        return _told(lambda: shop.exchange(case.thread, case.customer, order_id, item_id, variant_id))

    def cancel_order(order_id: str, reason: str) -> str:
        """Cancel an order that is processing. Cannot be undone; the customer must have agreed to exactly this."""
        case = Case.here()
        return _told(lambda: shop.cancel(case.thread, case.customer, order_id, reason))

    return [start_return, exchange_item, cancel_order]


def _handing_over(mailroom: Mailroom) -> Callable[..., str]:
    def hand_over(summary: str) -> str:
        """Ask a human colleague, and wait for the answer. The summary says all that the colleague must know."""

        def work() -> dict[str, Any]:
            answer = _ask_colleague(mailroom, Case.here(), "question", summary.strip() or "The customer asks for you.")
            return {"colleague": answer["message"]}

        return _told(work)

    return hand_over


def _ask_colleague(mailroom: Mailroom, case: Case, kind: str, summary: str, cents: int | None = None) -> Any:
    """Pause the thread until somebody has answered. Runs again from the tool's start when they have."""
    number = mailroom.ask(f"{case.thread}/{case.place}", case.thread, case.turn, kind, summary, cents)
    return interrupt({"handover": number})


def _told(work: Callable[[], dict[str, Any]]) -> str:
    """The outcome as text for the model; a refusal is an outcome, not a failure."""
    try:
        return json.dumps(work(), ensure_ascii=False)
    except Refused as refusal:
        return f"Not done: {refusal}"
