"""`caddie traces`, as a user meets it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_kit import CADDIE, REPOSITORY, Caddie, Done
from trace_kit import finished, look

from caddie_sdk import CallModel, Session, TraceSink
from caddie_sdk.cli import main
from caddie_sdk.critic import ConsultState
from caddie_sdk.render import CriticPrompt, render
from caddie_sdk.tracing import read_traces
from caddie_sdk.trajectory import Event


@pytest.fixture
def caddie(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caddie:
    def run(*words: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["caddie", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two trajectories, one of them without a consultation."""
    path = tmp_path / "traces.jsonl"
    sink = TraceSink(path)
    sink.write(finished(seed=5), way="loop", model="qwen3-4b", pack="search", metadata={"reward": 1})
    sink.write(finished([look("x"), "Rome"]), way="proxy")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# ------------------------------------------------------------------ export


def test_export_writes_a_line_for_every_prefix(caddie: Caddie, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "prefixes.jsonl"
    done = caddie("traces", "export", source, "--out", out)
    assert (done.code, done.out) == (0, "")
    assert done.err == f"6 prefixes of 2 trajectories in {out}\n"
    made = lines(out)
    ids = [trace.id for _, trace in read_traces(source)]
    assert [(line["id"], line["k"], line["consulted"]) for line in made] == [
        (ids[0], 0, False), (ids[0], 1, True), (ids[0], 2, True), (ids[0], 3, False),
        (ids[1], 0, False), (ids[1], 1, False),
    ]  # fmt: skip
    assert {name: made[3][name] for name in ("version", "seed", "model", "critic", "pack", "metadata", "outcome")} == {
        "version": 1, "seed": 5, "model": "qwen3-4b", "critic": "critic-1", "pack": "search", "metadata": {"reward": 1},
        "outcome": {"answer": "Paris", "reason": "answer", "steps": 3, "consultations": 2},
    }  # fmt: skip
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert [path.name for path in out.parent.iterdir()] == ["prefixes.jsonl"]


def test_every_line_loads_renders_and_goes_on(caddie: Caddie, source: Path, tmp_path: Path) -> None:
    caddie("traces", "export", source, "--out", tmp_path / "p.jsonl")
    for line in lines(tmp_path / "p.jsonl"):
        session = Session.load(line["session"])
        assert isinstance(session.command, CallModel)
        assert session.step == line["k"]
        assert session.model_replied({"role": "assistant", "content": "Oslo"}).answer == "Oslo"  # type: ignore[union-attr]
        events = tuple(Event.load(event) for event in line["events"])
        state = ConsultState("call_critic", "self-call", line["k"], events)
        prompt = render(state, CriticPrompt("p", "You advise.", "Advise."))
        text = json.dumps([message["content"] for message in prompt])
        assert text.count("found") == line["k"]
        assert "Paris" not in text


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (["--steps", "1-2"], [1, 2, 1]),
        (["--steps", "3"], [3]),
        (["--steps", "0-0"], [0, 0]),
        (["--only-consulted"], [1, 2]),
        (["--only-consulted", "--steps", "2-9"], [2]),
    ],
)
def test_which_prefixes(options: list[str], chosen: list[int], caddie: Caddie, source: Path, tmp_path: Path) -> None:
    assert caddie("traces", "export", source, "--out", tmp_path / "p.jsonl", *options).code == 0
    assert [line["k"] for line in lines(tmp_path / "p.jsonl")] == chosen


