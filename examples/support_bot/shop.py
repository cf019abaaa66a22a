"""The shop: what its records say, and the three things that cannot be undone.

Each irreversible action has a key made of the thread, the action, the order and what it is about. The key is stored in
the transaction that carries the action out; asked for again, by a model that repeats itself or by a process that was
killed before it could note down the result, the first outcome is given and nothing is done.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from examples.support_bot.store import Store

RETURN_DAYS = 30
CURRENCY = "EUR"

Row = dict[str, Any]


class Refused(Exception):
    """The shop does not do this. The text is for the agent: it says why, and what would be possible."""


def money(cents: int) -> str:
    """An amount as people write it."""
    return f"{cents // 100}.{cents % 100:02d} {CURRENCY}"


class Shop:
    """The records of one shop. Customers see and change their own orders only.

    Every method raises `Refused` for what does not exist or is not allowed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    # ---------------------------------------------------------------- reading

    def customer(self, customer: str) -> Row:
        """Who the customer is, and their orders, newest first."""
        with self._store.reading() as db:
            row = db.execute("SELECT name, email, address FROM customers WHERE id = ?", (customer,)).fetchone()
            if row is None:
                raise Refused("there is no such customer")
            orders = db.execute(
                "SELECT id, placed_on, status FROM orders WHERE customer_id = ? ORDER BY placed_on DESC", (customer,)
            )
            today = db.execute("SELECT date('now')").fetchone()[0]
            return {"today": today, **dict(row), "orders": [dict(order) for order in orders]}

    def order(self, customer: str, order: str) -> Row:
        """An order with its items and payment."""
        with self._store.reading() as db:
            found = _order(db, customer, order)
            paid = db.execute("SELECT method, amount_cents FROM payments WHERE order_id = ?", (found["id"],)).fetchone()
            return {
                **{name: found[name] for name in ("id", "status", "placed_on", "delivered_on")},
                "items": [_described(item) for item in _items(db, found["id"])],
                "payment": {"method": paid["method"], "amount": money(paid["amount_cents"])} if paid else None,
            }

    def returnable(self, customer: str, order: str) -> Row:
        """For each item of an order: whether it may be returned or exchanged, and for which variants."""
        with self._store.reading() as db:
            found = _order(db, customer, order)
            listed = []
            for item in _items(db, found["id"]):
                why_not = _why_not(found, item)
                entry = {**_described(item), "returnable": not why_not}
                if why_not:
                    entry["why_not"] = why_not
                else:
                    entry["exchange_for"] = [dict(row) for row in _alternatives(db, item)]
                listed.append(entry)
            return {"order": found["id"], "items": listed}

    def refunds(self, customer: str, order: str) -> Row:
        """The refunds of an order."""
        with self._store.reading() as db:
            found = _order(db, customer, order)
            rows = db.execute(
                "SELECT refunds.id, method, refunds.amount_cents, status, return_id FROM refunds"
                " JOIN payments ON payments.id = payment_id WHERE order_id = ? ORDER BY refunds.id",
                (found["id"],),
            )
            return {
                "order": found["id"],
                "refunds": [
                    {
                        "refund": f"F{row['id']}",
                        "for": f"return R{row['return_id']}" if row["return_id"] else "cancellation",
                        "amount": money(row["amount_cents"]),
                        "to": row["method"],
                        "status": row["status"],
                    }
                    for row in rows
                ],
            }

    def return_value(self, customer: str, order: str, items: Sequence[str]) -> int:
        """What a return would pay back, in cents."""
        with self._store.reading() as db:
            found = _order(db, customer, order)
            return sum(item["price_cents"] for item in _chosen(db, found, items))

    # ---------------------------------------------------------------- what cannot be undone

    def outcome(self, key: str) -> Row | None:
        """What came of an action, if it has been carried out."""
        with self._store.reading() as db:
            return _outcome(db, key)

    def start_return(self, thread: str, customer: str, order: str, items: Sequence[str], reason: str) -> Row:
        """Take items back and refund them."""

        def work(db: sqlite3.Connection, key: str) -> Row:
            found = _order(db, customer, order)
            chosen = _chosen(db, found, items)
            number = _insert(db, "returns", action_key=key, order_id=found["id"], reason=reason)
            for item in chosen:
                _insert(db, "return_items", return_id=number, item_id=item["id"])
                _mark(db, item, "returned")
            refund = _refund(db, found["id"], sum(item["price_cents"] for item in chosen), return_id=number)
            return {"return": f"R{number}", "items": [item["id"] for item in chosen], **refund}

        return self._once(return_key(thread, order, items), thread, "return", work)

    def exchange(self, thread: str, customer: str, order: str, item: str, variant: str) -> Row:
        """Swap an item for another variant of the same product at the same price."""

        def work(db: sqlite3.Connection, key: str) -> Row:
            found = _order(db, customer, order)
            (chosen,) = _chosen(db, found, [item])
            offers = {row["variant"]: row for row in _alternatives(db, chosen)}
            if (wanted := offers.get(variant.strip().upper())) is None:
                known = ", ".join(offers) or "none"
                raise Refused(f"{chosen['id']} cannot be exchanged for {variant}; possible variants: {known}")
            number = _insert(db, "exchanges", action_key=key, item_id=chosen["id"], new_variant_id=wanted["variant"])
            db.execute("UPDATE variants SET stock = stock - 1 WHERE id = ?", (wanted["variant"],))
            _mark(db, chosen, "exchanged")
            return {"exchange": f"X{number}", "item": chosen["id"], "for": wanted["options"]}

        key = action_key(thread, "exchange", order, f"{item.strip()}>{variant.strip()}")
        return self._once(key, thread, "exchange", work)

    def cancel(self, thread: str, customer: str, order: str, reason: str) -> Row:
        """Cancel an order that has not been sent, and refund it."""

        def work(db: sqlite3.Connection, key: str) -> Row:
            found = _order(db, customer, order)
            if found["status"] != "processing":
                raise Refused(f"{found['id']} is {found['status']}; only orders that are processing can be cancelled")
            number = _insert(db, "cancellations", action_key=key, order_id=found["id"], reason=reason)
            items = _items(db, found["id"])
            for item in items:
                _mark(db, item, "cancelled")
                db.execute("UPDATE variants SET stock = stock + 1 WHERE id = ?", (item["variant_id"],))
            db.execute("UPDATE orders SET status = 'cancelled' WHERE id = ?", (found["id"],))
            total = sum(item["price_cents"] for item in items)
            return {"cancelled": found["id"], **_refund(db, found["id"], total, cancellation_id=number)}

        return self._once(action_key(thread, "cancel", order), thread, "cancel", work)

    def _once(self, key: str, thread: str, name: str, work: Callable[[sqlite3.Connection, str], Row]) -> Row:
        try:
            with self._store.writing() as db:
                if (first := _outcome(db, key)) is not None:
                    return first
                outcome = work(db, key)
                _insert(db, "actions", key=key, thread=thread, name=name, outcome=json.dumps(outcome))
        except sqlite3.IntegrityError as error:
            raise Refused(f"the records do not allow it: {error}") from error
        return outcome


