"""Record files: what is on disk after every append, after a kill in the middle of a line, and on a full disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from caddie_evals.records import RecordError, RecordFile, keep_records, read_records
from caddie_sdk.errors import ConfigError

FULL = Path("/dev/full")
needs_dev_full = pytest.mark.skipif(not FULL.is_char_device(), reason="this system has no /dev/full")


def write(path: Path, *records: dict[str, Any], resume: bool = False) -> Path:
    with RecordFile(path, resume=resume) as file:
        for record in records:
            file.append(record)
    return path


def test_records_come_back_in_order_and_as_they_were(tmp_path: Path) -> None:
    records = [{"id": "a", "text": "two\nlines, “quotes”, 漢字, \u2028"}, {"id": "b", "nested": {"x": [1, 2.5, None]}}]
    path = write(tmp_path / "new" / "folder" / "out.jsonl", *records)
    assert list(read_records(path)) == records
    assert path.read_bytes().count(b"\n") == 2


def test_half_a_surrogate_pair_does_not_lose_the_record(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", {"id": "a", "text": "x\ud800y"})
    assert list(read_records(path)) == [{"id": "a", "text": "x?y"}]


def test_each_record_is_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    path = tmp_path / "out.jsonl"
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))
    with RecordFile(path) as file:
        file.append({"id": 1})
        file.append({"id": 2})
        assert synced == [b'{"id": 1}\n', b'{"id": 1}\n{"id": 2}\n']


def test_without_resume_a_file_starts_empty_and_with_it_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", {"id": 1})
    write(path, {"id": 2}, resume=True)
    assert list(read_records(path)) == [{"id": 1}, {"id": 2}]
    write(path, {"id": 3})
    assert list(read_records(path)) == [{"id": 3}]


def test_resume_makes_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert list(read_records(write(tmp_path / "a" / "out.jsonl", {"id": 1}, resume=True))) == [{"id": 1}]


@pytest.mark.parametrize("torn", [b'{"id": 3, "te', b'{"id": 3}', b"\xe6\xbc", b"{"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    """It ends without its newline, whatever it looks like: the record was not finished."""
    path = write(tmp_path / "out.jsonl", {"id": 1}, {"id": 2})
    with path.open("ab") as file:
        file.write(torn)
    assert [record["id"] for record in read_records(path)] == [1, 2]
    write(path, {"id": 4}, resume=True)
    assert path.read_bytes() == b'{"id": 1}\n{"id": 2}\n{"id": 4}\n'


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"id": ')
    assert list(read_records(write(path, resume=True))) == []
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "line", [b"nonsense", b"[1]", b"3", b"", b"\xff\xfe", b"[" * 100_000], ids=lambda line: repr(line[:10])
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"id": 1}\n' + line + b'\n{"id": 2}\n')
    with pytest.raises(ConfigError, match=r"out\.jsonl, line 2: not a record; remove the line"):
        list(read_records(path))


def test_no_file_holds_no_records_and_a_folder_cannot_be_read(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "none.jsonl")) == []
    with pytest.raises(ConfigError, match=r"cannot read .*: not a regular file"):
        list(read_records(tmp_path))


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (lambda folder: folder, "Is a directory"),
        (lambda folder: folder / "file" / "out.jsonl", "File exists"),
        (lambda folder: folder / ("x" * 300), "File name too long"),
        (lambda folder: folder / "nul\0byte", "null byte"),
    ],
)
def test_what_cannot_be_opened_says_why(tmp_path: Path, place: Callable[[Path], Path], why: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match=f"cannot write .*{why}"):
        RecordFile(place(tmp_path))


@needs_dev_full
def test_a_full_disk_is_one_clear_error_and_closing_is_quiet() -> None:
    with RecordFile(FULL) as file, pytest.raises(RecordError, match="cannot write /dev/full: No space left on device"):
        file.append({"id": 1})


@needs_dev_full
def test_a_device_cannot_be_resumed() -> None:
    """Reading it would never end."""
    with pytest.raises(ConfigError, match="cannot read /dev/full: not a regular file"):
        RecordFile(FULL, resume=True)


class Stingy:
    """A disk with room for so many bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return int(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_half_a_record_does_not_stay_when_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path) as file:
        file.append({"id": 1})
        real, file._file = file._file, Stingy(file._file, room=4)  # type: ignore[assignment]
        with pytest.raises(RecordError, match="No space left"):
            file.append({"id": 2})
        assert path.read_bytes() == b'{"id": 1}\n'
        file._file = real
        file.append({"id": 3})  # somebody made room
    assert path.read_bytes() == b'{"id": 1}\n{"id": 3}\n'


