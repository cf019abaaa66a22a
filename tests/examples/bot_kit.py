"""What the tests of the support bot share: the bot as a process, people who talk to it, words of model and critic."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sqlite3
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from multiprocessing import forkserver
from pathlib import Path
from types import TracebackType
from typing import Any

import bot_worker
import httpx

from caddie_sdk.testing import calls, tool_call

STAFF_TOKEN = "token-of-the-tests"
ADVICE = "Make sure of the return window, and name one refund only."
ANALYSIS = "The boots are the thing the customer wants to be rid of."
SECONDS = 20.0
WEB = httpx.Client(timeout=SECONDS, trust_env=False)
"""One for all: to make one costs more than most of the requests here."""

_processes = multiprocessing.get_context("forkserver")
# The imports of a server, done once: each bot is then a fork of them, and as much a process as any other.
_processes.set_forkserver_preload(["bot_worker"])


def _preload() -> None:
    """Start the process that is forked. It takes its path from the environment only, whatever ours has become."""
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if known is not None:
            os.environ["PYTHONPATH"] = known


# ------------------------------------------------------------------ what the model says


def last_result(messages: Sequence[Mapping[str, Any]]) -> str:
    return next(m["content"] for m in reversed(messages) if m["role"] == "tool")


def _done(messages: Sequence[Mapping[str, Any]]) -> str:
    told = last_result(messages)
    return told if told.startswith("Not done") else f"Done: {json.loads(told)}"


def _return(order: str, *items: str) -> dict[str, Any]:
    return calls(tool_call("start_return", {"order_id": order, "item_ids": list(items), "reason": "does not fit"}))


BOOTS, YES = "I want to send the boots of W1001 back.", "Yes, please."
TENT, CANCEL, HUMAN = "Return the tent of W2001, W2001-1. I am sure.", "Cancel W1002. I am sure.", "Get me a human!"
SWAP, THEIRS = "Swap the boots of W1001 for size 40.", "Show me order W2001."
SCRIPT: dict[str, list[Any]] = {
    BOOTS: [
        calls(tool_call("find_customer")),
        calls(tool_call("look_up_order", {"order_id": "W1001"})),
        calls(tool_call("list_returnable_items", {"order_id": "W1001"})),
        "I would return W1001-1, the trail boots, for 89.00 EUR to your card. Shall I?",
    ],
    YES: [_return("W1001", "W1001-1"), _return("W1001", "W1001-1"), _done],
    TENT: [_return("W2001", "W2001-1"), _return("W2001", "W2001-1"), _done],
    CANCEL: [
        calls(tool_call("cancel_order", {"order_id": "W1002", "reason": "too late"})),
        calls(tool_call("cancel_order", {"order_id": "W1002", "reason": "came too late"})),
        _done,
    ],
    SWAP: [
        calls(tool_call("exchange_item", {"order_id": "W1001", "item_id": "W1001-1", "variant_id": "BOOT-40"})),
        calls(tool_call("exchange_item", {"order_id": "W1001", "item_id": "W1001-1", "variant_id": "BOOT-40"})),
        _done,
    ],
    HUMAN: [calls(tool_call("hand_over", {"summary": "Wants a human."})), _done],
    THEIRS: [calls(tool_call("look_up_order", {"order_id": "W2001"})), _done],
}


def model_says(body: Mapping[str, Any]) -> Any:
    """The reply that belongs to this place of the conversation, whoever asks for it and however often."""
    messages = body["messages"]
    last = max(at for at, message in enumerate(messages) if message["role"] == "user")
    before = [message for message in messages[last:] if message["role"] == "assistant" and not _asks_critic(message)]
    said = messages[last]["content"]
    reply = SCRIPT[said][len(before)] if said in SCRIPT else f"You said: {said}"
    return reply(messages) if callable(reply) else reply


def _asks_critic(message: Mapping[str, Any]) -> bool:
    return any(call["function"]["name"] == "call_critic" for call in message.get("tool_calls") or ())


def critic_says(body: Mapping[str, Any]) -> str:
    return f"Analysis: {ANALYSIS}\nAdvices for next steps: {ADVICE}"


# ------------------------------------------------------------------ the bot


class Bot:
    """The support bot as a process, for the length of a `with` block.

    Args:
        folder: where its database is; another bot there goes on with it.
        model, critic: base URLs.
        fault: where it is to be killed; see `bot_worker`.
        options: further ones of the command line.
    """

    _numbers = itertools.count(1)

    def __init__(
        self, folder: Path, model: str, critic: str = "off", fault: str = "", options: Sequence[str] = ()
    ) -> None:
        self.db = folder / "shop.db"
        self._log = folder / f"log-{next(self._numbers)}"
        self._out = self._log.with_suffix(".out")
        arguments = ["--base-url", model, "--critic", critic, "--db", str(self.db), "--port", "0", *options]
        self.process = _processes.Process(
            target=bot_worker.work, args=(arguments, STAFF_TOKEN, fault, str(self._out), str(self._log)), daemon=True
        )

    def __enter__(self) -> Bot:
        _preload()
        self.process.start()
        wait_until(lambda: "staff" in _read(self._out) or not self.process.is_alive(), "start of the bot")
        self.url = _read(self._out).partition("customers")[2].split()[0].rstrip("/")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(10)
            assert self.process.exitcode == 0, f"did not end cleanly: {self.process.exitcode}\n{self.log}"
        assert "Traceback" not in self.log, self.log

    @property
    def log(self) -> str:
        """All that it wrote beside its addresses."""
        return _read(self._log)

    def kill(self) -> None:
        """`kill -9`."""
        self.process.kill()
        self.died()

    def died(self) -> None:
        """Wait for the end that a fault or `kill` brings."""
        self.process.join(SECONDS)
        assert self.process.exitcode == -signal.SIGKILL, self.log

    def staff(self, method: str, path: str, body: Any = None) -> Any:
        """A request by staff; its JSON."""
        answer = WEB.request(
            method, f"{self.url}/api/staff{path}", json=body, headers={"Authorization": f"Bearer {STAFF_TOKEN}"}
        )
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def thread(self, customer: str) -> dict[str, Any]:
        """What staff sees of a customer's conversation."""
        return self.staff("GET", f"/threads/customer-{customer}")  # type: ignore[no-any-return]

    def waiting(self, customer: str) -> dict[str, Any]:
        """The hand-over of a customer that waits for an answer, when there is one."""
        mark = ""
        while True:
            found = self.staff("GET", f"/threads?seen={mark}")
            mark = found["mark"]
            if any(one["thread"] == f"customer-{customer}" and one["waiting"] for one in found["threads"]):
                handovers = self.thread(customer)["handovers"]
                return next(one for one in handovers if one["decision"] is None)  # type: ignore[no-any-return]

    def answers(self, customer: str, decision: str, message: str = "") -> None:
        """Staff answers what waits."""
        number = self.waiting(customer)["id"]
        self.staff("POST", f"/handovers/{number}", {"decision": decision, "message": message})


