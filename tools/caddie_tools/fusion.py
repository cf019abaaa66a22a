"""Reciprocal rank fusion: one ranking out of several, from ranks alone.

Cormack, Clarke & Büttcher 2009, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
Learning Methods", SIGIR: RRFscore(d) = Σ over rankings r of 1 / (k + r(d)), ranks from 1, k = 60.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from caddie_sdk.errors import ConfigError
from caddie_tools.passages import Hit, Passage, Retriever, search_source

Item = TypeVar("Item", bound=Hashable)


def reciprocal_rank_fusion(rankings: Iterable[Iterable[Item]], k: float = 60) -> list[tuple[Item, float]]:
    """Fuse rankings (each best first) into one list of (item, score), best first.

    An item absent from a ranking gets nothing from it; of an item twice in one ranking the better rank
    counts. Equal scores keep the order of first appearance, earlier rankings first.

    Args:
        rankings: any number, of any lengths.
        k: 0 or more; the larger, the less the very first ranks stand out. 60 in the paper.

    Raises:
        ConfigError: k is negative.
    """
    if k < 0:
        raise ConfigError(f"k of reciprocal rank fusion must be 0 or more, not {k}")
    terms: dict[Item, list[float]] = {}
    for ranking in rankings:
        for rank, item in enumerate(dict.fromkeys(ranking), start=1):
            terms.setdefault(item, []).append(1 / (k + rank))
    # fsum rounds once, so that the same ranks in another order are an exact tie and not 1e-18 apart.
    scored = [(item, math.fsum(parts)) for item, parts in terms.items()]
    return sorted(scored, key=lambda pair: -pair[1])


class FusedSearch:
    """Search several retrievers and fuse their rankings.

    Args:
        retrievers: one or more; earlier ones win ties.
        k: see `reciprocal_rank_fusion`.
        depth: how many hits to ask of each retriever (at least `top_k` are asked). A passage found by two
            at rank 50 should be able to beat one found by one at rank 1, so it is well above `top_k`;
            lower it for services that charge by the result.
        key: what makes two passages the same; by default all their fields, which is right across corpora
            whose ids collide.
    """

    def __init__(
        self,
        retrievers: Sequence[Retriever],
        *,
        k: float = 60,
        depth: int = 100,
        key: Callable[[Passage], Hashable] = lambda passage: passage,
    ) -> None:
        if not retrievers:
            raise ConfigError("FusedSearch needs at least one retriever")
        self.retrievers = tuple(retrievers)
        self.k, self.depth, self.key = k, depth, key

    def search(self, query: str, top_k: int = 3) -> list[Hit]:
        """Return the `top_k` best hits of all retrievers together; scores are the fused ones."""
        if top_k < 1:
            return []
        depth = max(top_k, self.depth)
        return self._fuse([retriever.search(query, depth) for retriever in self.retrievers], top_k)

    async def asearch(self, query: str, top_k: int = 3) -> list[Hit]:
        """The same with all retrievers searching at once."""
        if top_k < 1:
            return []
        depth = max(top_k, self.depth)
        answers = await asyncio.gather(*(search_source(r, query, depth) for r in self.retrievers))
        return self._fuse(answers, top_k)

    def _fuse(self, answers: Sequence[list[Hit]], top_k: int) -> list[Hit]:
        passages: dict[Hashable, Passage] = {}
        rankings = []
        for hits in answers:
            for hit in hits:
                passages.setdefault(self.key(hit.passage), hit.passage)
            rankings.append([self.key(hit.passage) for hit in hits])
        fused = reciprocal_rank_fusion(rankings, self.k)[:top_k]
        return [Hit(passages[key], score) for key, score in fused]
