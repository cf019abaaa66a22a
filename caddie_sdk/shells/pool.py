"""HTTP clients to one server, several in place of one.

httpx's connection pool looks at all of its connections for every request that begins or ends, so its cost a request
grows with how many are under way: at 64 it was five times that of a single one (`benchmarks/proxy.py`). Here each
client serves a few requests at a time, and another is made when all are busy.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import httpx

PER_CLIENT = 8
"""Requests that one client serves at a time, as long as further clients may be made."""


class Pool:
    """Clients of one event loop.

    Args:
        make: makes a client that holds at most so many connections.
        connections: to the server, at one time; requests beyond that wait for a connection.
    """

    def __init__(self, make: Callable[[int], httpx.AsyncClient], connections: int) -> None:
        self._make, self._per_client = make, min(PER_CLIENT, connections)
        self._most = max(1, connections // self._per_client)
        self._clients: list[httpx.AsyncClient] = []
        self._busy: list[int] = []

    def slot(self) -> Slot:
        """A place for one request at a time."""
        return Slot(self)

    def take(self) -> int:
        """The number of a client with room: the first one there is, so that open connections are used again."""
        number = next((n for n, busy in enumerate(self._busy) if busy < self._per_client), None)
        if number is None and len(self._clients) < self._most:
            self._clients.append(self._make(self._per_client))
            self._busy.append(0)
            number = len(self._clients) - 1
        elif number is None:
            number = self._busy.index(min(self._busy))
        self._busy[number] += 1
        return number

    def give_back(self, number: int) -> None:
        """A request of this client is over."""
        self._busy[number] -= 1

    def client(self, number: int) -> httpx.AsyncClient:
        """The client of this number."""
        return self._clients[number]

    async def aclose(self) -> None:
        """Close all clients; requests that are still under way break off."""
        for client in self._clients:
            await client.aclose()


class Slot:
    """A place in a `Pool`, for the length of a `with` block."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self._number = pool, -1

    @property
    def client(self) -> httpx.AsyncClient:
        """The client; inside the block only."""
        return self._pool.client(self._number)

    def __enter__(self) -> Slot:
        self._number = self._pool.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.give_back(self._number)
