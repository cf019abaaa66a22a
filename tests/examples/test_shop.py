"""The shop's records: what they allow, and that nothing gets in twice or askew, whoever writes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bot_kit import contents, count, rows

from caddie_sdk.errors import ConfigError
from examples.support_bot.shop import Refused, Shop
from examples.support_bot.store import Store, check_file


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "shop.db")


@pytest.fixture
def shop(store: Store) -> Shop:
    return Shop(store)


def refused(words: str) -> Any:
    return pytest.raises(Refused, match=words)


def change(store: Store, statement: str) -> None:
    with store.writing() as db:
        db.execute(statement)


def test_what_may_be_returned(shop: Shop) -> None:
    boots, lamp, voucher = shop.returnable("C1", "w1001")["items"]
    assert boots["exchange_for"] == [{"variant": "BOOT-40", "options": "size 40"}]  # 41 is sold out
    assert lamp["exchange_for"] == [{"variant": "LAMP-BK", "options": "black"}]
    assert voucher["why_not"] == "it was sold as final sale"
    assert [item["why_not"] for item in shop.returnable("C1", "W1002")["items"]] == [
        "the order is processing, not delivered"
    ] * 2
    assert "more than 30 days ago" in shop.returnable("C1", "W1003")["items"][0]["why_not"]
    tent, _ = shop.returnable("C2", "W2001")["items"]
    assert tent["exchange_for"] == []  # the other size has another price


@pytest.mark.parametrize(("days", "allowed"), [(0, True), (30, True), (31, False)])
def test_the_last_day(days: int, allowed: bool, shop: Shop, store: Store) -> None:
    change(store, f"UPDATE orders SET delivered_on = date('now', '-{days} days') WHERE id = 'W1001'")
    assert shop.returnable("C1", "W1001")["items"][0]["returnable"] is allowed


def test_a_return_is_done_once_however_it_is_written(shop: Shop, store: Store) -> None:
    first = shop.start_return("t", "C1", "W1001", ["W1001-1", "W1001-2"], "too small")
    assert first == {
        "return": "R1", "items": ["W1001-1", "W1001-2"],
        "refund": "F1", "amount": "134.50 EUR", "to": "card", "status": "pending",
    }  # fmt: skip
    assert shop.start_return("t", "C1", " w1001", ["w1001-2 ", "W1001-1", "W1001-1"], "other words") == first
    with refused("W1001-1 cannot be sent back: it was returned before"):
        shop.start_return("t", "C1", "W1001", ["W1001-1"], "again")
    with refused("it was returned before"):
        shop.start_return("another thread", "C1", "W1001", ["W1001-1", "W1001-2"], "again")
    with refused("it was returned before"):
        shop.exchange("t", "C1", "W1001", "W1001-1", "BOOT-40")
    assert [count(store.path, table) for table in ("actions", "returns", "return_items", "refunds")] == [1, 1, 2, 1]
    assert shop.refunds("C1", "W1001")["refunds"] == [
        {"refund": "F1", "for": "return R1", "amount": "134.50 EUR", "to": "card", "status": "pending"}
    ]


def test_an_exchange_moves_stock_once(shop: Shop, store: Store) -> None:
    first = shop.exchange("t", "C1", "W1001", "W1001-1", "boot-40")
    assert first == {"exchange": "X1", "item": "W1001-1", "for": "size 40"}
    assert shop.exchange("t", "C1", "W1001", "w1001-1", "BOOT-40") == first
    assert rows(store.path, "SELECT stock FROM variants WHERE id = 'BOOT-40'") == [(1,)]
    with refused("it was exchanged before"):
        shop.exchange("t", "C1", "W1001", "W1001-1", "BOOT-39")
    with refused("cannot be exchanged for TENT-4; possible variants: LAMP-BK"):
        shop.exchange("t", "C1", "W1001", "W1001-2", "TENT-4")


def test_a_cancellation(shop: Shop, store: Store) -> None:
    first = shop.cancel("t", "C1", "W1002", "too late")
    assert first == {"cancelled": "W1002", "refund": "F1", "amount": "25.00 EUR", "to": "paypal", "status": "pending"}
    assert shop.cancel("t", "C1", "W1002", "really") == first
    assert rows(store.path, "SELECT stock FROM variants WHERE id = 'MUG-GR'") == [(42,)]
    with refused("W1002 is cancelled; only orders that are processing"):
        shop.cancel("another thread", "C1", "W1002", "again")
    with refused("W2002 is shipped"):
        shop.cancel("t", "C2", "W2002", "no")


@pytest.mark.parametrize(
    "call",
    [
        lambda shop: shop.order("C1", "W2001"),
        lambda shop: shop.returnable("C1", "W2001"),
        lambda shop: shop.refunds("C1", "W2001"),
        lambda shop: shop.return_value("C1", "W2001", ["W2001-1"]),
        lambda shop: shop.start_return("t", "C1", "W2001", ["W2001-1"], ""),
        lambda shop: shop.exchange("t", "C1", "W2001", "W2001-1", "TENT-2"),
        lambda shop: shop.cancel("t", "C1", "W2001", ""),
    ],
)
def test_other_customers_orders(call: Callable[[Shop], Any], shop: Shop, store: Store) -> None:
    before = contents(store.path)
    with refused("this customer has no order W2001"):
        call(shop)
    assert contents(store.path) == before


def test_items_that_do_not_exist(shop: Shop) -> None:
    with refused("W1001 has no item W2001-1; its items are W1001-1"):
        shop.start_return("t", "C1", "W1001", ["W1001-1", "W2001-1"], "")
    with refused("name at least one item"):
        shop.start_return("t", "C1", "W1001", [], "")


def test_many_at_once(shop: Shop, store: Store) -> None:
    """Sixteen calls of the same return, and sixteen threads that want the same item."""
    with ThreadPoolExecutor(16) as pool:
        same = list(pool.map(lambda _: shop.start_return("t", "C1", "W1001", ["W1001-1"], ""), range(16)))
        assert same == [same[0]] * 16

        def wants(number: int) -> bool:
            try:
                shop.exchange(f"thread {number}", "C1", "W1001", "W1001-2", "LAMP-BK")
            except Refused:
                return False
            return True

        assert sorted(pool.map(wants, range(16))) == [False] * 15 + [True]
    assert [count(store.path, table) for table in ("returns", "refunds", "exchanges", "actions")] == [1, 1, 1, 2]
    assert rows(store.path, "SELECT stock FROM variants WHERE id = 'LAMP-BK'") == [(0,)]


BROKEN = {
    "INSERT INTO orders VALUES ('W9', 'C9', '2026-01-01', NULL, 'shipped')": "FOREIGN KEY",
    "UPDATE orders SET status = 'delivered' WHERE id = 'W1002'": "CHECK constraint failed: .*delivered_on",
    "UPDATE orders SET status = 'lost' WHERE id = 'W1002'": "CHECK constraint failed: status IN",
    "UPDATE variants SET stock = -1 WHERE id = 'BOOT-41'": "CHECK constraint failed: stock >= 0",
    "UPDATE payments SET amount_cents = 'much'": "cannot store TEXT value in INTEGER",
    "UPDATE items SET status = 'exchanged' WHERE id = 'W2001-2'": "has been returned, exchanged or cancelled before",
    "UPDATE actions SET outcome = 'x'": "CHECK constraint failed: json_valid",
    "INSERT INTO actions SELECT * FROM actions": "UNIQUE constraint failed: actions.key",
    "INSERT INTO returns (action_key, order_id, reason) VALUES ('x', 'W1001', '')": "FOREIGN KEY",
    "INSERT INTO return_items VALUES (1, 'W2001-2')": "UNIQUE constraint failed: return_items.item_id",
    "INSERT INTO return_items VALUES (1, 'W1001-1')": "the item belongs to another order",
    "INSERT INTO refunds (payment_id, return_id, amount_cents) VALUES ('P2001', 1, 1)": "UNIQUE .*refunds.return_id",
    "INSERT INTO refunds (payment_id, return_id, amount_cents) VALUES ('P2001', 1, 41150)": "more would be refunded",
    "INSERT INTO refunds (payment_id, amount_cents) VALUES ('P1001', 1)": "CHECK constraint failed: .*cancellation_id",
}


@pytest.mark.parametrize("statement", BROKEN)
def test_records_refuse(statement: str, shop: Shop, store: Store) -> None:
    shop.start_return("t", "C2", "W2001", ["W2001-2"], "")
    before = contents(store.path)
    with pytest.raises(sqlite3.IntegrityError, match=BROKEN[statement]):
        change(store, statement)
    assert contents(store.path) == before


def test_files_that_are_something_else(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_text("not a database, but long enough to be looked at " * 40)
    with pytest.raises(ConfigError, match="file is not a database"):
        check_file(text)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE mine (x)")
    with pytest.raises(ConfigError, match="is a database of something else"):
        Store(other)
    assert rows(other, "SELECT count(*) FROM sqlite_schema") == [(1,)]
    with pytest.raises(ConfigError, match="unable to open database file"):
        Store(tmp_path / "nowhere" / "shop.db")
