"""`caddie` with the embedded model, over real HTTP: the demo, real questions, a critic in another process."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_kit import CADDIE, DEMO, OWN, Done, read, shared_data
from openai_server import Server, agent

from caddie_evals.questions import load_musique
from caddie_sdk.critique import SECTIONS

pytestmark = pytest.mark.slow
MUSIQUE = shared_data() / "musique" / "musique_ans_dev_150.jsonl"
Run = Callable[..., Done]


def run(*words: object, **settings: Any) -> Done:
    """`caddie` in a process of its own."""
    done = subprocess.run(
        [CADDIE, *map(str, words)], capture_output=True, text=True, check=False, timeout=280, **settings
    )
    return Done(done.returncode, done.stdout, done.stderr)


def searches(made: dict[str, Any]) -> list[str]:
    """What the searches of a record in the `caddie` format found, those of the worked example left out."""
    said = [turn["content"] for turn in made["transcript"]]
    start = next(number for number, text in enumerate(said) if made["question"] in text)
    return [text for text in said[start:] if text.startswith("Observation:\n[1] ")]


def check_usage(made: dict[str, Any]) -> None:
    for usage in (made["usage"]["agent"], *(item["usage"] for item in made["consultations"])):
        assert usage["calls"] >= 1
        assert usage["prompt_tokens"] > usage["cached_tokens"] >= 0
        assert usage["completion_tokens"] > 0
    total = sum(item["usage"]["prompt_tokens"] for item in made["consultations"])
    assert made["usage"]["critic"]["prompt_tokens"] == total


def test_the_demo(tmp_path: Path) -> None:
    done = run("demo", "--json", tmp_path / "demo.jsonl", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "It does not show that advice helps" in " ".join(done.out.split())
    for line in ("[5/5] ", "  act      search ", "  observe  [1] ", "  advice   ", "  answer   ", "  cost     agent "):
        assert f"\n{line}" in done.out
    assert "5 questions" in done.out
    made = read(tmp_path / "demo.jsonl")
    assert [item["id"] for item in made] == [question.id for question in load_musique(DEMO).questions]
    for item in made:
        assert item["answer"]
        assert item["error"] is None
        assert searches(item)
        check_usage(item)
    advised = [
        consultation for item in made for consultation in item["consultations"] if consultation["status"] == "ok"
    ]
    assert advised
    for consultation in advised:
        assert consultation["control"] == "request_feedback"
        assert SECTIONS.parse(consultation["raw"]) == (consultation["analysis"], consultation["advice"])
    assert sum(item["usage"]["agent"]["cached_tokens"] for item in made) > 0


@pytest.mark.skipif(not MUSIQUE.exists(), reason=f"{MUSIQUE} is not there; CADDIE_SHARED_DATA names the folder")
def test_real_questions_each_over_its_own_passages(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ("--limit", 3, "--critic", "self", "--protocol", "fixed:1", "--max-steps", 2, "--json", out)
    done = run("ask", "--musique", MUSIQUE, *words)
    assert (done.code, done.err) == (0, "")
    questions = load_musique(MUSIQUE).questions[:3]
    made = read(out)
    assert [item["id"] for item in made] == [question.id for question in questions]
    for item, question in zip(made, questions, strict=True):
        assert len(question.passages) == 20
        titles = {" ".join(passage.title.split()) for passage in question.passages}
        found = searches(item)[0].splitlines()[1]
        assert found.removeprefix("[1] ").startswith(tuple(f"{title}: " for title in titles))
        assert item["references"] == list(question.answers)
        assert (item["em"] in (True, False), 0 <= item["f1"] <= 1) == (True, True)
        assert [consultation["status"] for consultation in item["consultations"]] == ["ok"]
        check_usage(item)


@pytest.fixture
def served() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`caddie serve` with the embedded model as a critic: its URL, and the process."""
    process = subprocess.Popen([CADDIE, "serve", "embedded", "--pack", "search"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.split(" at ")[1].split()[0], process
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_a_critic_served_by_another_process_rereads_its_prompt_from_the_cache(
    served: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    words = ("--critic", served[0], "--protocol", "fixed:2,3", "--max-steps", 4, "--json", out)
    done = run("ask", *OWN, *words)
    assert (done.code, done.err) == (0, "")
    (made,) = read(out)
    first, second = made["consultations"]
    assert (first["status"], second["status"]) == ("ok", "ok")
    assert first["control"] == "call_critic"
    assert first["model"].startswith("SmolLM2-135M-Instruct")
    assert "@search-" in first["model"]
    # All of the first prompt is read again from the cache; new are the first advice and one step.
    assert second["usage"]["prompt_tokens"] > second["usage"]["cached_tokens"]
    assert second["usage"]["cached_tokens"] >= 0.98 * first["usage"]["prompt_tokens"]
    check_usage(made)


def test_a_critic_killed_after_the_third_question_costs_no_record(
    served: tuple[str, subprocess.Popen[str]], server: Server, model: tuple[str, ...], tmp_path: Path
) -> None:
    url, process = served
    out = tmp_path / "out.jsonl"
    rows = [json.loads(line) for line in DEMO.read_text().splitlines()] * 2
    (tmp_path / "ten.jsonl").write_text(
        "\n".join(json.dumps({**row, "id": f"q{number}"}) for number, row in enumerate(rows))
    )
    play = agent()

    def behave(body: dict[str, Any]) -> Any:
        if process.poll() is None and out.exists() and out.read_bytes().count(b"\n") == 3:
            process.kill()
            process.wait()
            wait_until_closed(int(url.split(":")[2].split("/")[0]))
        return play(body)

    server.behaviour = behave
    done = run("ask", "--musique", tmp_path / "ten.jsonl", *model, "--critic", url, "--json", out)
    assert (done.code, done.err) == (0, "")
    made = read(out)
    assert [item["id"] for item in made] == [f"q{number}" for number in range(10)]
    assert [item["answer"] for item in made] == ["Piet Corran"] * 10
    statuses = [consultation["status"] for item in made for consultation in item["consultations"]]
    assert statuses == ["ok"] * 3 + ["unavailable"] * 7
    assert all(url in consultation["detail"] for item in made[3:] for consultation in item["consultations"])
    assert done.out.count("  advice   none: unavailable (cannot reach ") == 7


def wait_until_closed(port: int) -> None:
    """The engine ends with the killed process, but a moment later."""
    import socket

    end = time.monotonic() + 20
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.05)
    raise AssertionError("the engine outlived the process that served it")


def test_the_embedded_model_in_a_format_it_cannot_write(tmp_path: Path) -> None:
    done = run("ask", *OWN, "--format", "tool-calls", "--critic", "off", "--json", tmp_path / "out.jsonl")
    assert done.code == 0
    assert done.err.startswith("note: the embedded model knows no function calling")
    assert len(read(tmp_path / "out.jsonl")) == 1


@pytest.mark.parametrize("interrupt", [2, 9])
def test_no_server_outlives_the_command(tmp_path: Path, interrupt: int) -> None:
    out = tmp_path / "out.jsonl"
    process = subprocess.Popen([CADDIE, "demo", "--json", out], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    while b"act " not in process.stdout.readline():
        pass
    engines = descendants(process.pid)
    assert len(engines) >= 2  # the guard and the engine
    process.send_signal(interrupt)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130 if interrupt == 2 else -9, b"")
    end = time.monotonic() + 10
    while any(map(alive, engines)):
        assert time.monotonic() < end, "a server was left behind"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """The process ids of children and children's children."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found, last = [], [pid]
    while last:
        last = [child for child, parent in pairs if parent in last]
        found += last
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
