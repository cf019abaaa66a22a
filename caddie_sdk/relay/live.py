"""Sessions of conversations that are under way, so that a request costs what is new in it.

Nothing depends on them: a session that is gone is made again from the caller's history and the ledger.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from caddie_sdk.session import Session

LIVE_BYTES = 32 * 2**20
"""About how much all live sessions may hold."""
_PER_MESSAGE = 2000
"""Bytes that a message costs beside its text: nodes, dictionaries, facts about it."""


@dataclass(frozen=True, slots=True)
class Live:
    """A session at the end of a history that a caller has been shown.

    Attributes:
        places: position in the session's path to number of the caller's message there.
        kept: position to the form its author wrote, for turns that the caller does not see in full.
        told: how many of the caller's messages the session knows.
        made_for: what it was configured from.
    """

    session: Session
    places: dict[int, int]
    kept: dict[int, tuple[Any, ...]]
    told: int
    made_for: Any


class LiveSessions:
    """The sessions used last. Each is handed out once: whoever takes it puts it back under its next key.

    Args:
        max_bytes: about how much they may hold together.
    """

    def __init__(self, max_bytes: int = LIVE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[Live, int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def take(self, keys: Sequence[str], made_for: Any) -> Live | None:
        """The session of the longest of these prefixes, if one is there and was configured from the same."""
        with self._lock:
            key = next((key for key in reversed(keys) if key in self._entries), None)
            if key is None:
                return None
            live, weight = self._entries.pop(key)
            self._size -= weight
        return live if live.made_for == made_for else None

    def put(self, key: str, live: Live) -> None:
        """Keep a session under the key of all that its caller has been shown."""
        path = live.session.history.path()
        weight = sum(len(node.message["content"]) + _PER_MESSAGE for node in path)
        with self._lock:
            _, old = self._entries.pop(key, (None, 0))
            self._entries[key] = live, weight
            self._size += weight - old
            while self._size > self.max_bytes and self._entries:
                _, (_, gone) = self._entries.popitem(last=False)
                self._size -= gone
