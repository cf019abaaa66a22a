"""The file of traces: nothing finished is lost, whoever dies; no secrets; every line loads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from langgraph.checkpoint.memory import InMemorySaver
from session_driver import configs, scripts, states
from trace_kit import SCRIPT, critic, finished, look

from caddie_sdk import Session, __version__, create_caddie_agent
from caddie_sdk.errors import ConfigError, DataError
from caddie_sdk.records import RecordError
from caddie_sdk.testing import ScriptedModel
from caddie_sdk.tracing import Redactor, TraceSink, read_traces
from caddie_sdk.tracing.sink import redact_dump
from caddie_sdk.trajectory import read_trajectory

WORKER = Path(__file__).with_name("sink_worker.py")


def traces(path: Path) -> list[Any]:
    return [trace for _, trace in read_traces(path)]


def worker(path: Path, name: str, count: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, WORKER, str(path), name, count], stdout=subprocess.PIPE, text=True)


# ------------------------------------------------------------------ what is in a trace


def test_a_trace_is_the_session_and_where_it_comes_from(tmp_path: Path) -> None:
    path, session = tmp_path / "new" / "traces.jsonl", finished()
    sink = TraceSink(path, redactor=None, metadata={"shop": "a"})
    made = sink.write(
        session, way="loop", model="qwen3-4b", pack="search", started=1.5, ended=2.25, conversation="c7",
        metadata={"reward": 1},
    )  # fmt: skip
    (trace,) = traces(path)
    assert trace.load() == session
    facts = {name: value for name, value in asdict(trace).items() if name != "session"}
    assert facts == {
        "id": made, "way": "loop", "model": "qwen3-4b", "critic": "critic-1", "pack": "search",
        "started": "1970-01-01T00:00:01.500+00:00", "ended": "1970-01-01T00:00:02.250+00:00", "conversation": "c7",
        "caddie": __version__, "redacted": False, "metadata": {"shop": "a", "reward": 1}, "version": 1,
    }  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_the_asynchronous_twin_writes_what_the_session_was_when_called(tmp_path: Path) -> None:
    session = finished()
    before = json.loads(json.dumps(session.dump()))
    writing = TraceSink(tmp_path / "t.jsonl", redactor=None).awrite(session, way="loop")
    await writing
    (trace,) = traces(tmp_path / "t.jsonl")
    assert trace.session == before
    assert trace.way == "loop"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_graph_writes_each_finished_turn(asynchronous: bool, tmp_path: Path) -> None:
    def search(query: str) -> str:
        """Search."""
        return f"found {query}"

    path = tmp_path / "t.jsonl"
    agent = create_caddie_agent(
        ScriptedModel([*SCRIPT, "Rome"]), [search], critic=critic(), checkpointer=InMemorySaver(),
        traces=TraceSink(path),
    )  # fmt: skip
    config: Any = {"configurable": {"thread_id": "customer-7"}}

    def say(text: str) -> Any:
        said = {"messages": text}
        return asyncio.run(agent.ainvoke(said, config)) if asynchronous else agent.invoke(said, config)

    first = say("Where?")
    say("And then?")
    one, two = traces(path)
    assert (one.way, one.conversation, one.critic) == ("graph", "customer-7", "critic-1")
    assert one.load().transcript() == first["messages"]
    assert (one.load().answer, two.load().answer) == ("Paris", "Rome")
    assert two.load().trajectory == 1


def test_a_turn_that_the_graphs_own_limit_ends_is_written_too(tmp_path: Path) -> None:
    def search(query: str) -> str:
        """Search."""
        return "found"

    path = tmp_path / "t.jsonl"
    agent = create_caddie_agent(ScriptedModel([look("a")] * 9), [search], traces=TraceSink(path))
    ended = agent.invoke({"messages": "Where?"}, {"recursion_limit": 3})
    assert [trace.load().reason for trace in traces(path)] == [ended["reason"]] == ["max_steps"]


def test_a_full_disk_does_not_cost_the_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = create_caddie_agent(ScriptedModel(["Paris"]), traces=TraceSink(tmp_path))
    assert agent.invoke({"messages": "Where?"})["answer"] == "Paris"
    assert "a trace is lost: cannot write" in caplog.text


# ------------------------------------------------------------------ secrets


@pytest.mark.parametrize("form", ["tool-calls", "caddie", "cafe"])
def test_no_secret_gets_into_the_file_and_the_trace_still_loads(form: str, tmp_path: Path) -> None:
    secret, card = "hunter2hunter2", "4111 1111 1111 1111"
    answer = "<think>r</think><answer>Paris</answer>"
    call = json.dumps({"name": "search", "arguments": {"query": "a", "password": secret}})
    replies = {
        "tool-calls": [look("a", password=secret), "Paris"],
        "caddie": [
            f"<reason>password={secret}</reason><search>a token={secret}</search>",
            answer.replace("think", "reason"),
        ],
        "cafe": [f"<think>r</think><tool_call>{call}</tool_call>", answer],
    }[form]  # fmt: skip
    session = finished(
        replies, observation=f"ann@x.org {card}", task=f"password: {secret}", format=form, one_argument=form == "caddie"
    )
    path = tmp_path / "t.jsonl"
    TraceSink(path, metadata={"api_key": secret}).write(session)
    text = path.read_text("utf-8")
    assert session.answer == "Paris"
    for hidden in (secret, card, "ann@x.org"):
        assert hidden in json.dumps(session.dump())
        assert hidden not in text
    loaded = traces(path)[0].load()
    assert loaded.config.tools == session.config.tools  # a schema may describe an argument named `password`
    told = [event for event in read_trajectory(loaded.history.path(), loaded.consultations) if event.observations]
    assert [event.observations[0][:23] for event in told] == ["[redacted] [redacted] a"]
    TraceSink(tmp_path / "raw.jsonl", redactor=None).write(session)
    assert secret in (tmp_path / "raw.jsonl").read_text("utf-8")


@given(configs(), scripts)
@settings(max_examples=60, deadline=None)
def test_redaction_leaves_a_session_without_secrets_as_it_is(config: Any, numbers: list[int]) -> None:
    *_, (session, _, _) = states(config, numbers)
    dump = session.dump()
    assert redact_dump(dump, Redactor()) == dump


@given(configs(), scripts)
@settings(max_examples=60, deadline=None)
def test_redacted_sessions_load_and_tell_the_same_events(config: Any, numbers: list[int]) -> None:
    *_, (session, _, _) = states(config, numbers)
    redactor = Redactor(patterns=(r"river|refund|word|42|from|forged|paid|[0-9]{2}",))
    loaded = Session.load(json.loads(json.dumps(redact_dump(session.dump(), redactor))))
    before = read_trajectory(session.history.path(), session.consultations)
    after = read_trajectory(loaded.history.path(), loaded.consultations)
    assert [event.kind for event in after] == [event.kind for event in before]
    for old, new in zip(before, after, strict=True):
        assert new.observations == tuple(redactor.text(text) for text in old.observations)


# ------------------------------------------------------------------ who writes at once, who dies


def test_threads_share_a_file(tmp_path: Path) -> None:
    path, session = tmp_path / "t.jsonl", finished(observation="x" * 20_000)
    sinks = [TraceSink(path), TraceSink(path)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: sinks[number % 2].write(session), range(80)))
    assert sorted(trace.id for trace in traces(path)) == sorted(made)
    assert len(set(made)) == 80


def test_processes_and_forks_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    workers = [worker(path, str(number), "10") for number in range(3)]
    assert [process.wait(60) for process in workers] == [0, 0, 0]
    for process in workers:
        process.communicate()
    found = sorted((trace.metadata["worker"], trace.metadata["number"]) for trace in traces(path))
    assert found == [(str(name), number) for name in range(3) for number in range(10)]


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.029, 0.041])
def test_kill_nine_loses_nothing_that_was_written(delay: float, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    process = worker(path, "a", "forever")
    assert process.stdout is not None
    last = -1
    for line in process.stdout:
        last = int(line)
        if last == 3:
            break
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait(30)
    process.stdout.close()
    last = int(rest[-1]) if rest and rest[-1].isdigit() else last
    notes: list[str] = []
    numbers = [trace.metadata["number"] for _, trace in read_traces(path, note=notes.append)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= last + 1
    TraceSink(path).write(finished())
    after = traces(path)
    assert len(after) == len(numbers) + 1
    assert path.read_bytes().count(b"\n") == len(after)


@pytest.mark.parametrize("cut", [1, 7, 500, 9000, 30_000])
def test_a_torn_line_is_dropped_with_a_note_and_removed_by_the_next_writer(cut: int, tmp_path: Path) -> None:
    path, sink = tmp_path / "t.jsonl", TraceSink(tmp_path / "t.jsonl")
    kept = sink.write(finished())
    sink.write(finished(observation="y" * 20_000))
    os.truncate(path, path.stat().st_size - cut)
    notes: list[str] = []
    assert [trace.id for _, trace in read_traces(path, note=notes.append)] == [kept]
    assert notes == [f"{path}, line 2: torn at the end of the file, left out"]
    last = sink.write(finished())
    assert [trace.id for trace in traces(path)] == [kept, last]


def test_a_file_that_holds_nothing_but_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"version": 1, "id"' + b"x" * 50_000)
    assert traces(path) == []
    made = TraceSink(path).write(finished())
    assert [trace.id for trace in traces(path)] == [made]


def test_a_writer_waits_for_the_one_before(tmp_path: Path) -> None:
    import fcntl

    path, done = tmp_path / "t.jsonl", threading.Event()
    path.touch()
    with open(path, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: (TraceSink(path).write(finished()), done.set()))
        thread.start()
        assert not done.wait(0.3)
        assert path.stat().st_size == 0
        fcntl.flock(held, fcntl.LOCK_UN)
        assert done.wait(30)
        thread.join()
    assert len(traces(path)) == 1


def test_each_trace_is_synced_before_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "t.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))
    TraceSink(path).write(finished())
    assert synced == [path.read_bytes()]


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl"
    TraceSink(path).write(finished())
    before = path.read_bytes()
    with pytest.raises(RecordError, match="plain JSON"):
        TraceSink(path).write(finished(), metadata={"x": float("nan")})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match=f"cannot write {path}: No space left on device"):
        TraceSink(path).write(finished())
    assert path.read_bytes() == before


# ------------------------------------------------------------------ bad files


def test_a_file_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl: No such file"):
        traces(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        (lambda line: "{", "(line)", "not JSON"),
        (lambda line: "[1]", "(line)", "not a JSON object"),
        (lambda line: json.dumps({**json.loads(line), "version": 9}), "version", "not a trace of version 1"),
        (lambda line: json.dumps({**json.loads(line), "model": 3}), "model", "not a text"),
        (lambda line: json.dumps({**json.loads(line), "metadata": 3}), "metadata", "not an object"),
        (lambda line: json.dumps({**json.loads(line), "id": ""}), "id", "missing"),
        (lambda line: json.dumps({**json.loads(line), "session": None}), "session", "not a session dump"),
        (lambda line: json.dumps({**json.loads(line), "session": {"version": 1}}), "session", "not a session dump"),
        (lambda line: line.replace('"self-call"', '"never-heard"'), "session", "never-heard"),
        (lambda line: line.replace('"role": "assistant"', '"role": 7'), "session", "role"),
    ],
)
def test_a_bad_line_is_named(change: Any, field: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    sink = TraceSink(path)
    for _ in range(2):
        sink.write(finished())
    first, second = path.read_text("utf-8").splitlines()
    path.write_text(f"{first}\n{change(second)}\n", "utf-8")
    with pytest.raises(DataError, match=problem) as caught:
        traces(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), 2, field)
