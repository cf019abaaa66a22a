"""What agents act with: search over passages, corpora, a retrieval service and the web.

| to search in …                              | use                                       | needs           |
|---------------------------------------------|-------------------------------------------|-----------------|
| passages at hand                            | `PassageSearch` (BM25)                    | nothing more    |
| a JSONL corpus, index cached on disk        | `CorpusSearch(path, mode="bm25")`         | nothing more    |
| the same by meaning, or both fused          | `mode="dense"`, `mode="fused"`            | `[retrieval]`   |
| several of these at once                    | `FusedSearch` (reciprocal rank fusion)    | nothing more    |
| a Search-R1 retrieval service               | `RetrievalService(url)`                   | nothing more    |
| the web                                     | `TavilySearch()`                          | `[tavily]`      |

`SearchTool(source)` makes any of them a tool for an agent:

    search = SearchTool(PassageSearch(passages), top_k=3)
    print(await search("Who founded Kodak?"))     # call it yourself
    tools = [search.as_tool()]                     # or hand it to an agent

Importing this package loads neither torch nor faiss nor an HTTP client; each name loads what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from caddie_tools.as_tool import SearchTool, search_tool, to_langchain
from caddie_tools.fusion import FusedSearch, reciprocal_rank_fusion
from caddie_tools.passages import AsyncRetriever, Hit, Passage, PassageSearch, Retriever

if TYPE_CHECKING:
    from caddie_tools.corpus import CorpusSearch, load_corpus
    from caddie_tools.dense import DenseSearch
    from caddie_tools.retrieval_service import RetrievalService
    from caddie_tools.tavily import TavilySearch

__all__ = [
    "AsyncRetriever",
    "CorpusSearch",
    "DenseSearch",
    "FusedSearch",
    "Hit",
    "Passage",
    "PassageSearch",
    "RetrievalService",
    "Retriever",
    "SearchTool",
    "TavilySearch",
    "load_corpus",
    "reciprocal_rank_fusion",
    "search_tool",
    "to_langchain",
]

_LAZY = {
    "CorpusSearch": "corpus",
    "load_corpus": "corpus",
    "DenseSearch": "dense",
    "RetrievalService": "retrieval_service",
    "TavilySearch": "tavily",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
