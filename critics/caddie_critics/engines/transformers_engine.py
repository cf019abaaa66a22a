"""Folders of safetensors without a GPU, through the application behind `transformers serve`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import ClassVar

from caddie_critics.engines.base import PATIENT, SupervisedEngine, default_threads, require

_SERVER = Path(__file__).with_name("_transformers_server.py")


class TransformersEngine(SupervisedEngine):
    """Serves a folder on the CPU, one request at a time. Slow; meant for small critics and for trying one out.

    It takes chat (streams too), `/v1/completions`, `stop`, `temperature`, `top_p` and `seed`. Left to itself
    transformers ignores `logprobs`, JSON schemas and `n` without a word; here they are answered with 400, and so
    are prompts that do not fit. Grammars are not taken and cached tokens not reported. `tools` only have an effect
    with a chat template that shows them.

    Args:
        folder: config, tokenizer and safetensors, as `save_pretrained` leaves them.
        model_id: the name it is served under.
        host, port: where it listens; port 0 takes any free one.
        context: tokens of one request, prompt and answer together; None, or more than it has, is the model's own.
        threads: compute threads, as in `LlamaCppEngine`.
        chat_template: Jinja text in place of the tokenizer's own.
        start_timeout: seconds to be ready in.
    """

    name: ClassVar[str] = "transformers"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model_id: str,
        host: str = "127.0.0.1",
        port: int = 0,
        context: int | None = None,
        threads: int | None = None,
        chat_template: str | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        super().__init__(model_id=model_id, host=host, port=port, start_timeout=start_timeout)
        self._threads = default_threads(threads)
        self._settings = {
            "path": str(Path(folder).expanduser().absolute()),
            "context": context,
            "threads": self._threads,
            "chat_template": chat_template,
        }

    def check(self) -> None:
        require("The transformers engine", "transformers", "torch", "transformers", "fastapi", "uvicorn")

    def command(self, port: int) -> list[str]:
        settings = {**self._settings, "model_id": self.model_id, "host": self.host, "port": port}
        return [sys.executable, "-P", str(_SERVER), json.dumps(settings)]

    def environment(self) -> dict[str, str]:
        return {
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TQDM_DISABLE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(self._threads),
            "OMP_WAIT_POLICY": PATIENT,
        }
