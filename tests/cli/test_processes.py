"""`caddie` as a process: killed, interrupted, its output cut off, in a folder with packages of the user's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import CADDIE, DEMO, OWN, read
from openai_server import Said, Server, agent

from caddie_critics.engines import TransformersEngine
from caddie_sdk.errors import ServeError

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `caddie` with these words; kills it at the end, should it still run."""
    processes: list[subprocess.Popen[str]] = []

    def launch(*words: object, **settings: Any) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
        processes.append(subprocess.Popen([CADDIE, *map(str, words)], text=True, **pipes))
        return processes[-1]

    yield launch
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def slow(server: Server) -> Server:
    """The agent's server, answering after a moment; the third question it takes for ever over."""
    play = agent()

    def behave(body: dict[str, Any]) -> Any:
        time.sleep(0.05)
        return Said(delay=30) if "The Lantern Keeper?" in str(body["messages"]) else play(body)

    server.behaviour = behave
    return server


def wait_for_records(path: Path, number: int) -> None:
    end = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") >= number):
        assert time.monotonic() < end, f"not {number} records in time"
        time.sleep(0.02)


def test_kill_9_in_the_middle_loses_and_doubles_nothing(
    start: Start, slow: Server, model: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = ("ask", "--musique", DEMO, *model, "--json", out)
    process = start(*words)
    wait_for_records(out, 2)
    process.kill()
    process.communicate()
    before = out.read_bytes()
    assert [made["id"] for made in read(out)] == ["demo2hop__1", "demo2hop__2"]
    out.write_bytes(before + before.splitlines()[1][:200])  # a record half written
    slow.behaviour = agent()
    slow.chats.clear()
    resumed = start(*words, "--resume")
    _, err = resumed.communicate(timeout=60)
    assert (resumed.returncode, err) == (0, "")
    assert out.read_bytes().startswith(before)
    assert [made["id"] for made in read(out)] == [f"demo2hop__{number}" for number in range(1, 6)]
    asked = {body["messages"][1]["content"] for body in slow.chats if body.get("tools")}
    assert len(asked) == 3


def test_an_interrupt_is_130_and_keeps_the_records(
    start: Start, slow: Server, model: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    process = start("ask", "--musique", DEMO, *model, "--json", out)
    wait_for_records(out, 2)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    printed, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, "")
    assert "[3/5]" in printed
    assert [made["id"] for made in read(out)] == ["demo2hop__1", "demo2hop__2"]


def test_an_interrupt_while_it_loads_is_130_too(start: Start, model: tuple[str, ...]) -> None:
    process = start("ask", *OWN, *model, env={**os.environ, "PYTHONVERBOSE": "1"}, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:  # python -v tells each import
        if "import 'caddie_sdk.cli.app'" in line or "import 'typer" in line:
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_a_reader_that_goes_away_ends_it_quietly(start: Start, model: tuple[str, ...], tmp_path: Path) -> None:
    process = start("ask", "--musique", DEMO, *model, "--json", tmp_path / "out.jsonl")
    assert process.stdout is not None
    assert process.stderr is not None
    while "[1/5]" not in process.stdout.readline():
        pass
    process.stdout.close()
    process.wait(timeout=30)
    assert "Traceback" not in process.stderr.read()
    assert process.returncode != 0
    assert all(made["answer"] for made in read(tmp_path / "out.jsonl"))


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A folder with packages of the user's own, each of which raises when it is imported."""
    for name in ("tools", "critics", "training", "evals", "caddie", "shells", "packs", "engines", "cli"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise RuntimeError('the user\\'s own {name} was imported')\n")
    return tmp_path


def test_packages_of_the_users_own_disturb_nothing(start: Start, model: tuple[str, ...], crowded: Path) -> None:
    for words in (("ask", *OWN, *model), ("packs",)):
        process = start(*words, cwd=crowded)
        printed, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        assert printed
    code = "import caddie_sdk, caddie_critics, caddie_tools, caddie_evals; caddie_sdk.create_caddie_agent"
    subprocess.run([sys.executable, "-c", code], cwd=crowded, check=True, timeout=60)
    collides = subprocess.run([sys.executable, "-c", "import tools"], cwd=crowded, capture_output=True, check=False)
    assert b"the user's own tools was imported" in collides.stderr  # so this folder does come first


@pytest.mark.slow
def test_packages_of_the_users_own_do_not_disturb_serving(start: Start, crowded: Path) -> None:
    process = start("serve", "embedded", "--context", "512", "--slots", "1", cwd=crowded)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Serving SmolLM2")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0


# -------------------------------------------------------------------- caddie serve, caddie packs


def test_serve_asks_an_engine_for_nothing_it_does_not_know(
    caddie: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its defaults must suit every engine: `--slots`, say, is nothing to transformers."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")

    def come_up(_: Any) -> None:
        raise ServeError("it was started")

    monkeypatch.setattr(TransformersEngine, "start", come_up)
    assert caddie("serve", tmp_path, "--engine", "transformers").error == "it was started"
    told = caddie("serve", tmp_path, "--engine", "transformers", "--slots", 2).error
    assert "slots is a setting of llama.cpp and vllm" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("/no/such",), "there is no file or folder '/no/such'"),
        (("embedded", "--engine", "x"), "there is no engine 'x'"),
        (("embedded", "--pack", "x"), "there is no critic pack 'x'"),
        (("embedded", "--host", "300.1.1.1"), "'300.1.1.1' is not a host name"),
    ],
)
def test_what_cannot_be_served_is_one_line(caddie: Any, words: tuple[str, ...], said: str) -> None:
    assert said in caddie("serve", *words).error


def test_packs_lists_each_pack_with_its_hash(caddie: Any) -> None:
    from caddie_critics import list_packs, load_pack

    lines = caddie("packs").out.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, load_pack(name).hash] for name in list_packs()]
    assert {"search", "household", "support", "general", "feedback"} <= {line.split()[0] for line in lines}
    assert all(len(line.split()) > 2 for line in lines)


def test_a_command_is_needed(caddie: Any) -> None:
    done = caddie()
    assert done.code == 2
    assert "Usage: caddie" in done.out + done.err
    assert textwrap.dedent(done.out + done.err).count("\n") > 5
