"""Folders of safetensors on CUDA, through `vllm serve`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from caddie_critics.engines.base import ERROR_LINE, SupervisedEngine
from caddie_sdk.errors import MissingExtra, ServeError

_OURS = ("--host", "--port", "--served-model-name", "--model", "--uds")


class VllmEngine(SupervisedEngine):
    """Serves a folder on CUDA GPUs with vLLM: everything its OpenAI-compatible server can do.

    Prefix caching is on (vLLM's default). A request that names no sampling gets temperature 1 with nothing cut
    off, as in training: the folder's `generation_config.json` is not consulted, unless `extra_args` say so
    (`["--generation-config", "auto"]`).

    Args:
        folder: config, tokenizer and safetensors, as `save_pretrained` leaves them.
        model_id: the name it is served under.
        host, port: where it listens; port 0 takes any free one.
        context: tokens of one request (`--max-model-len`); None leaves it to the model.
        slots: requests worked on at once (`--max-num-seqs`); None leaves it to vLLM.
        tensor_parallel: GPUs that share the model.
        gpu_memory_utilization: share of each GPU's memory, in (0, 1]; None leaves it to vLLM.
        chat_template: Jinja text in place of the tokenizer's own.
        extra_args: further arguments of `vllm serve`, as they are.
        start_timeout: seconds to be ready in; large models take minutes.
    """

    name: ClassVar[str] = "vllm"
    grammar: ClassVar[str | None] = "vllm"
    reports_port: ClassVar[bool] = False
    # It has workers to end and GPU memory to give back.
    grace: ClassVar[float] = 20.0

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model_id: str,
        host: str = "127.0.0.1",
        port: int = 0,
        context: int | None = None,
        slots: int | None = None,
        tensor_parallel: int = 1,
        gpu_memory_utilization: float | None = None,
        chat_template: str | None = None,
        extra_args: Sequence[str] = (),
        start_timeout: float = 900.0,
    ) -> None:
        super().__init__(model_id=model_id, host=host, port=port, start_timeout=start_timeout)
        self._folder = Path(folder).expanduser().absolute()
        self._context, self._slots, self._tensor_parallel = context, slots, tensor_parallel
        self._memory, self._chat_template, self._extra = gpu_memory_utilization, chat_template, tuple(extra_args)
        self.command(port)  # a wrong setting shows here, not when the model has been waited for

    def check(self) -> None:
        if vllm_executable() is None:
            raise MissingExtra("The vLLM engine", "vllm")

    def command(self, port: int) -> list[str]:
        return vllm_command(
            self._folder,
            executable=vllm_executable() or "vllm",
            model_id=self.model_id,
            host=self.host,
            port=port,
            context=self._context,
            slots=self._slots,
            tensor_parallel=self._tensor_parallel,
            gpu_memory_utilization=self._memory,
            chat_template=self._chat_template,
            extra_args=self._extra,
        )

    def environment(self) -> dict[str, str]:
        # Everything lies in the folder; and vLLM reports its use to its makers unless told not to.
        return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

    def diagnose(self, log: Sequence[str]) -> str:
        # The engine's process logs the cause at level ERROR; the front end then dies of "see root cause above".
        causes = [
            match for line in log if " ERROR " in line and (match := ERROR_LINE.search(line.split(" ERROR ", 1)[1]))
        ]
        return causes[0]["text"] if causes else super().diagnose(log)


def vllm_executable() -> str | None:
    """The `vllm` command on PATH or beside the running Python, or None."""
    beside = Path(sys.executable).with_name("vllm")
    return shutil.which("vllm") or (str(beside) if os.access(beside, os.X_OK) else None)


def vllm_command(
    folder: str | os.PathLike[str],
    *,
    model_id: str,
    host: str,
    port: int,
    executable: str = "vllm",
    context: int | None = None,
    slots: int | None = None,
    tensor_parallel: int = 1,
    gpu_memory_utilization: float | None = None,
    chat_template: str | None = None,
    extra_args: Sequence[str] = (),
) -> list[str]:
    """The arguments of `vllm serve`; see `VllmEngine` for what they mean.

    Raises:
        ServeError: a number is out of range, or `extra_args` name what Caddie sets itself.
    """
    if tensor_parallel < 1:
        raise ServeError(f"tensor_parallel must be at least 1, not {tensor_parallel}")
    if gpu_memory_utilization is not None and not 0 < gpu_memory_utilization <= 1:
        raise ServeError(f"gpu_memory_utilization is a share in (0, 1], not {gpu_memory_utilization:g}")
    for argument in extra_args:
        if argument.partition("=")[0].replace("_", "-") in _OURS:
            raise ServeError(f"{argument.partition('=')[0]} is set by Caddie; use its own setting instead")
    command = [executable, "serve", os.fspath(folder), "--served-model-name", model_id]
    command += ["--host", host, "--port", str(port)]
    command += ["--generation-config", "vllm", "--load-format", "safetensors"]
    options = {
        "--max-model-len": context,
        "--max-num-seqs": slots,
        "--tensor-parallel-size": tensor_parallel if tensor_parallel > 1 else None,
        "--gpu-memory-utilization": gpu_memory_utilization,
        "--chat-template": chat_template,
    }
    for option, value in options.items():
        if value is not None:
            command += [option, str(value)]
    return [*command, *extra_args]
