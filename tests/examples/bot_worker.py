"""The support bot's own process, with a place where it kills itself, as `kill -9` would.

A fault is `FILE:WORDS:WHEN[:N]`: at the N-th commit to the file (`shop` or `threads`) of a transaction in which a
statement held the words (none: any), `before` or `after` that commit.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)

import openai  # noqa: E402 - these are for the forks of this process
import uvicorn  # noqa: E402, F401
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver  # noqa: E402, F401

import caddie_critics.endpoint  # noqa: E402, F401
import examples.support_bot.agent  # noqa: E402
import examples.support_bot.desk  # noqa: E402
import examples.support_bot.web  # noqa: E402, F401
from examples.support_bot import app  # noqa: E402

openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none")  # imports a great deal the first time


def work(arguments: Sequence[str], token: str, fault: str, out: str, log: str) -> None:
    """Run the bot in this process."""
    for path, number in ((out, 1), (log, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ["SUPPORT_STAFF_TOKEN"] = token
    if fault:
        _install(fault)
    app.main(arguments)


def _install(fault: str) -> None:
    file, words, when, *number = fault.split(":")
    left = int(number[0]) if number else 1
    connect = sqlite3.connect

    class Watched(sqlite3.Connection):
        """Sees what is written, and when it becomes final."""

        ours = False
        seen = ""

        def execute(self, sql: str, *rest: Any) -> Any:
            if sql == "COMMIT":
                return self._at_commit(lambda: super(Watched, self).execute(sql))
            self.seen += sql
            return super().execute(sql, *rest)

        def executemany(self, sql: str, *rest: Any) -> Any:
            self.seen += sql
            return super().executemany(sql, *rest)

        def commit(self) -> None:
            self._at_commit(super().commit)

        def _at_commit(self, commit: Any) -> Any:
            nonlocal left
            hit = self.ours and words in self.seen
            self.seen = ""
            left -= hit
            if hit and left == 0 and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = commit()
            if hit and left == 0 and when == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

    def watched(database: Any, *rest: Any, **named: Any) -> Any:
        made = connect(database, *rest, factory=Watched, **named)
        made.ours = str(database).endswith(".threads") == (file == "threads")
        return made

    sqlite3.connect = watched  # type: ignore[assignment]
