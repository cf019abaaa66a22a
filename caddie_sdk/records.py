"""Records: one JSON line per finished piece of work, on disk before the next one starts.

A process may be killed at any moment. What was appended stays; a line that was cut off in the middle is removed
when the file is opened or appended to again, so that nothing finished is lost and nothing is read twice.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from caddie_sdk.errors import CaddieError, ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class RecordError(CaddieError):
    """A record could not be written; the message says which file and why."""


class RecordFile:
    """An append-only JSONL file, synced to disk after every record.

    A pipe or a device (`/dev/stdout`) is written as it is: it cannot be synced, nor resumed.

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
            # Without a buffer, what one write could not store is never tried again when the file is closed.
            self._file = open(self.path, "ab" if resume else "wb", buffering=0)  # noqa: SIM115 - closed by close()
            self._on_disk = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        except (OSError, ValueError) as error:
            raise RecordError(f"cannot write {self.path}: {_why(error)}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and wait until it is on disk.

        Raises:
            RecordError: the file cannot be written, or the record is no JSON (a NaN, say). Nothing of it stays.
        """
        line = _line(record)
        start = self._file.tell() if self._on_disk else 0
        try:
            while line:
                line = line[self._file.write(line) :]
            if self._on_disk:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._cut_back(start)
            raise RecordError(f"cannot write {self.path}: {_why(error)}") from error

    def _cut_back(self, size: int) -> None:
        """After a failed write, leave whole lines only."""
        if not self._on_disk:
            return
        try:
            self._file.truncate(size)
            self._file.seek(size)
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


def append_shared(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Append one record to a file that several threads and processes write, and wait until it is on disk.

    The file is opened and locked for each record, so that nothing is shared with a forked child and a file that was
    moved away is made anew. Only its owner may read it (mode 0600) when it is made here. Where the platform has no
    `flock`, the lock is left out.

    Raises:
        RecordError: the file cannot be written, or the record is no JSON. Nothing of it stays.
    """
    line, where = _line(record), Path(path)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(where, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0) as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
            end = _last_whole_line(file)
            file.truncate(end)  # whoever was writing the torn line is gone: we hold the lock
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(end)
                raise
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot write {where}: {_why(error)}") from error


def _last_whole_line(file: FileIO) -> int:
    """Where the last line that was written to its end stops."""
    at = file.seek(0, os.SEEK_END)
    while at:
        size = min(at, 8192)
        file.seek(at - size)
        newline = file.read(size).rfind(b"\n")
        if newline >= 0:
            return at - size + newline + 1
        at -= size
    return 0


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"a record must be plain JSON: {error}") from error


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _drop_torn_line(path: Path) -> None:
    whole = sum(len(line) for line in _whole_lines(path))
    if path.exists() and path.stat().st_size != whole:
        os.truncate(path, whole)


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The lines that were written to their end; none when the file does not exist.

    Raises:
        ConfigError: it cannot be read, or is a pipe or device and might never end.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"cannot read {path}: not a regular file")
        with open(path, "rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {_why(error)}") from error


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a file, in order, without a torn last line; nothing when it does not exist.

    Raises:
        ConfigError: it cannot be read, or a line is not a JSON object.
    """
    for number, line in enumerate(_whole_lines(Path(path)), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ConfigError(f"{path}, line {number}: not a record; remove the line or start without --resume")
        yield record


def keep_records(path: str | os.PathLike[str], wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Take the other records out of a file. It holds either what it held or what remains, at every moment.

    Raises:
        ConfigError: as `read_records`.
        RecordError: the file cannot be written.
    """
    records = list(read_records(path))
    kept = [record for record in records if wanted(record)]
    if len(kept) == len(records):
        return
    target = Path(os.path.realpath(path))
    fresh = target.with_name(f"{target.name}.new")
    with RecordFile(fresh) as file:
        for record in kept:
            file.append(record)
    try:
        os.replace(fresh, target)
    except OSError as error:
        raise RecordError(f"cannot write {path}: {_why(error)}") from error
