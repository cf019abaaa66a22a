"""What the bot keeps beside its threads: who is signed in, what customers wrote, what colleagues were asked.

All of it is on disk before anybody is told that it arrived. A message is delivered when the thread's own history holds
it, so there is no mark here that could disagree with the history after a crash.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
from typing import Any

from examples.support_bot.store import Store

MOST_WAITING = 20
"""Messages of one customer that may wait for the bot."""

Row = dict[str, Any]


class NotPossible(Exception):
    """A request to the mailroom that it cannot meet; the text may be shown to whoever made it."""


class Mailroom:
    """Threads, messages and hand-overs of one bot."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # ---------------------------------------------------------------- customers

    def sign_in(self, email: str, postcode: str) -> str | None:
        """A new token for a customer, or None if the two do not belong together."""
        token = secrets.token_urlsafe(24)
        with self._store.writing() as db:
            row = db.execute("SELECT id, postcode FROM customers WHERE email = ?", (email.strip(),)).fetchone()
            if row is None or not secrets.compare_digest(row["postcode"].encode(), postcode.strip().encode()):
                return None
            db.execute("INSERT INTO sign_ins (token_hash, customer_id) VALUES (?, ?)", (_hashed(token), row["id"]))
            db.execute(
                "INSERT OR IGNORE INTO threads (id, customer_id) VALUES (?, ?)", (f"customer-{row['id']}", row["id"])
            )
        return token

    def signed_in(self, token: str) -> Row | None:
        """The customer's `thread`, `name` and `customer_id` behind a token."""
        with self._store.reading() as db:
            row = db.execute(
                "SELECT threads.id AS thread, customers.name, customers.id AS customer_id FROM sign_ins"
                " JOIN customers ON customers.id = sign_ins.customer_id"
                " JOIN threads ON threads.customer_id = customers.id WHERE token_hash = ?",
                (_hashed(token),),
            ).fetchone()
            return None if row is None else dict(row)

    def sign_out(self, token: str) -> None:
        """Forget a token."""
        with self._store.writing() as db:
            db.execute("DELETE FROM sign_ins WHERE token_hash = ?", (_hashed(token),))

    def samples(self) -> list[Row]:
        """The made-up customers to try the bot with; none in a real shop's database."""
        with self._store.reading() as db:
            if db.execute("SELECT 1 FROM meta WHERE name = 'sample'").fetchone() is None:
                return []
            return [dict(row) for row in db.execute("SELECT name, email, postcode FROM customers ORDER BY id")]

    # ---------------------------------------------------------------- messages

    def post(self, thread: str, ref: str, text: str, delivered: int) -> int:
        """Take a message in; the same `ref` again changes nothing. Returns its number in the thread.

        Raises:
            NotPossible: too many messages wait already.
        """
        with self._store.writing() as db:
            if known := db.execute("SELECT number FROM inbox WHERE thread = ? AND ref = ?", (thread, ref)).fetchone():
                return int(known["number"])
            number = 1 + int(db.execute("SELECT count(*) FROM inbox WHERE thread = ?", (thread,)).fetchone()[0])
            if number - delivered > MOST_WAITING:
                raise NotPossible("Too many messages are waiting for an answer. Please wait a moment.")
            db.execute("INSERT INTO inbox (thread, number, ref, text) VALUES (?, ?, ?, ?)", (thread, number, ref, text))
            _opened(db, thread)
            return number

    def message(self, thread: str, number: int) -> str | None:
        """The text of a message."""
        with self._store.reading() as db:
            row = db.execute("SELECT text FROM inbox WHERE thread = ? AND number = ?", (thread, number)).fetchone()
            return None if row is None else str(row["text"])

    def messages(self, thread: str) -> list[Row]:
        """All messages of a thread, in order: `number`, `text`, `at`."""
        with self._store.reading() as db:
            rows = db.execute("SELECT number, text, at FROM inbox WHERE thread = ? ORDER BY number", (thread,))
            return [dict(row) for row in rows]

    # ---------------------------------------------------------------- threads

    def customer_of(self, thread: str) -> str:
        """The customer a thread belongs to.

        Raises:
            NotPossible: there is no such thread.
        """
        with self._store.reading() as db:
            row = db.execute("SELECT customer_id FROM threads WHERE id = ?", (thread,)).fetchone()
        if row is None:
            raise NotPossible("There is no such conversation.")
        return str(row["customer_id"])

    def open_threads(self) -> list[str]:
        """Threads in which something is left to do."""
        with self._store.reading() as db:
            return [str(row["id"]) for row in db.execute("SELECT id FROM threads WHERE open = 1 ORDER BY changed_at")]

    def settle(self, thread: str, delivered: int) -> bool:
        """Close a thread, unless a message came in meanwhile. Returns whether it is closed."""
        with self._store.writing() as db:
            closed = db.execute(
                "UPDATE threads SET open = 0 WHERE id = ?1 AND (SELECT count(*) FROM inbox WHERE thread = ?1) <= ?2",
                (thread, delivered),
            )
            return closed.rowcount == 1

    def overview(self) -> list[Row]:
        """Threads with at least one message, those that wait for a colleague first."""
        with self._store.reading() as db:
            rows = db.execute(
                "SELECT threads.id AS thread, name, open, changed_at,"
                " (SELECT count(*) FROM handovers WHERE thread = threads.id AND decision IS NULL) AS waiting"
                " FROM threads JOIN customers ON customers.id = customer_id"
                " WHERE EXISTS (SELECT 1 FROM inbox WHERE thread = threads.id)"
                " ORDER BY waiting = 0, changed_at DESC LIMIT 500"
            )
            return [dict(row) for row in rows]

    # ---------------------------------------------------------------- hand-overs

    def ask(self, key: str, thread: str, turn: int, kind: str, summary: str, cents: int | None = None) -> int:
        """Put a question to colleagues; the same key again is the same question. Returns its number."""
        with self._store.writing() as db:
            added = db.execute(
                "INSERT OR IGNORE INTO handovers (key, thread, turn, kind, summary, amount_cents)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (key, thread, turn, kind, summary, cents),
            )
            if added.rowcount:
                _opened(db, thread)
            return int(db.execute("SELECT id FROM handovers WHERE key = ?", (key,)).fetchone()["id"])

    def answer(self, number: int, decision: str, message: str) -> str:
        """Store a colleague's answer. Returns the thread that waits for it.

        Raises:
            NotPossible: there is no such question, it has been answered, or the decision does not suit it.
        """
        with self._store.writing() as db:
            row = db.execute("SELECT * FROM handovers WHERE id = ?", (number,)).fetchone()
            if row is None:
                raise NotPossible("There is no such question.")
            if row["decision"] is not None:
                raise NotPossible("This question has been answered already.")
            if decision not in (("approve", "deny") if row["kind"] == "approval" else ("reply",)):
                raise NotPossible("Approve or deny a request; reply to a question.")
            if decision == "reply" and not message.strip():
                raise NotPossible("A reply needs a message.")
            db.execute(
                "UPDATE handovers SET decision = ?, message = ?, answered_at = datetime('now') WHERE id = ?",
                (decision, message.strip(), number),
            )
            _opened(db, row["thread"])
            return str(row["thread"])

    def handovers(self, thread: str) -> list[Row]:
        """The questions of a thread, oldest first."""
        with self._store.reading() as db:
            rows = db.execute(
                "SELECT id, turn, kind, summary, amount_cents, decision, message, asked_at, answered_at"
                " FROM handovers WHERE thread = ? ORDER BY id",
                (thread,),
            )
            return [dict(row) for row in rows]


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _opened(db: sqlite3.Connection, thread: str) -> None:
    db.execute("UPDATE threads SET open = 1, changed_at = datetime('now') WHERE id = ?", (thread,))
