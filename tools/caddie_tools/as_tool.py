"""A search as something an agent can call."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from caddie_sdk.errors import ConfigError, MissingExtra, SessionError
from caddie_sdk.tools import Tool
from caddie_tools.passages import Hit, Passage, SearchSource, search_source

if TYPE_CHECKING:
    from langchain_core.tools import StructuredTool

_DESCRIPTION = "Search for passages about a query. Returns the best matches as numbered lines, title and text."
_SEEN_NOTE = " Passages shown before are only named."
_STATE_VERSION = 1


class SearchTool:
    """A search tool with a memory of what it has shown.

    One object serves one episode at a time: `reset()` it between episodes, or give each its own `copy()`,
    which shares the source and its index. `state()` and `restore()` carry the memory through a snapshot of
    the environment.

        search = SearchTool(PassageSearch(passages))
        await search("Who founded Kodak?")      # the observation, as text
        search.as_tool()                         # for an agent

    An observation lists passages as lines `[1] Title: text`, line breaks inside them turned into blanks so
    that no passage can pose as two. With `skip_seen`, those shown before follow as `Already shown: A; B`.

    Args:
        source: a retriever, sync or async, or a function `(query, top_k) -> list[Hit]`, sync or async.
        top_k: passages to search for, 1 or more; those seen before count among them.
        name, description: what the model reads.
        max_chars_per_passage: characters of a text to show; None shows all.
        skip_seen: do not repeat what this object has shown.

    Raises:
        ConfigError: `top_k` or `max_chars_per_passage` is below 1.
    """

    def __init__(
        self,
        source: SearchSource,
        *,
        top_k: int = 3,
        name: str = "search",
        description: str | None = None,
        max_chars_per_passage: int | None = None,
        skip_seen: bool = True,
    ) -> None:
        if top_k < 1:
            raise ConfigError(f"top_k must be 1 or more, not {top_k}")
        if max_chars_per_passage is not None and max_chars_per_passage < 1:
            raise ConfigError(f"max_chars_per_passage must be 1 or more, not {max_chars_per_passage}")
        self.source, self.top_k, self.name = source, top_k, name
        self.description = description or _DESCRIPTION + (_SEEN_NOTE if skip_seen else "")
        self.max_chars_per_passage, self.skip_seen = max_chars_per_passage, skip_seen
        self._seen: dict[str, None] = {}  # an ordered set

    async def __call__(self, query: str) -> str:
        """Search, and return the observation. Raises what the source raises."""
        if not isinstance(query, str) or not query.strip():
            return "The search needs a query: a text that is not empty."
        return self._observe(await search_source(self.source, query, self.top_k))

    def reset(self) -> None:
        """Forget what was shown: a new episode begins."""
        self._seen = {}

    def copy(self) -> SearchTool:
        """A tool with the same source and settings and its own copy of the memory, for a branch."""
        twin = SearchTool(
            self.source,
            top_k=self.top_k,
            name=self.name,
            description=self.description,
            max_chars_per_passage=self.max_chars_per_passage,
            skip_seen=self.skip_seen,
        )
        twin.restore(self.state())
        return twin

    def state(self) -> dict[str, Any]:
        """What was shown, as plain JSON."""
        return {"version": _STATE_VERSION, "seen": list(self._seen)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave.

        Raises:
            SessionError: it is something else; the memory is then left as it was.
        """
        seen = state.get("seen") if isinstance(state, Mapping) else None
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != _STATE_VERSION or not isinstance(seen, list) or not all(isinstance(s, str) for s in seen):
            raise SessionError(f"not a state of a search tool (version {_STATE_VERSION}): {str(state)[:100]}")
        self._seen = dict.fromkeys(seen)

    def as_tool(self) -> Tool:
        """The tool to hand to an agent; it shares this object's memory."""
        return Tool(self.name, self.description, _parameters(), self._run)

    def as_langchain_tool(self) -> StructuredTool:
        """The same for LangChain and LangGraph."""
        return to_langchain(self.as_tool())

    async def _run(self, query: str = "", **_unknown: Any) -> str:
        # A model may leave the query out or invent arguments: that is for it to read, not for us to crash on.
        return await self(query)

    def _observe(self, hits: list[Hit]) -> str:
        lines: list[str] = []
        shown: list[str] = []
        for hit in hits:
            key = _key(hit.passage)
            if self.skip_seen and key in self._seen:
                shown.append(_label(hit.passage))
                continue
            self._seen[key] = None
            lines.append(f"[{len(lines) + 1}] {_line(hit.passage, self.max_chars_per_passage)}")
        if not hits:
            return "No passages found for this query."
        if not lines:
            lines.append("No new passages found for this query.")
        if shown:
            lines.append("Already shown: " + "; ".join(dict.fromkeys(shown)))
        return "\n".join(lines)


def search_tool(
    source: SearchSource,
    *,
    top_k: int = 3,
    name: str = "search",
    description: str | None = None,
    max_chars_per_passage: int | None = None,
    skip_seen: bool = True,
) -> Tool:
    """`SearchTool(...).as_tool()`, for agents of one episode: see `SearchTool` for the arguments."""
    return SearchTool(
        source,
        top_k=top_k,
        name=name,
        description=description,
        max_chars_per_passage=max_chars_per_passage,
        skip_seen=skip_seen,
    ).as_tool()


def to_langchain(tool: Tool) -> StructuredTool:
    """Any of our tools as a LangChain tool, sync and async.

    Raises:
        MissingExtra: langchain-core is not installed.
    """
    try:
        from langchain_core.tools import StructuredTool
    except ImportError as error:
        raise MissingExtra("LangChain tools", "langchain") from error

    async def arun(**arguments: Any) -> str:
        return await tool(**arguments)

    def run(**arguments: Any) -> str:
        return _run_here(tool(**arguments))

    return StructuredTool.from_function(
        func=run,
        coroutine=arun,
        name=tool.name,
        description=tool.description,
        args_schema=dict(tool.parameters),
        infer_schema=False,
    )


def _run_here(work: Coroutine[Any, Any, str]) -> str:
    """Wait for a coroutine in sync code, even code that an event loop of this thread is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _parameters() -> dict[str, Any]:
    query = {"type": "string", "description": "What to look for, in a few words or as a question."}
    return {
        "type": "object",
        "properties": {"query": query},
        "required": ["query"],
        "additionalProperties": False,
    }


def _key(passage: Passage) -> str:
    # Not the id alone: ids collide across corpora, and a web page gives other excerpts to other queries.
    text = "\0".join((passage.id, passage.title, passage.text))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _line(passage: Passage, max_chars: int | None) -> str:
    title, text = " ".join(passage.title.split()), " ".join(passage.text.split())
    if max_chars is not None and len(text) > max_chars:
        text = text[:max_chars].rstrip() + " …"
    return f"{title}: {text}" if title and text else title or text


def _label(passage: Passage) -> str:
    """A short name: the title, or how the text begins."""
    title, text = " ".join(passage.title.split()), " ".join(passage.text.split())
    return title or (text if len(text) <= 60 else text[:60].rstrip() + " …")
