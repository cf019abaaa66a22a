"""Scripted upstreams for the ways in, and no way out to a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from kit import EVERY, SOME, Start, starter
from upstream import Upstream


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test forgets to configure must not reach a real provider."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def upstreams() -> Iterator[Callable[..., Upstream]]:
    """Starts `Upstream(script, ...)` as often as it is called; all of them end with the test."""
    with ExitStack() as stack:
        yield lambda script, **options: stack.enter_context(Upstream(script, **options))


@pytest.fixture(params=EVERY)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Every way of asking for a chat completion."""
    with starter(request.param) as made:
        yield made


@pytest.fixture(params=SOME)
def some(request: pytest.FixtureRequest) -> Iterator[Start]:
    """A spread of them, for what hardly depends on the way."""
    with starter(request.param) as made:
        yield made
