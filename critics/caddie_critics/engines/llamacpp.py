"""GGUF files, through llama.cpp (package `xllamacpp`)."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from caddie_critics.engines.base import PATIENT, SupervisedEngine, default_threads, require
from caddie_sdk.errors import ServeError

_SERVER = Path(__file__).with_name("_llamacpp_server.py")
_ERROR = re.compile(r"^[\d.]+ E (?P<text>.+)$")


class LlamaCppEngine(SupervisedEngine):
    """Serves a GGUF file on the CPU, or on a GPU where the build of xllamacpp knows one.

    It takes chat, streams, GBNF grammars, JSON schemas, log-probabilities and seeds, reports cached prompt
    tokens, and answers 400 when a prompt does not fit. A request that says nothing of sampling gets temperature 1
    with nothing cut off. `tools` only have an effect with a chat template that shows them.

    Args:
        gguf_path: the file; of a split one, its first part.
        model_id: the name it is served under.
        host, port: where it listens; port 0 takes any free one.
        context: tokens of one request, prompt and answer together; the model's own limit if that is smaller.
        slots: requests worked on at once; each has a context of its own, and its memory.
        threads: compute threads; None takes `CADDIE_THREADS`, or else two, or the one core there is.
        chat_template: Jinja text in place of the file's own.
        start_timeout: seconds to be ready in.
    """

    name: ClassVar[str] = "llama.cpp"
    grammar: ClassVar[str | None] = "llama.cpp"

    def __init__(
        self,
        gguf_path: str | os.PathLike[str],
        *,
        model_id: str,
        host: str = "127.0.0.1",
        port: int = 0,
        context: int = 8192,
        slots: int = 2,
        threads: int | None = None,
        chat_template: str | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        super().__init__(model_id=model_id, host=host, port=port, start_timeout=start_timeout)
        if context < 1 or slots < 1:
            raise ServeError(f"context and slots must be at least 1, not {context} and {slots}")
        self._settings = {
            "path": str(Path(gguf_path).expanduser().absolute()),
            "context": context,
            "slots": slots,
            "threads": default_threads(threads),
            "chat_template": chat_template,
        }

    def check(self) -> None:
        require("The llama.cpp engine", "local", "xllamacpp")

    def command(self, port: int) -> list[str]:
        settings = {**self._settings, "model_id": self.model_id, "host": self.host, "port": port}
        return [sys.executable, "-P", str(_SERVER), json.dumps(settings)]

    def environment(self) -> dict[str, str]:
        return {"OMP_WAIT_POLICY": PATIENT}

    def diagnose(self, log: Sequence[str]) -> str:
        # llama.cpp tells the cause first and then each caller's view of it.
        found = next((match for match in map(_ERROR.match, log) if match), None)
        return found["text"] if found else super().diagnose(log)
