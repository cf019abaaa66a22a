"""Every example in the README and the docs runs; every command of the README is carried out."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.prefix) / "bin"
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [match["body"] for match in FENCE.finditer(page.read_text("utf-8")) if match["language"] == language]


def python_examples() -> list:
    found = []
    for page in PAGES:
        for number, body in enumerate(blocks(page, "python"), 1):
            marks = [pytest.mark.slow] if "embedded_server" in body else []
            found.append(pytest.param(body, id=f"{page.name}-{number}", marks=marks))
    return found


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}


def test_there_are_examples() -> None:
    assert len(python_examples()) >= 6
    assert any("make demo" in body for body in blocks(ROOT / "README.md", "bash"))


@pytest.mark.parametrize("body", python_examples())
def test_python_example(body: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", body],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def commands(page: Path) -> list[str]:
    lines = [line.split("#")[0].strip() for body in blocks(page, "bash") for line in body.splitlines()]
    return [line for line in lines if line]


class Shells:
    """Runs commands as a reader would: servers stay up in a shell of their own."""

    def __init__(self) -> None:
        self.serving: list[subprocess.Popen[str]] = []

    def run(self, command: str) -> str:
        if command.startswith(("caddie serve", "caddie proxy")):
            return self._serve(command)
        ran = subprocess.run(
            self._as_here(command), shell=True, cwd=ROOT, env=environment(),
            capture_output=True, text=True, timeout=580, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{command}\n{ran.stdout[-1500:]}\n{ran.stderr[-1500:]}"
        return ran.stdout

    @staticmethod
    def _as_here(command: str) -> str:
        """The command in the environment at hand, without changing it."""
        if command == "make demo":
            # This environment stands in for the one the command would make; its recipe runs as written.
            return f"make --old-file={sys.prefix}/.demo demo VENV={sys.prefix}"
        if command.startswith("make "):
            return f"{command} --dry-run"  # this very suite is `make test`; CI runs `make check` before it
        if command.startswith("pip install"):
            rest = command.removeprefix("pip install")
            return f"{sys.executable} -m pip install --dry-run --no-build-isolation --no-index{rest}"
        return command

    def _serve(self, command: str) -> str:
        process = subprocess.Popen(
            command.split(), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.serving.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, line
        return line

    def close(self) -> None:
        for process in reversed(self.serving):
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0, f"{process.args} did not end cleanly"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_readme_command() -> None:
    shells, port = Shells(), str(free_port())
    output: dict[str, str] = {}
    try:
        for command in commands(ROOT / "README.md"):
            output[command] = shells.run(command.replace("8765", port))
    finally:
        shells.close()
    demo = output["make demo"]
    assert sum(line.startswith("  answer  ") for line in demo.splitlines()) == 5
    assert "  advice  " in demo
    assert "[5/5]" in demo
    asked = [text for command, text in output.items() if command.startswith("caddie ask")]
    assert len(asked) == 2
    assert all("  act     " in text and "  answer  " in text for text in asked)


def other_pages() -> list:
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] if "caddie serve" in page.read_text("utf-8") else [])
        for page in PAGES
        if page.name != "README.md"
    ]


@pytest.mark.parametrize("page", other_pages())
def test_commands_of_other_pages(page: Path) -> None:
    shells = Shells()
    ports = {shown: str(free_port()) for shown in ("8765", "8766")}
    try:
        for command in commands(page):
            shells.run(re.sub("|".join(ports), lambda shown: ports[shown[0]], command))
    finally:
        shells.close()


def test_the_drawing_is_the_graphs_own() -> None:
    from caddie_sdk import create_caddie_agent
    from caddie_sdk.testing import ScriptedCritic, ScriptedModel

    def search(query: str) -> str:
        """Search."""
        return query

    graph = create_caddie_agent(ScriptedModel([]), [search], critic=ScriptedCritic([])).get_graph()
    assert blocks(ROOT / "docs" / "langgraph.md", "mermaid")[0].strip() == graph.draw_mermaid().strip()


def test_every_relative_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
