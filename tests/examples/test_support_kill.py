"""`kill -9` of the server at any moment: another one goes on, the records are sound, nothing is done twice."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from bot_kit import (
    BOOTS,
    CANCEL,
    SWAP,
    TENT,
    YES,
    Bot,
    Customer,
    contents,
    count,
    critic_says,
    model_says,
    rows,
    wait_until,
)
from upstream import Upstream


class Held:
    """A script that keeps its caller waiting at one call, once."""

    def __init__(self, script: Callable[[Mapping[str, Any]], Any], number: int) -> None:
        self._script, self._left = script, number
        self.reached = threading.Event()

    async def __call__(self, body: Mapping[str, Any]) -> Any:
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            await asyncio.sleep(60)
        return self._script(body)


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Customer]:
    """A conversation in which the return has been proposed; and its customer, who is signed in."""
    folder = tmp_path_factory.mktemp("halfway")
    with Upstream(model_says) as model, Bot(folder, model.url) as bot:
        nadia = Customer(bot)
        nadia.ask(BOOTS)
    return folder, nadia


@contextmanager
def going_on(
    halfway: tuple[Path, Customer], folder: Path, model: str, critic: str, fault: str = ""
) -> Iterator[Customer]:
    """The customer of `halfway` before a bot of their own."""
    shutil.copytree(halfway[0], folder)
    with Bot(folder, model, critic, fault) as bot:
        nadia = halfway[1]
        nadia.bot = bot
        yield nadia


def say(customer: Customer, text: str) -> bool:
    """Send a message; False if the server died over it."""
    try:
        return customer.post(text, "the-yes").status_code == 202
    except httpx.HTTPError:
        return False


def outcome(customer: Customer) -> tuple[Any, ...]:
    """All there is to compare: the records, what the customer sees, what staff sees."""
    bot = customer.bot
    wait_until(lambda: _settled(customer), "end of the turn")
    entries = [{k: v for k, v in entry.items() if k != "at"} for entry in bot.thread(customer.id)["entries"]]
    return contents(bot.db), customer.said("customer"), customer.said("bot"), entries


@pytest.fixture(scope="module")
def unbroken(halfway: tuple[Path, Customer], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("unbroken") / "bot"
    with (
        Upstream(model_says) as model,
        Upstream(critic_says) as critic,
        going_on(halfway, folder, model.url, critic.url) as nadia,
    ):
        assert say(nadia, YES)
        assert "'return': 'R1'" in nadia.hears(2)
        assert len(critic.chats) == 1
        found = outcome(nadia)
    assert [len(found[0][table]) for table in ("actions", "returns", "return_items", "refunds")] == [1, 1, 1, 1]
    return found


def check_finished(customer: Customer, unbroken: tuple[Any, ...]) -> None:
    """The conversation comes to its end, as if nothing had happened."""
    assert "'return': 'R1'" in customer.hears(2)
    assert outcome(customer) == unbroken


@pytest.mark.parametrize(
    ("fault", "done"),
    [
        ("shop:INSERT INTO inbox:before", 0),
        ("shop:INSERT INTO inbox:after", 0),
        ("shop:INSERT INTO returns:before", 0),
        ("shop:INSERT INTO returns:after", 1),
    ],
)
def test_killed_around_a_commit(
    fault: str, done: int, halfway: Any, unbroken: Any, tmp_path: Path, model: Upstream, critic: Upstream
) -> None:
    with going_on(halfway, tmp_path / "bot", model.url, critic.url, fault) as nadia:
        say(nadia, YES)
        nadia.bot.died()
        assert count(nadia.bot.db, "returns") == count(nadia.bot.db, "refunds") == done
        with Bot(tmp_path / "bot", model.url, critic.url) as nadia.bot:
            # Whoever got no answer sends the same message again; it counts once.
            assert say(nadia, YES)
            check_finished(nadia, unbroken)
    assert len(critic.chats) == 1


@pytest.mark.parametrize("number", [1, 2, 3])
def test_killed_while_the_model_thinks(
    number: int, halfway: Any, unbroken: Any, tmp_path: Path, critic: Upstream
) -> None:
    held = Held(model_says, number)
    with Upstream(held) as model, going_on(halfway, tmp_path / "bot", model.url, critic.url) as nadia:
        assert say(nadia, YES)
        assert held.reached.wait(10)
        nadia.bot.kill()
        assert count(nadia.bot.db, "returns") == (number == 3)
        with Bot(tmp_path / "bot", model.url, critic.url) as nadia.bot:
            check_finished(nadia, unbroken)
    assert len(critic.chats) == 1


def test_killed_while_the_critic_is_asked(halfway: Any, unbroken: Any, tmp_path: Path, model: Upstream) -> None:
    held = Held(critic_says, 1)
    with Upstream(held) as critic, going_on(halfway, tmp_path / "bot", model.url, critic.url) as nadia:
        assert say(nadia, YES)
        assert held.reached.wait(10)
        assert count(nadia.bot.db, "returns") == 0
        nadia.bot.kill()
        with Bot(tmp_path / "bot", model.url, critic.url) as nadia.bot:
            check_finished(nadia, unbroken)
        assert len(critic.chats) == 2


@pytest.mark.slow
@pytest.mark.parametrize("file", ["shop", "threads"])
def test_killed_after_every_single_commit(
    file: str, halfway: Any, unbroken: Any, tmp_path: Path, model: Upstream, critic: Upstream
) -> None:
    """From the customer's word to the end of the turn, one run for each commit to the file."""
    died = 0
    for number in range(1, 100):
        folder = tmp_path / str(number)
        with going_on(halfway, folder, model.url, critic.url, f"{file}::after:{number}") as nadia:
            sent = say(nadia, YES)
            if _finished(nadia):
                check_finished(nadia, unbroken)
                break
            died += 1
            nadia.bot.died()
            with Bot(folder, model.url, critic.url) as nadia.bot:
                assert sent or say(nadia, YES)
                check_finished(nadia, unbroken)
                nadia.bot.kill()
    print(f"{file}: killed after each of {died} commits")
    assert died >= {"shop": 3, "threads": 10}[file]


