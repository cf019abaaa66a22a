"""`caddie retrieve`: search a local corpus over HTTP, in Search-R1's shape."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from caddie_sdk.cli.terminal import tell
from caddie_sdk.errors import ConfigError, MissingExtra


@dataclass(frozen=True)
class RetrieveChoices:
    """The options of `caddie retrieve`."""

    corpus: Path
    mode: str = "bm25"
    host: str = "127.0.0.1"
    port: int = 0
    top_k: int = 3
    cache_dir: Path | None = None
    model: str | None = None
    query_prompt: str | None = None
    passage_prompt: str | None = None
    device: str | None = None
    threads: int | None = None
    max_body_mb: int = 4
    max_queries: int = 1024
    max_top_k: int = 100
    total: float = 300.0
    drain: int = 10


def run_retrieve(choices: RetrieveChoices) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are let finish.

    Raises:
        ConfigError, DataError, MissingExtra, ServeError: with one line on what to mend.
    """
    try:
        from caddie_sdk.cli.serving import claim, run
        from caddie_tools.retrieval_server import RetrievalLimits, create_app
    except ImportError as error:
        raise error if isinstance(error, MissingExtra) else MissingExtra("caddie retrieve", "proxy") from error

    shown = logging.StreamHandler()
    shown.setLevel(logging.WARNING)  # the root's level is not enough: bm25s sets its own logger to DEBUG
    logging.basicConfig(handlers=[shown], format="%(name)s: %(message)s")
    signal.signal(signal.SIGTERM, _leave)  # until the server runs: an index takes its time
    limits = RetrievalLimits(choices.max_body_mb * 2**20, choices.max_queries, choices.max_top_k, choices.total)
    with claim(choices.host, choices.port) as claimed:
        search = _open(choices)
        app = create_app(search, top_k=choices.top_k, limits=limits, threads=choices.threads)
        tell(f"{len(search):,} passages of {choices.corpus}, {search.mode}")
        run(app, claimed, path="/retrieve", drain=choices.drain)


def _open(choices: RetrieveChoices) -> Any:
    from caddie_tools.corpus import CorpusSearch, Mode

    search = CorpusSearch(
        choices.corpus,
        mode=cast(Mode, choices.mode),  # checked there
        cache_dir=choices.cache_dir or default_cache(),
        model=choices.model,
        query_prompt=choices.query_prompt,
        passage_prompt=choices.passage_prompt,
        device=choices.device,
    )
    if not len(search):
        raise ConfigError(f'the corpus {choices.corpus} is empty: a line a passage is needed, {{"id", "contents"}}')
    search.search("ready", 1)  # loads the embedding model, which should be missed now and not at the first request
    return search


def default_cache() -> Path:
    """Where indexes are kept: `caddie/indexes` in $XDG_CACHE_HOME, or in `.cache` of the home folder.

    Raises:
        ConfigError: there is no home folder.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "caddie" / "indexes"
    except RuntimeError as error:
        raise ConfigError("there is no home folder to keep indexes in: give --cache-dir") from error


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(0)