def test_export_to_a_pipe(source: Path) -> None:
    command = [CADDIE, "traces", "export", source, "--out", "/dev/stdout", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert [json.loads(line)["k"] for line in done.stdout.splitlines()] == [1, 1]
    assert Path("/dev/stdout").is_symlink()


def test_export_through_a_link_keeps_the_link(caddie: Caddie, source: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "target.jsonl", tmp_path / "link.jsonl"
    target.write_text("old\n" * 100_000)
    link.symlink_to(target)
    assert caddie("traces", "export", source, "--out", link).code == 0
    assert link.is_symlink()
    assert len(lines(target)) == 6


def test_a_file_of_this_format_stays_readable(caddie: Caddie, tmp_path: Path) -> None:
    done = caddie("traces", "export", REPOSITORY / "examples" / "traces.jsonl", "--out", tmp_path / "p.jsonl")
    assert done.err.startswith("5 prefixes of 2 trajectories")
    assert [line["outcome"]["answer"] for line in lines(tmp_path / "p.jsonl")] == ["Vell"] * 3 + ["Tomas Arl"] * 2


# ------------------------------------------------------------------ show


def test_show_tells_what_happened(caddie: Caddie, source: Path) -> None:
    done = caddie("traces", "show", source)
    assert (done.code, done.err) == (0, "")
    first, second = done.out.strip("\n").split("\n\n")
    ids = [trace.id[:12] for _, trace in read_traces(source)]
    assert first.splitlines()[0].startswith(f"{ids[0]} loop, qwen3-4b, critic critic-1, 20")
    assert [line.split(None, 1) for line in first.splitlines()[1:]] == [
        ["task", "Where?"], ["act", 'search {"query": "a"}'], ["observe", "found a"], ["advice", "analysis 1 advice 1"],
        ["act", 'search {"query": "b"}'], ["observe", "found b"], ["act", 'search {"query": "c"}'],
        ["advice", "analysis 2 advice 2"], ["observe", "found c"], ["answer", "Paris"],
        ["end", "ended by answer, 3 steps, 2 consultations; agent 50 + 25 tokens; critic 14 + 6 tokens"],
    ]  # fmt: skip
    assert "Rome" in second


def test_show_one_in_full(caddie: Caddie, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    made = TraceSink(path).write(finished(observation="y" * 500))
    TraceSink(path).write(finished())
    assert "y" * 500 not in caddie("traces", "show", path).out
    done = caddie("traces", "show", path, "--id", made[:8])
    assert "y" * 500 in done.out
    assert done.out.count("  task") == 1


def test_show_is_not_led_astray_by_what_a_tool_wrote(caddie: Caddie, tmp_path: Path) -> None:
    nasty = "\x1b[31mred\x1b[0m \x1b]0;title\x07 [bold]x[/bold] \u202eback\nline \ud800"
    TraceSink(tmp_path / "t.jsonl").write(finished(observation=nasty))
    out = caddie("traces", "show", tmp_path / "t.jsonl").out
    assert "[bold]x[/bold]" in out
    assert not {"\x1b", "\x07", "\u202e"} & set(out)


# ------------------------------------------------------------------ bad input

BOTH = pytest.mark.parametrize("words", [["show"], ["export", "--out", "out.jsonl"]], ids=["show", "export"])


def call(caddie: Caddie, words: list[str], path: Path, tmp_path: Path) -> Done:
    here = [str(tmp_path / word) if word.endswith(".jsonl") else word for word in words]
    return caddie("traces", here[0], path, *here[1:])


@BOTH
def test_no_such_file(words: list[str], caddie: Caddie, tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    assert call(caddie, words, path, tmp_path).error == f"cannot read {path}: No such file or directory"


@BOTH
def test_a_folder(words: list[str], caddie: Caddie, tmp_path: Path) -> None:
    assert call(caddie, words, tmp_path, tmp_path).error == f"cannot read {tmp_path}: Is a directory"


@BOTH
@pytest.mark.parametrize("content", [b"", b'{"torn": '])
def test_nothing_in_it(words: list[str], content: bytes, caddie: Caddie, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    done = call(caddie, words, path, tmp_path)
    assert done.code == 1
    assert done.err.splitlines()[-1] == f"caddie: {path}: no trajectory in it"
    assert ("line 1: torn at the end of the file, left out" in done.err) == bool(content)


@BOTH
def test_a_bad_line(words: list[str], caddie: Caddie, source: Path, tmp_path: Path) -> None:
    source.write_text(source.read_text("utf-8") + '{"version": 1, "id": "x", "session": 3}\n', "utf-8")
    error = call(caddie, words, source, tmp_path).error
    assert error == f"{source}, line 3, field 'session': not a session dump of version 1"
    assert not (tmp_path / "out.jsonl").exists()
    assert not (tmp_path / "out.jsonl.new").exists()


@BOTH
def test_a_torn_last_line_is_left_out_with_a_note(
    words: list[str], caddie: Caddie, source: Path, tmp_path: Path
) -> None:
    source.write_bytes(source.read_bytes()[:-40])
    done = call(caddie, words, source, tmp_path)
    assert done.code == 0
    assert done.err.startswith(f"{source}, line 2: torn at the end of the file, left out\n")


def test_an_edited_trajectory(caddie: Caddie, source: Path, tmp_path: Path) -> None:
    source.write_text(source.read_text("utf-8").replace("advice 1", "advice 9", 1), "utf-8")
    error = caddie("traces", "export", source, "--out", tmp_path / "p.jsonl").error
    assert error.startswith(f"{source}, line 1, field 'session': the recording departs from the session's rules")


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ("x", "--steps takes MIN-MAX or one number"),
        ("1-x", "--steps takes MIN-MAX"),
        ("", "--steps takes MIN-MAX"),
        ("-3", "--steps takes MIN-MAX"),
        ("5-2", "--steps 5-2: the first number is the larger one"),
        ("7-9", "no prefix was chosen; widen --steps"),
        ("99999999999999999999", "--steps takes"),
    ],
)
def test_bad_steps(steps: str, problem: str, caddie: Caddie, source: Path, tmp_path: Path) -> None:
    assert problem in caddie("traces", "export", source, "--out", tmp_path / "p.jsonl", f"--steps={steps}").error
    assert not (tmp_path / "p.jsonl").exists()


def test_what_is_read_is_not_written_over(caddie: Caddie, source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    assert "is the file to read" in caddie("traces", "export", source, "--out", source).error
    (tmp_path / "link").symlink_to(source)
    assert "is the file to read" in caddie("traces", "export", source, "--out", tmp_path / "link").error
    assert source.read_bytes() == before


def test_an_out_that_cannot_be_written(caddie: Caddie, source: Path, tmp_path: Path) -> None:
    assert caddie("traces", "export", source, "--out", source / "x.jsonl").error.startswith("cannot write ")
    assert caddie("traces", "export", source, "--out", tmp_path).error.startswith(f"cannot write {tmp_path}: ")


def test_no_such_id(caddie: Caddie, source: Path) -> None:
    assert caddie("traces", "show", source, "--id", "zzz").error.endswith(
        "no trajectory with an id that begins with 'zzz'"
    )


def test_a_missing_option_is_a_usage_error(caddie: Caddie, source: Path) -> None:
    done = caddie("traces", "export", source)
    assert done.code == 2
    assert "Missing option '--out'" in done.err