def _finished(customer: Customer) -> bool:
    """Whether the conversation came to its end; else the server has died over it."""
    try:
        customer.hears(2)
    except httpx.HTTPError:
        return False
    wait_until(lambda: _settled(customer) or not customer.bot.process.is_alive(), "end of the turn")
    return customer.bot.process.is_alive()


def _settled(customer: Customer) -> bool:
    return rows(customer.bot.db, f"SELECT open FROM threads WHERE customer_id = '{customer.id}'") == [(0,)]


@pytest.mark.parametrize(
    ("text", "table"), [(CANCEL, "cancellations"), (SWAP, "exchanges")], ids=["cancel", "exchange"]
)
def test_other_actions_are_done_once(text: str, table: str, start: Callable[..., Bot]) -> None:
    bot = start(fault=f"shop:INSERT INTO {table}:after")
    nadia = Customer(bot)
    nadia.post(text)
    bot.died()
    assert count(bot.db, table) == count(bot.db, "actions") == 1
    before = contents(bot.db)
    nadia.bot = start()
    assert nadia.hears(1).startswith("Done: ")
    wait_until(lambda: _settled(nadia), "end of the turn")
    after = contents(bot.db)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"threads"}  # the conversation is over; not one record, nor any stock, has moved again


def test_a_hand_over_survives_restarts(start: Callable[..., Bot]) -> None:
    """Killed while it waits; and again once the colleague's answer is on disk, before the thread has gone on."""
    bot = start()
    tomas = Customer(bot, "C2")
    tomas.post(TENT)
    asked = bot.waiting("C2")
    assert (asked["kind"], asked["amount_cents"]) == ("approval", 39900)
    bot.kill()
    tomas.bot = bot = start(fault="shop:UPDATE handovers:after")
    assert bot.waiting("C2")["id"] == asked["id"]
    assert tomas.chat()["state"] == "waiting"
    with pytest.raises(httpx.HTTPError):
        bot.answers("C2", "approve", "Go ahead.")
    bot.died()
    assert count(bot.db, "returns") == 0
    tomas.bot = start(fault="shop:INSERT INTO returns:after")
    tomas.bot.died()
    tomas.bot = bot = start()
    assert "'return': 'R1'" in tomas.hears(1)
    assert tomas.said("staff") == ["Go ahead."]
    assert [count(bot.db, table) for table in ("handovers", "actions", "returns", "refunds")] == [1, 1, 1, 1]


def test_killed_again_and_again_with_two_customers(
    start: Callable[..., Bot], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """At moments nobody chose. Both conversations end as they do in one go."""

    def talk(kills: int, folder: Path) -> dict[str, Any]:
        bot = start(folder=folder)
        nadia, tomas = Customer(bot), Customer(bot, "C2")
        nadia.ask(BOOTS)
        assert nadia.post(YES).status_code == 202
        assert tomas.post(TENT).status_code == 202
        for kill in range(kills):
            threading.Event().wait(0.011 * (kill + 1))
            bot.kill()
            nadia.bot = tomas.bot = bot = start(folder=folder)
        bot.answers("C2", "approve")
        assert "'return': 'R" in nadia.hears(2)
        assert "'return': 'R" in tomas.hears(1)
        assert nadia.ask(CANCEL).startswith("Done: ")
        found = contents(bot.db)
        del found["actions"]  # holds numbers that depend on who was first
        return {name: len(table) for name, table in found.items()} | {
            "items": found["items"],
            "left": found["variants"],
        }

    assert talk(6, tmp_path) == talk(0, tmp_path_factory.mktemp("whole"))