def test_a_write_in_pieces_is_whole(tmp_path: Path) -> None:
    class Piecemeal(Stingy):
        def write(self, data: bytes) -> int:
            return int(self.file.write(data[:3]))

    path = tmp_path / "out.jsonl"
    with RecordFile(path) as file:
        file._file = Piecemeal(file._file, 0)  # type: ignore[assignment]
        file.append({"id": "a longer one"})
    assert list(read_records(path)) == [{"id": "a longer one"}]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "Out of range float"),
        (float("inf"), "Out of range float"),
        ({1, 2}, "set is not JSON serializable"),
        (Path("x"), "PosixPath is not JSON serializable"),
    ],
)
def test_what_is_no_json_is_refused_and_leaves_nothing(tmp_path: Path, value: Any, why: str) -> None:
    path = tmp_path / "out.jsonl"
    with RecordFile(path) as file:
        file.append({"id": 1})
        with pytest.raises(RecordError, match=f"a record must be plain JSON: .*{why}"):
            file.append({"id": 2, "value": value})
        file.append({"id": 3})
    assert path.read_bytes() == b'{"id": 1}\n{"id": 3}\n'


def test_a_pipe_is_written_though_it_cannot_be_synced() -> None:
    reading, writing = os.pipe()
    with RecordFile(f"/dev/fd/{writing}") as file:
        file.append({"id": 1})
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b'{"id": 1}\n'


def test_keep_records_takes_the_others_out(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", {"id": 1, "error": None}, {"id": 2, "error": "dead"}, {"id": 3})
    keep_records(path, lambda record: not record.get("error"))
    assert [record["id"] for record in read_records(path)] == [1, 3]
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_keep_records_leaves_alone_what_holds_nothing_else(tmp_path: Path) -> None:
    keep_records(tmp_path / "none.jsonl", lambda _: False)
    path = write(tmp_path / "out.jsonl", {"id": 1})
    before = path.stat().st_ino
    keep_records(path, lambda _: True)
    assert (path.stat().st_ino, os.listdir(tmp_path)) == (before, ["out.jsonl"])


def test_keep_records_follows_a_link(tmp_path: Path) -> None:
    target = write(tmp_path / "target.jsonl", {"id": 1}, {"id": 2})
    (tmp_path / "link.jsonl").symlink_to(target)
    keep_records(tmp_path / "link.jsonl", lambda record: record["id"] == 2)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert list(read_records(target)) == [{"id": 2}]


WRITER = """\
    import sys
    from caddie_evals.records import RecordFile
    with RecordFile(sys.argv[1], resume=True) as file:
        for number in range(100_000):
            file.append({"id": number, "text": "x" * 5000})
            print(number, flush=True)
"""


def test_what_was_appended_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    script = "\n".join(line.removeprefix("    ") for line in WRITER.splitlines())
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = [int(process.stdout.readline()) for _ in range(5)]
    process.send_signal(signal.SIGKILL)
    told += [int(line) for line in process.communicate()[0].splitlines() if line]
    kept = [record["id"] for record in read_records(path)]
    assert kept[: len(told)] == told
    assert len(kept) - len(told) in (0, 1)  # it may have been killed before it could tell of the last one
    write(path, {"id": "after"}, resume=True)
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [*kept, "after"]
