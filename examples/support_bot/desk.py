"""The desk: works on every thread that has something to do, one turn at a time, and goes on after a crash.

Nothing here is remembered that matters: what is to be done follows from the thread's checkpoint, the inbox and the
answers of colleagues, all of which are on disk. `_advance` reads them and does the next thing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command

from caddie_sdk.errors import EndpointError
from caddie_sdk.session import Session
from examples.support_bot.mailroom import Mailroom
from examples.support_bot.views import advice_view, customer_view, staff_view, turns, unanswered

log = logging.getLogger("support_bot")

RETRY_SECONDS = (1.0, 60.0)
"""Wait after a first failure of the model's server, doubled up to the second number."""

_DOING = {
    "find_customer": "Looking at your account",
    "look_up_order": "Looking up your order",
    "list_returnable_items": "Checking what can be returned",
    "refund_status": "Looking for your refund",
    "start_return": "Arranging the return",
    "exchange_item": "Arranging the exchange",
    "cancel_order": "Cancelling the order",
    "hand_over": "Asking a colleague",
}
_THINKING = "Thinking"
_HELP = "The bot has no answer to this message. Yours goes to the customer as it is."
_TAKING_IN = ("__start__", "intake")
"""The graph's steps before a new message is part of the session."""


@dataclass
class _Line:
    """A thread at work in this process."""

    task: asyncio.Task[None] | None = None
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    version: int = 0
    doing: str = ""
    troubled: bool = False


