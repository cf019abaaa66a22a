"""Records: one JSON line per finished piece of work, on disk before the next one starts.

A process may be killed at any moment. What was appended stays; a line that was cut off in the middle is removed
when the file is opened again, so that nothing finished is lost and nothing is read twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from caddie_sdk.errors import CaddieError, ConfigError


class RecordError(CaddieError):
    """A record could not be written; the message says which file and why."""


class RecordFile:
    """An append-only JSONL file, synced to disk after every record.

    Args:
        path: where it lies; folders are made.
        resume: keep what is there (without a torn last line); otherwise start empty.

    Raises:
        RecordError: the file cannot be opened or written (no permission, disk full, ...).
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume:
                _drop_torn_line(self.path)
            self._file = open(self.path, "ab" if resume else "wb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise RecordError(f"cannot write {self.path}: {error.strerror or error}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and wait until it is on disk."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
        start = self._file.tell()
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._cut_back(start)
            raise RecordError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _cut_back(self, size: int) -> None:
        """After a failed write, leave whole lines only."""
        try:
            os.truncate(self.path, size)
        except OSError:
            return  # the torn line is dropped when the file is opened again

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a file, in order; nothing when it does not exist.

    Raises:
        ConfigError: a line is not a JSON object.
    """
    if not Path(path).exists():
        return
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise ConfigError(f"{path}, line {number}: not a record; remove the line or start without --resume")
            yield record