def action_key(thread: str, name: str, order: str, about: str = "") -> str:
    """The same for the same action, however often and in whatever words it is asked for."""
    return "/".join(part for part in (thread, name, order.strip().upper(), about.upper()) if part)


def return_key(thread: str, order: str, items: Sequence[str]) -> str:
    """`action_key` of a return."""
    return action_key(thread, "return", order, "+".join(sorted({item.strip().upper() for item in items})))


# ------------------------------------------------------------------ rows


def _order(db: sqlite3.Connection, customer: str, order: str) -> sqlite3.Row:
    row: sqlite3.Row | None = db.execute(
        "SELECT *, julianday('now') - julianday(delivered_on) AS days FROM orders WHERE id = ? AND customer_id = ?",
        (order.strip().upper(), customer),
    ).fetchone()
    if row is None:
        # The same words whether it exists or not: nobody learns of other customers' orders.
        raise Refused(f"this customer has no order {order}; find_customer lists their orders")
    return row


def _items(db: sqlite3.Connection, order: str) -> list[sqlite3.Row]:
    return db.execute(
        "SELECT items.*, product, options FROM items JOIN variants ON variants.id = variant_id"
        " WHERE order_id = ? ORDER BY items.id",
        (order,),
    ).fetchall()


def _chosen(db: sqlite3.Connection, order: sqlite3.Row, items: Sequence[str]) -> list[sqlite3.Row]:
    """The items named, all of which may be sent back."""
    known = {item["id"]: item for item in _items(db, order["id"])}
    names = sorted({item.strip().upper() for item in items})
    if not names:
        raise Refused(f"name at least one item of {order['id']}: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise Refused(f"{order['id']} has no item {name}; its items are {', '.join(known)}")
        if why_not := _why_not(order, known[name]):
            raise Refused(f"{name} cannot be sent back: {why_not}")
    return [known[name] for name in names]


def _why_not(order: sqlite3.Row, item: sqlite3.Row) -> str:
    """What speaks against sending an item back, or nothing."""
    if item["status"] != "bought":
        return f"it was {item['status']} before"
    if order["status"] != "delivered":
        return f"the order is {order['status']}, not delivered"
    if order["days"] > RETURN_DAYS + 1:
        return f"it was delivered on {order['delivered_on']}, more than {RETURN_DAYS} days ago"
    return "it was sold as final sale" if item["final_sale"] else ""


def _alternatives(db: sqlite3.Connection, item: sqlite3.Row) -> list[sqlite3.Row]:
    return db.execute(
        "SELECT id AS variant, options FROM variants WHERE product = ? AND id <> ? AND price_cents = ? AND stock > 0",
        (item["product"], item["variant_id"], item["price_cents"]),
    ).fetchall()


def _described(item: sqlite3.Row) -> Row:
    return {
        "item": item["id"],
        "product": item["product"],
        "options": item["options"],
        "price": money(item["price_cents"]),
        "status": item["status"],
    }


def _refund(db: sqlite3.Connection, order: str, cents: int, **cause: int) -> Row:
    payment = db.execute("SELECT id, method FROM payments WHERE order_id = ?", (order,)).fetchone()
    if payment is None or cents == 0:
        return {"refund": None}
    number = _insert(db, "refunds", payment_id=payment["id"], amount_cents=cents, **cause)
    return {"refund": f"F{number}", "amount": money(cents), "to": payment["method"], "status": "pending"}


def _mark(db: sqlite3.Connection, item: sqlite3.Row, status: str) -> None:
    db.execute("UPDATE items SET status = ? WHERE id = ?", (status, item["id"]))


def _outcome(db: sqlite3.Connection, key: str) -> Row | None:
    row = db.execute("SELECT outcome FROM actions WHERE key = ?", (key,)).fetchone()
    return None if row is None else json.loads(row["outcome"])


def _insert(db: sqlite3.Connection, table: str, **values: Any) -> int:
    """Table and column names are this module's own, never anybody's input."""
    marks = ", ".join("?" for _ in values)
    row = db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))
    return row.lastrowid or 0
