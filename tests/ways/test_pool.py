"""Several HTTP clients in place of one."""

from __future__ import annotations

import contextlib

import httpx

from caddie_sdk.shells.pool import PER_CLIENT, Pool


class Counted:
    """Makes clients and counts them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, connections: int) -> httpx.AsyncClient:
        self.sizes.append(connections)
        return httpx.AsyncClient()


def test_one_client_serves_until_it_is_full() -> None:
    made = Counted()
    pool = Pool(made, 100)
    taken = [pool.take() for _ in range(PER_CLIENT)]
    assert taken == [0] * PER_CLIENT
    assert pool.take() == 1
    assert made.sizes == [PER_CLIENT, PER_CLIENT]
    pool.give_back(0)
    assert pool.take() == 0, "room at the first client is used before the second's"


def test_connections_are_bounded_and_the_least_busy_client_takes_what_is_more() -> None:
    made = Counted()
    pool = Pool(made, 2 * PER_CLIENT)
    for _ in range(2 * PER_CLIENT):
        pool.take()
    pool.give_back(1)
    assert [pool.take(), pool.take(), pool.take()] == [1, 0, 1]
    assert len(made.sizes) == 2


def test_fewer_connections_than_one_client_would_hold() -> None:
    made = Counted()
    pool = Pool(made, 3)
    assert [pool.take() for _ in range(5)] == [0] * 5
    assert made.sizes == [3]


async def test_a_slot_gives_its_place_back_whatever_happens() -> None:
    pool = Pool(Counted(), 1)
    with contextlib.suppress(RuntimeError), pool.slot() as slot:
        client = slot.client
        raise RuntimeError("the request broke off")
    with pool.slot() as again:
        assert again.client is client
    await pool.aclose()
    assert client.is_closed