class Desk:
    """Runs an agent for many customers.

    Args:
        agent: a graph with a checkpointer, see `create_support_agent`.
        mailroom: messages in, questions out.
        tidy: called with a thread when its turn is over; see `ThreadSaver.tidy`.
        retry: seconds, see `RETRY_SECONDS`.
    """

    def __init__(
        self,
        agent: CompiledStateGraph[Any, Any, Any, Any],
        mailroom: Mailroom,
        *,
        tidy: Callable[[str], Awaitable[None]] | None = None,
        retry: tuple[float, float] = RETRY_SECONDS,
    ) -> None:
        self._agent, self._mailroom, self._tidy, self._retry = agent, mailroom, tidy, retry
        self._lines: dict[str, _Line] = {}
        self._all = _Line()
        self._name = uuid.uuid4().hex[:8]
        self._closing = False

    # ---------------------------------------------------------------- what comes from outside

    async def start(self) -> None:
        """Go on wherever an earlier process left off."""
        for thread in await asyncio.to_thread(self._mailroom.open_threads):
            self._wake(thread)

    def leave(self) -> None:
        """Whoever waits for news is answered at once from now on: the server wants to end."""
        self._closing = True
        for line in (*self._lines.values(), self._all):
            _bump(line)

    async def stop(self) -> None:
        """Let go of everything; a later `start` goes on from the last checkpoint."""
        self.leave()
        tasks = [line.task for line in self._lines.values() if line.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def say(self, thread: str, ref: str, text: str) -> int:
        """A customer's message. When this returns it is on disk.

        Raises:
            NotPossible: too many wait.
        """
        delivered = len(turns(await self._session(thread)))
        number = await asyncio.to_thread(self._mailroom.post, thread, ref, text, delivered)
        self._wake(thread)
        return number

    async def answer(self, handover: int, decision: str, message: str) -> None:
        """A colleague's answer. When this returns it is on disk.

        Raises:
            NotPossible: it has been answered, or the answer does not suit the question.
        """
        self._wake(await asyncio.to_thread(self._mailroom.answer, handover, decision, message))

    # ---------------------------------------------------------------- what can be seen

    async def changed(self, thread: str | None, seen: str, seconds: float) -> str:
        """Wait until there is something new about a thread (None: about any), at most so long. Returns a mark."""
        line = self._all if thread is None else self._line(thread)
        if seen == self._mark(line) and not self._closing:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(line.changed.wait(), seconds)
        return self._mark(line)

    async def for_customer(self, thread: str) -> dict[str, Any]:
        """The conversation, what goes on, and whether a colleague is waited for."""
        session = await self._session(thread)
        inbox, handovers = await self._stored(thread)
        state = self._state(thread, session, inbox, handovers)
        doing = (self._line(thread).doing or _THINKING) if state == "working" else ""
        return {"messages": customer_view(session, inbox, handovers), "state": state, "doing": doing}

    async def for_staff(self, thread: str) -> dict[str, Any]:
        """The conversation with all calls, and the questions to colleagues."""
        session = await self._session(thread)
        inbox, handovers = await self._stored(thread)
        state = self._state(thread, session, inbox, handovers)
        return {"entries": staff_view(session, inbox), "handovers": handovers, "state": state}

    async def advice(self, thread: str, number: int) -> dict[str, Any] | None:
        """One consultation of a thread."""
        return advice_view(await self._session(thread), number)

    # ---------------------------------------------------------------- one thread

    async def _work(self, thread: str) -> None:
        """Advance until there is nothing to do; wait and try again when something failed."""
        line, wait = self._line(thread), self._retry[0]
        while True:
            line.wanted.clear()
            try:
                more = await self._advance(thread)
                line.troubled, wait = False, self._retry[0]
            except Exception as error:  # noqa: BLE001 - whatever it is, this customer's thread must not end here
                _report(thread, error)
                line.troubled, more = True, True
            line.doing = ""
            self._bump(thread)
            if line.troubled:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(line.wanted.wait(), wait)
                wait = min(2 * wait, self._retry[1])
            elif not more and not line.wanted.is_set():
                return

    async def _advance(self, thread: str) -> bool:
        """Do the next thing in a thread. Returns whether there may be another."""
        customer = await asyncio.to_thread(self._mailroom.customer_of, thread)
        snapshot = await self._agent.aget_state(_config(thread))
        session = _session_in(snapshot)
        delivered = len(turns(session))
        given: Any = None
        if snapshot.interrupts:
            if not (answers := await self._answers(thread, snapshot.interrupts)):
                return False
            given = Command(resume=answers)
        elif not snapshot.tasks:  # not `next`: that is empty too where a node has finished and nobody has gone on
            if unanswered(session):
                await asyncio.to_thread(self._ask_for_help, thread, delivered)
            text = await asyncio.to_thread(self._mailroom.message, thread, delivered + 1)
            if text is None:
                if self._tidy is not None:
                    await self._tidy(thread)
                return not await asyncio.to_thread(self._mailroom.settle, thread, delivered)
            given, delivered = {"messages": [{"role": "user", "content": text}]}, delivered + 1
        elif any(task.name in _TAKING_IN for task in snapshot.tasks):
            delivered += 1  # the thread has the message, its session does not know yet
        # With nothing given the graph goes on from where an earlier process was stopped.
        config = _config(thread, customer=customer, turn=delivered)
        async for event in self._agent.astream(given, config, stream_mode="custom"):
            self._note(thread, event)
        return True

    def _ask_for_help(self, thread: str, turn: int) -> None:
        """The bot has no answer to a message: a colleague gives one, straight to the customer."""
        self._mailroom.ask(f"{thread}/unanswered/{turn}", thread, turn, "question", _HELP)

    async def _answers(self, thread: str, interrupts: Any) -> dict[str, Any]:
        """By interrupt, the answers that have come in."""
        rows = {row["id"]: row for row in await asyncio.to_thread(self._mailroom.handovers, thread)}
        asked = {one.id: rows[one.value["handover"]] for one in interrupts}
        return {
            ident: {"decision": row["decision"], "message": row["message"]}
            for ident, row in asked.items()
            if row["decision"] is not None
        }

    def _note(self, thread: str, event: dict[str, Any]) -> None:
        if event["event"] == "tools":  # shown until the next ones: most tools are done before anybody could read it
            known = [_DOING[call["name"]] for call in event["calls"] if call["name"] in _DOING]
            self._line(thread).doing = known[0] if known else ""
        self._bump(thread)

    # ---------------------------------------------------------------- bookkeeping

    def _line(self, thread: str) -> _Line:
        return self._lines.setdefault(thread, _Line())

    def _wake(self, thread: str) -> None:
        line = self._line(thread)
        line.wanted.set()
        self._bump(thread)
        if self._closing or (line.task is not None and not line.task.done()):
            return
        line.task = asyncio.create_task(self._work(thread))

    def _bump(self, thread: str) -> None:
        _bump(self._line(thread))
        _bump(self._all)

    def _mark(self, line: _Line) -> str:
        return f"{self._name}-{line.version}"

    async def _session(self, thread: str) -> Session | None:
        return _session_in(await self._agent.aget_state(_config(thread)))

    async def _stored(self, thread: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return await asyncio.to_thread(lambda: (self._mailroom.messages(thread), self._mailroom.handovers(thread)))

    def _state(self, thread: str, session: Session | None, inbox: list[Any], handovers: list[Any]) -> str:
        """`idle`, `working`, `waiting` (for a colleague) or `delayed` (the model's server fails)."""
        if any(handover["decision"] is None for handover in handovers):
            return "waiting"
        done = len(turns(session)) == len(inbox) and (session is None or session.phase == "done")
        if done:
            return "idle"
        return "delayed" if self._line(thread).troubled else "working"


def _bump(line: _Line) -> None:
    line.version += 1
    line.changed.set()
    line.changed = asyncio.Event()


def _config(thread: str, **known: Any) -> Any:
    return {"configurable": {"thread_id": thread, **known}}


def _session_in(snapshot: Any) -> Session | None:
    stored = snapshot.values.get("session")
    return Session.load(stored) if stored else None


def _report(thread: str, error: Exception) -> None:
    """Say that something failed, in a line. The error's own text stays out: it may quote the conversation."""
    where = f" at {error.url}" if isinstance(error, EndpointError) and error.url else ""
    log.warning("%s: %s%s; trying again later", thread, type(error).__name__, where)
