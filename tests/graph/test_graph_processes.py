"""A thread outlives its process: `kill -9` at any moment, another process goes on, nothing finished is redone."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import kill_worker
import pytest
from kill_worker import QUESTION, THREAD, Diary, build, go_on
from langgraph.checkpoint.memory import InMemorySaver

WORKER = Path(kill_worker.__file__)
ROOT = WORKER.parents[2]


@cache
def unbroken() -> dict[str, Any]:
    output = build(Diary(Path(os.devnull)), InMemorySaver()).invoke(QUESTION, THREAD)
    assert output["answer"] == "Paris"
    assert sum(message["role"] == "tool" for message in output["messages"]) == 5
    return output  # type: ignore[no-any-return]


def start(db: Path, diary: Diary, saver: str, hang: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(db), str(diary.path), saver, hang], env={**os.environ, "PYTHONPATH": path}
    )


def wait_for(what: str, holds: Any, worker: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert worker.poll() is None, f"the worker ended before {what}"
        assert time.monotonic() < until, f"no {what} within 30 s"
        time.sleep(0.02)


def results_stored(db: Path) -> int:
    """Finished sibling tools whose results are in the store."""
    try:
        with sqlite3.connect(f"file:{db}?mode=ro", uri=True) as connection:
            return int(connection.execute("SELECT count(*) FROM writes WHERE channel = '__return__'").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def checkpoints_stored(db: Path) -> int:
    try:
        with sqlite3.connect(f"file:{db}?mode=ro", uri=True) as connection:
            return int(connection.execute("SELECT count(*) FROM checkpoints").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


# What hangs, and how many checkpoints must have been stored before: input, intake, then one per node that ran.
MOMENTS = {
    "model:0": 2,
    "tool:twin": 3,
    "tool:quick": 3,
    "model:1": 4,
    "critic:1": 5,
    "tool:alone": 6,
    "model:3": 8,
    "tool:last": 9,
    "model:4": 10,
}


@pytest.mark.parametrize("saver", ["sync", "async"])
@pytest.mark.parametrize("hang", MOMENTS)
def test_killed_and_taken_over(saver: str, hang: str, tmp_path: Path) -> None:
    db, diary = tmp_path / "threads.db", Diary(tmp_path / "diary")
    worker = start(db, diary, saver, hang)
    try:
        wait_for(f"start of {hang}", lambda: f"start {hang}" in diary.lines(), worker)
        wait_for("checkpoint", lambda: checkpoints_stored(db) >= MOMENTS[hang], worker)
        if hang in ("tool:twin", "tool:quick"):
            wait_for("result of the other tool", lambda: results_stored(db) == 1, worker)
    finally:
        worker.send_signal(signal.SIGKILL)
        assert worker.wait(10) == -signal.SIGKILL
    before = diary.lines()
    assert f"end {hang}" not in before

    output = go_on(db, diary, saver, None)

    assert output["messages"] == unbroken()["messages"]
    assert (output["answer"], output["reason"]) == ("Paris", "answer")
    assert output["usage"] == unbroken()["usage"]
    assert len(output["consultations"]) == 1
    # Each thing was finished exactly once, and only what hung was started a second time.
    finished = [line for line in diary.lines() if line.startswith("end ")]
    assert sorted(finished) == sorted(set(finished))
    assert len(finished) == 5 + 4 + 1
    started = [line for line in diary.lines() if line.startswith("start ")]
    assert {line for line in started if started.count(line) > 1} == {f"start {hang}"}
    # A thread that has ended stays as it is.
    assert go_on(db, diary, saver, None)["messages"] == output["messages"]
    assert len(diary.lines()) == len(finished) + len(started)


def test_the_user_speaks_again_after_a_kill(tmp_path: Path) -> None:
    """Whoever takes over need not finish the old turn: a new one closes it."""
    db, diary = tmp_path / "threads.db", Diary(tmp_path / "diary")
    worker = start(db, diary, "sync", "tool:alone")
    try:
        wait_for("start of the tool", lambda: "start tool:alone" in diary.lines(), worker)
        wait_for("checkpoint", lambda: checkpoints_stored(db) >= 6, worker)
    finally:
        worker.kill()
        worker.wait(10)
    output = go_on(db, diary, "sync", {"messages": "Are you still there?"})
    told = [message["content"] for message in output["messages"]]
    assert "Not run: the work was stopped (interrupted)." in told
    assert told.index("Are you still there?") > told.index("Not run: the work was stopped (interrupted).")
    assert output["answer"] == "Paris"
