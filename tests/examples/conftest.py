"""The support bot as a process of its own, between a scripted model and a scripted critic, all on loopback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for place in (ROOT, ROOT / "tests" / "ways"):
    sys.path.append(str(place))

from bot_kit import Bot, critic_says, model_says  # noqa: E402
from upstream import Upstream  # noqa: E402


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test forgets to configure must not reach a real provider."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "SUPPORT_STAFF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model() -> Iterator[Upstream]:
    with Upstream(model_says, strict=True) as upstream:
        yield upstream
        assert not upstream.refused


@pytest.fixture
def critic() -> Iterator[Upstream]:
    with Upstream(critic_says, strict=True) as upstream:
        yield upstream


@pytest.fixture
def start(tmp_path: Path, model: Upstream, critic: Upstream) -> Iterator[Callable[..., Bot]]:
    """Starts the bot on one database, as often as it is called."""
    with ExitStack() as stack:

        def starts(**options: object) -> Bot:
            settings = {"folder": tmp_path, "model": model.url, "critic": critic.url, **options}
            return stack.enter_context(Bot(**settings))  # type: ignore[arg-type]

        yield starts
