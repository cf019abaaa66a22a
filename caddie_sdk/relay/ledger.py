"""What callers never see, found again by the content of what they do see (SPEC §4, rule 4).

A caller's history lacks the consultations. Each turn that held one is kept here under the hash of everything the
caller could see up to and including that turn; when the same history comes back, the turn is put back. A history
that was edited hashes differently, so nothing is ever put back in a wrong place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from caddie_sdk.errors import ConfigError
from caddie_sdk.messages import Message, dump_json, parse_arguments

log = logging.getLogger("caddie.relay")

MEMORY_BYTES = 64 * 2**20
"""Default size of the ledger in memory."""
KEEP_SECONDS = 30 * 86400.0
"""Default age, since it was last written, at which an entry of a ledger file is dropped."""


class Ledger(Protocol):
    """Where hidden turns are kept. Thread-safe; bounded; an entry may be gone at any time."""

    def get(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The entries there are among these keys."""
        ...

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        """Keep an entry, in place of an older one."""
        ...

    def drop(self, key: str) -> None:
        """Forget an entry, if there is one."""
        ...


def chain(scope: str, marks: Iterable[bytes]) -> list[str]:
    """A key for each prefix of a visible history: the n-th depends on the first n messages and on nothing else.

    Args:
        scope: keeps strangers apart; two callers with equal histories and different scopes share nothing.
        marks: the fingerprints of the visible history's messages.
    """
    key, keys = hashlib.sha256(scope.encode()).hexdigest(), []
    for mark in marks:
        key = _next(key, mark)
        keys.append(key)
    return keys


def extend(key: str, message: Message) -> str:
    """The key of the prefix that is one message longer."""
    return _next(key, fingerprint(message))


def _next(key: str, mark: bytes) -> str:
    return hashlib.sha256(key.encode() + mark).hexdigest()


def beside(key: str, what: str) -> str:
    """A key for something else that is kept about the same prefix."""
    return hashlib.sha256(f"{key}/{what}".encode()).hexdigest()


def fingerprint(message: Message) -> bytes:
    """What must be equal for two messages to count as the same.

    Clients parse arguments and write them anew, trim texts, and drop reasoning: none of that makes another message.
    """
    role, content = message["role"], message["content"]
    facts = [content if isinstance(content, str) else dump_json(content), message.get("tool_call_id", "")]
    facts[0] = facts[0].strip()
    for call in message.get("tool_calls", ()):
        facts += [call["id"], call["function"]["name"], _arguments(call["function"]["arguments"])]
    # Lengths keep the parts apart, whatever stands in them.
    return "".join([role, *(f"/{len(fact)}:{fact}" for fact in facts)]).encode("utf-8", "surrogatepass")


def _arguments(raw: str) -> str:
    # Long ones are rare, and a memory of thousands of them would be large.
    return _plain_arguments(raw) if len(raw) > 1000 else _known_arguments(raw)


def _plain_arguments(raw: str) -> str:
    try:
        parsed = parse_arguments(raw)
        return raw.strip() if parsed is None else json.dumps(_same(parsed), sort_keys=True)
    except RecursionError:
        return raw.strip()


_known_arguments = lru_cache(maxsize=4096)(_plain_arguments)


def _same(value: Any) -> Any:
    """JSON in which 2 and 2.0 are one number, as they are in JavaScript."""
    if isinstance(value, dict):
        return {key: _same(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_same(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class MemoryLedger:
    """A ledger in memory; the entries used longest ago go first.

    Args:
        max_bytes: size of all entries as JSON, at most.
    """

    def __init__(self, max_bytes: int = MEMORY_BYTES) -> None:
        if max_bytes < 0:
            raise ConfigError(f"max_bytes must not be negative, got {max_bytes}")
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        found: dict[str, bytes] = {}
        with self._lock:
            for key in keys:
                if (entry := self._entries.get(key)) is not None:
                    self._entries.move_to_end(key)
                    found[key] = entry
        return {key: json.loads(entry) for key, entry in found.items()}

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        text = _pack(entry)
        with self._lock:
            self._forget(key)
            if len(text) + len(key) > self.max_bytes:
                return  # in its place everything else would have to go
            self._entries[key] = text
            self._size += len(text) + len(key)
            while self._size > self.max_bytes and self._entries:
                self._forget(next(iter(self._entries)))

    def drop(self, key: str) -> None:
        with self._lock:
            self._forget(key)

    def _forget(self, key: str) -> None:
        old = self._entries.pop(key, None)
        if old is not None:
            self._size -= len(old) + len(key)


class SqliteLedger:
    """A ledger in an SQLite file, for callers whose histories outlive the process. Several processes may share it.

    A file that fails later on (a full disk, a lock that is held) costs advice, not requests: it is logged.

    The file holds parts of conversations in clear text; it is created readable by its owner alone.

    Args:
        path: the file.
        keep: seconds after which an entry that was not written again is dropped.

    Raises:
        ConfigError: the file cannot be opened, or is no such ledger.
    """

    def __init__(self, path: str | Path, keep: float = KEEP_SECONDS) -> None:
        self.path, self.keep = Path(path), keep
        self._lock = threading.Lock()
        self._puts = 0
        try:
            self.path.touch(mode=0o600)
            self._db = sqlite3.connect(self.path, check_same_thread=False, timeout=10.0, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, entry BLOB NOT NULL, written REAL NOT NULL)"
                " WITHOUT ROWID"
            )
            self._db.execute("CREATE INDEX IF NOT EXISTS by_age ON entries (written)")
            self._clean()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"ledger {str(path)!r}: {error}; give the path of a writable SQLite file") from error

    def get(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        with self._open():
            for start in range(0, len(keys), 500):
                part = list(keys[start : start + 500])
                marks = ",".join("?" * len(part))
                rows = self._db.execute(f"SELECT key, entry FROM entries WHERE key IN ({marks})", part)
                found |= {key: json.loads(entry) for key, entry in rows}
        return found

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        with self._open():
            self._db.execute("REPLACE INTO entries VALUES (?, ?, ?)", (key, _pack(entry), time.time()))
            self._puts += 1
            if self._puts % 1000 == 0:
                self._clean()

    def drop(self, key: str) -> None:
        with self._open():
            self._db.execute("DELETE FROM entries WHERE key = ?", (key,))

    @contextmanager
    def _open(self) -> Iterator[None]:
        """The database, for one thread at a time; its failures are told to operators and stop nobody."""
        with self._lock:
            try:
                yield
            except (sqlite3.Error, ValueError) as error:
                log.warning("the ledger %s failed, so advice may be missing: %s", self.path, error)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _clean(self) -> None:
        self._db.execute("DELETE FROM entries WHERE written < ?", (time.time() - self.keep,))


def _pack(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, ensure_ascii=True, separators=(",", ":"), default=str).encode()
