"""Server-sent events, as model servers send them: read from any cut of bytes, and written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event: its data, and its name where it has one."""

    data: str
    name: str = ""

    def json(self) -> Any:
        """The data as JSON; None when it is none."""
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError):
            return None


class EventReader:
    """Cuts a byte stream into events. Lines may end in CR, LF or both, and arrive in any pieces."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._after_cr = self._past_start = False
        self._data: list[str] = []
        self._name = ""

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        """The events that these bytes complete."""
        if self._after_cr and data:
            data, self._after_cr = data.removeprefix(b"\n"), False
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = data.split(b"\n")
        for line in lines:
            whole = b"".join((*self._rest, line)).decode("utf-8", "replace")
            self._rest = []
            yield from self._line(whole if self._past_start else whole.removeprefix("\ufeff"))
            self._past_start = True
        if rest:
            self._rest.append(rest)

    def close(self) -> Iterator[ServerEvent]:
        """The event that lacked its closing blank line, if there is one (some servers forget it)."""
        self._after_cr = False
        yield from self.feed(b"\n\n")

    def _line(self, line: str) -> Iterator[ServerEvent]:
        if not line:
            if self._data:
                yield ServerEvent("\n".join(self._data), self._name)
            self._data, self._name = [], ""
            return
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value


def event(data: Any, name: str = "") -> bytes:
    """One event as bytes. `data` is JSON, or a text sent as it is."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    lines = text.replace("\n", "\ndata: ")
    return f"{head}data: {lines}\n\n".encode("utf-8", "replace")
