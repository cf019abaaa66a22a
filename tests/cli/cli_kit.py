"""What the tests of the command line share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CADDIE = Path(sys.executable).with_name("caddie")
REPOSITORY = Path(__file__).parents[2]
NORVIA = REPOSITORY / "examples" / "norvia.jsonl"
DEMO = REPOSITORY / "evals" / "caddie_evals" / "data" / "demo_questions.jsonl"
OWN = ("Who built the lighthouse of Greave?", "--passages", NORVIA)


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on standard error of a command that failed as it should."""
        assert self.code == 1
        assert self.err.startswith("caddie: ")
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("caddie: ").rstrip("\n")


Caddie = Callable[..., Done]


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, which must be JSON throughout."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def shared_data() -> Path:
    """Where the real data lies."""
    return Path(os.environ.get("CADDIE_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
