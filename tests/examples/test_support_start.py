"""The one command: what it prints, what it refuses in a line, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bot_kit import Bot

from examples.support_bot.app import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
NOWHERE = "http://127.0.0.1:9/v1"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that comes of a start that cannot be."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return str(line)


def test_a_refusal_as_a_reader_sees_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "examples.support_bot", "--base-url", "x"],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    told = "support_bot: base_url must look like http://127.0.0.1:8000/v1, not 'x'\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", told)


def test_started_as_a_reader_would(tmp_path: Path) -> None:
    began = time.monotonic()
    options = ["--base-url", NOWHERE, "--db", str(tmp_path / "a.db"), "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "examples/support_bot/app.py", *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if name != "SUPPORT_STAFF_TOKEN"},
    )  # fmt: skip
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(2)]
    print(f"listening after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 10
    assert [line[0] for line in lines] == ["customers", "staff"]
    assert lines[0][1].startswith("http://127.0.0.1:")
    assert len(lines[1][1].partition("#")[2]) >= 24
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "the following arguments are required: --base-url; --help lists the options"),
        (("--base-url", NOWHERE, "--critic", "me"), "--critic me: neither off nor a URL that starts with http://"),
        (
            ("--base-url", NOWHERE, "--port", "0", "--db", "/nowhere/a.db"),
            "--db /nowhere/a.db: No such file or directory; give",
        ),
        (
            ("--base-url", NOWHERE, "--port", "0", "--db", str(README)),
            f"--db: {README} cannot be used: file is not a database",
        ),
        (("--base-url", NOWHERE, "--api-key-env", "NO_KEY"), "--api-key-env NO_KEY: there is no such environment"),
    ],
)
def test_refusals(arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *arguments).startswith(f"support_bot: {line}")
    assert not README.with_name("README.md.lock").exists()


def test_refusals_of_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value, told in [
        ("--port", "70000", "70000 is not a port, 0 to 65535"),
        ("--approve-above", "1.001", "1.001 is not an amount such as 200.00"),
        ("--approve-above", "nan", "nan is not an amount such as 200.00"),
        ("--critic-timeout", "soon", "soon is not a time between 0 and 3600 seconds"),
    ]:
        with pytest.raises(SystemExit):
            main(["--base-url", NOWHERE, option, value])
        assert capsys.readouterr().err == f"support_bot: argument {option}: {told}; --help lists the options\n"


def test_taken_port_and_taken_database(
    start: Callable[..., Bot], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = refusal(capsys, "--base-url", NOWHERE, "--db", str(tmp_path / "b.db"), "--port", port)
        assert told.startswith(f"support_bot: cannot listen on 127.0.0.1:{port}: Address already in use; choose")
    bot = start()
    told = refusal(capsys, "--base-url", NOWHERE, "--db", str(bot.db), "--port", "0")
    assert told == f"support_bot: --db {bot.db} is in use by another support bot; stop it, or give another file"