CUSTOMERS = {"C1": ("nadia@shop.example", "4021"), "C2": ("tomas@shop.example", "77310")}


class Customer:
    """Somebody who talks to the bot, and to whichever process it is by now."""

    def __init__(self, bot: Bot, customer: str = "C1") -> None:
        self.bot, self.id = bot, customer
        email, postcode = CUSTOMERS[customer]
        answer = WEB.post(f"{bot.url}/api/sign-in", json={"email": email, "postcode": postcode})
        self.headers = {"Authorization": f"Bearer {answer.json()['token']}"}

    def post(self, text: str, ref: str = "") -> httpx.Response:
        body = {"ref": ref or uuid.uuid4().hex, "text": text}
        return WEB.post(f"{self.bot.url}/api/chat", json=body, headers=self.headers)

    def chat(self, seen: str = "") -> dict[str, Any]:
        answer = WEB.get(f"{self.bot.url}/api/chat", params={"seen": seen}, headers=self.headers, timeout=2 * SECONDS)
        assert answer.is_success, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def said(self, who: str) -> list[str]:
        return [message["text"] for message in self.chat()["messages"] if message["from"] == who]

    def hears(self, number: int) -> str:
        """The bot's answer of that number, when it has come."""
        until, mark = time.monotonic() + SECONDS, ""
        while True:
            chat = self.chat(mark)
            answers = [message["text"] for message in chat["messages"] if message["from"] == "bot"]
            if len(answers) >= number and chat["state"] == "idle":
                return answers[number - 1]  # type: ignore[no-any-return]
            assert time.monotonic() < until, f"no answer {number} within {SECONDS:g} s"
            mark = chat["mark"]

    def ask(self, text: str) -> str:
        """Say something and wait for the answer to it."""
        known = len(self.said("bot"))
        assert self.post(text).status_code == 202
        return self.hears(known + 1)


# ------------------------------------------------------------------ what the database says


def rows(db: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def count(db: Path, table: str) -> int:
    return int(rows(db, f"SELECT count(*) FROM {table}")[0][0])


TIMED = {"at", "changed_at", "asked_at", "answered_at", "key", "token_hash", "ref", "placed_on", "delivered_on"}
"""Columns that differ from run to run."""


def contents(db: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every table, without times and tokens; and proof that the database is sound."""
    assert rows(db, "PRAGMA integrity_check") == [("ok",)]
    assert rows(db, "PRAGMA foreign_key_check") == []
    found = {}
    for (table,) in rows(db, "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name"):
        columns = [row[1] for row in rows(db, f"PRAGMA table_info({table})") if row[1] not in TIMED]
        found[table] = sorted(rows(db, f"SELECT {', '.join(columns)} FROM {table}"), key=repr)
    return found


def wait_until(holds: Callable[[], Any], what: str, seconds: float = SECONDS) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"no {what} within {seconds:g} s"
        time.sleep(0.02)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
