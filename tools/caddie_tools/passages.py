"""A passage, a hit, what a retriever is, and BM25 search over passages at hand."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from caddie_sdk.errors import ConfigError

if TYPE_CHECKING:
    from caddie_tools.bm25 import Bm25Index


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of text an agent can be shown.

    Attributes:
        id: unique within its corpus.
        title: one line; may be empty.
        text: the body.
    """

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Title and text in one field, as in Search-R1's corpora and service: `"Title"`, newline, text."""
        # A line break inside the title would end it early for whoever reads the field back.
        title = self.title.replace("\r", " ").replace("\n", " ")
        return f'"{title}"\n{self.text}'

    @classmethod
    def from_contents(cls, id: str, contents: str) -> Passage:
        """Read Search-R1's `contents` field back.

        The first line is the title, in quotes or not, as Search-R1's own server takes it; a `contents`
        of one unquoted line is a text without a title.
        """
        first, newline, rest = contents.partition("\n")
        first = first.removesuffix("\r")
        if len(first) >= 2 and first[0] == first[-1] == '"':
            return cls(id, first[1:-1], rest)
        return cls(id, first, rest) if newline else cls(id, "", contents)

    @property
    def searchable(self) -> str:
        """What an index reads: title and text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage found, and how well it matched: higher is better, comparable within one answer only."""

    passage: Passage
    score: float


@runtime_checkable
class Retriever(Protocol):
    """Anything that finds passages for a query."""

    def search(self, query: str, top_k: int = 3) -> list[Hit]:
        """Return at most `top_k` hits, best first; none for a blank query or `top_k` below 1."""
        ...


@runtime_checkable
class AsyncRetriever(Protocol):
    """A retriever that waits for something, such as a server."""

    async def asearch(self, query: str, top_k: int = 3) -> list[Hit]:
        """The same as `Retriever.search`, without blocking the event loop."""
        ...


SearchSource: TypeAlias = Retriever | AsyncRetriever | Callable[[str, int], Awaitable[list[Hit]] | list[Hit]]


async def search_source(source: SearchSource, query: str, top_k: int) -> list[Hit]:
    """Search any kind of source from async code; what would block runs in a worker thread.

    Raises:
        ConfigError: the source is none of the three kinds, or answers with something else than hits.
    """
    if isinstance(source, AsyncRetriever):
        found: object = await source.asearch(query, top_k)
    elif isinstance(source, Retriever):
        found = await asyncio.to_thread(source.search, query, top_k)
    elif inspect.iscoroutinefunction(source):
        found = await source(query, top_k)
    elif callable(source):
        found = await asyncio.to_thread(source, query, top_k)
        if inspect.isawaitable(found):
            found = await found
    else:
        raise ConfigError(f"{source!r} cannot search: give a retriever or a function (query, top_k) -> hits")
    if not isinstance(found, list) or not all(isinstance(hit, Hit) for hit in found):
        raise ConfigError(f"{source!r} must return a list of caddie_tools.Hit, not {type(found).__name__}")
    return found


def clean_query(query: str) -> str:
    """Strip blanks and replace lone surrogates, which a model can emit and no encoder or server accepts."""
    return query.encode("utf-8", "replace").decode("utf-8").strip()


class PassageSearch:
    """BM25 search over passages held in memory; title and text are indexed.

    Deterministic: passages that score the same come in the order they were given. Safe to call from
    several threads.

    Args:
        passages: what to search; may be empty.
        index: a ready index of exactly these passages, to skip building one.
    """

    def __init__(self, passages: Sequence[Passage], *, index: Bm25Index | None = None) -> None:
        # bm25s brings numpy and scipy: only those who search pay for the import.
        from caddie_tools.bm25 import Bm25Index

        self.passages = tuple(passages)
        self._index = index or Bm25Index.build([passage.searchable for passage in self.passages])

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, query: str, top_k: int = 3) -> list[Hit]:
        """Return at most `top_k` passages that share a word with the query, best first.

        Returns fewer, or none, when the query is blank, holds only stopwords or words the passages lack,
        or there are fewer passages.
        """
        return [Hit(self.passages[i], score) for i, score in self._index.top(clean_query(query), top_k)]
