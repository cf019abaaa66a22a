"""What is done for every message of every request, made cheap: JSON by orjson, a memory for what was read before."""

from __future__ import annotations

import json
import marshal
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import orjson

T = TypeVar("T")


def loads(data: bytes | str) -> Any:
    """JSON read; like `json.loads` where orjson is stricter than servers and clients are (lone surrogates, NaN).

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return orjson.loads(data)
    except ValueError:
        return json.loads(data)


def dumps(value: Any) -> bytes:
    """JSON written, as UTF-8; what orjson refuses (lone surrogates, huge numbers) in plain ASCII."""
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):
        return json.dumps(value).encode()


class Memo(Generic[T]):
    """Remembers what was made of a message: a conversation sends all its earlier ones again with every request.

    Args:
        make: what is to be remembered; must depend on the message alone.
        max_bytes: of remembered messages and what was made of them, about; the ones used longest ago go first.
    """

    def __init__(self, make: Callable[[Mapping[str, Any]], T], max_bytes: int = 8 * 2**20) -> None:
        self._make, self.max_bytes = make, max_bytes
        self._known: OrderedDict[bytes, T] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __call__(self, message: Any) -> T:
        """What `make` gives for the message; its errors get through."""
        try:
            key = marshal.dumps(message)
        except ValueError:
            return self._make(message)
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        made = self._make(message)
        with self._lock:
            if key not in self._known:
                self._known[key] = made
                self._size += _weight(key)
            while self._size > self.max_bytes:
                gone, _ = self._known.popitem(last=False)
                self._size -= _weight(gone)
        return made


def _weight(key: bytes) -> int:
    """About what an entry takes: the message as bytes and as objects, and what was made of it."""
    return 1500 + 4 * len(key)
