"""What an import costs, and what it gives."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from types import ModuleType

import pytest
from cli_kit import CADDIE

import caddie_sdk

PUBLIC = [
    "Budget",
    "CaddieError",
    "CallModel",
    "ChatEndpoint",
    "ChatModel",
    "Command",
    "Consult",
    "ConsultState",
    "Critic",
    "CriticMiddleware",
    "CriticPrompt",
    "Critique",
    "Finish",
    "Guarded",
    "Never",
    "Probabilistic",
    "Reject",
    "Reply",
    "RunTools",
    "Scheduled",
    "SelfCall",
    "Session",
    "SessionConfig",
    "Tool",
    "ToolResult",
    "TraceSink",
    "Usage",
    "Windowed",
    "__version__",
    "arun",
    "create_caddie_agent",
    "parse_protocol",
    "run",
    "wrap",
]


def import_times(code: str) -> tuple[float, set[str]]:
    """Seconds that the imports of a program take, best of three, and the modules it has loaded in the end."""
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    command = [sys.executable, "-X", "importtime", "-c", program]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    return min(_total(done.stderr) for done in runs), set(runs[0].stdout.split())


def _total(report: str) -> float:
    """The seconds of `-X importtime`: each module's own microseconds, added up."""
    rows = [line.removeprefix("import time:").split("|") for line in report.splitlines() if "|" in line]
    return sum(int(own) for own, _, _ in rows if own.strip().isdecimal()) / 1e6


def test_importing_the_sdk_takes_under_a_second_and_loads_nothing_heavy() -> None:
    seconds, modules = import_times("import caddie_sdk")
    assert "caddie_sdk" in modules
    assert seconds < 1.0
    heavy = {"torch", "langgraph", "langchain_core", "openai", "httpx", "pydantic", "numpy", "rich", "typer"}
    assert heavy & modules == set()


@pytest.mark.parametrize("package", ["caddie_critics", "caddie_tools", "caddie_evals"])
def test_the_other_packages_load_no_engine_and_no_graph(package: str) -> None:
    _, modules = import_times(f"import {package}")
    assert package in modules
    assert {"torch", "langgraph", "transformers", "xllamacpp", "vllm", "faiss"} & modules == set()


def test_the_public_surface_is_this_and_nothing_else() -> None:
    assert sorted(caddie_sdk.__all__) == PUBLIC
    assert dir(caddie_sdk) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    found = getattr(caddie_sdk, name)
    assert found is not None
    assert not isinstance(found, ModuleType)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'caddie_sdk' has no attribute 'Nope'"):
        _ = caddie_sdk.Nope
    with pytest.raises(ImportError, match="cannot import name 'Nope'"):
        exec("from caddie_sdk import Nope")


HELP = """\
from caddie_sdk.cli import main
sys.argv = ["caddie", *{words!r}, "--help"]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""


@pytest.mark.parametrize("words", [(), ("ask",), ("demo",), ("serve",), ("packs",)])
def test_help_comes_at_once(words: Sequence[str]) -> None:
    seconds, modules = import_times("import sys\n" + HELP.format(words=list(words)))
    assert "caddie_sdk.cli.app" in modules
    assert seconds < 1.5
    assert {"torch", "langgraph", "langchain_core", "openai", "numpy", "caddie_critics"} & modules == set()


def test_the_installed_command_shows_every_command_in_no_time() -> None:
    took = []
    for _ in range(3):
        started = time.monotonic()
        done = subprocess.run([CADDIE, "--help"], capture_output=True, text=True, check=True, timeout=60)
        took.append(time.monotonic() - started)
    for command in ("ask", "demo", "serve", "packs"):
        assert f"\n  {command} " in done.stdout
    assert done.stderr == ""
    assert min(took) < 1.5
