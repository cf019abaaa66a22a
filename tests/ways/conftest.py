"""Scripted upstreams for the ways in, and no way out to a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
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
