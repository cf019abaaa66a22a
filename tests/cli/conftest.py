"""The `caddie` command inside the test's process, and servers for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from cli_kit import Caddie, Done
from openai_server import Server, agent, serving

from caddie_sdk.cli import main


@pytest.fixture
def caddie(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caddie:
    """Runs `caddie` with these words."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

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
def server() -> Iterator[Server]:
    """A server that plays an agent, and its own critic."""
    with serving(agent()) as running:
        yield running


@pytest.fixture
def critic() -> Iterator[Server]:
    """Another one, to be a critic only."""
    with serving(agent()) as running:
        yield running


@pytest.fixture
def model(server: Server) -> tuple[str, ...]:
    """The options that make `server` the agent's."""
    return ("--model", "scripted", "--base-url", server.url)
