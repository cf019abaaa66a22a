"""Reciprocal rank fusion, with numbers worked by hand."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caddie_sdk.errors import ConfigError
from caddie_tools import FusedSearch, Hit, Passage, PassageSearch, reciprocal_rank_fusion


def test_by_hand() -> None:
    # a: 1/61 + 1/63 = 0.016393 + 0.015873;  b: 1/62 + 1/61 = 0.016129 + 0.016393;  c: 1/63;  d: 1/62
    fused = reciprocal_rank_fusion([["a", "b", "c"], ["b", "d", "a"]])
    assert [item for item, _ in fused] == ["b", "a", "d", "c"]
    assert [round(score, 6) for _, score in fused] == [0.032522, 0.032266, 0.016129, 0.015873]


def test_k_by_hand() -> None:
    # k = 0: a = 1 + 1/3, b = 1/2 + 1/2, c = 1/3 + 1
    assert reciprocal_rank_fusion([["a", "b", "c"], ["c", "b", "a"]], k=0) == [("a", 4 / 3), ("c", 4 / 3), ("b", 1.0)]


def test_found_by_two_late_beats_found_by_one_first() -> None:
    # 2/(60 + 50) = 0.01818 > 1/61 = 0.01639
    first, second = [f"x{i}" for i in range(49)], [f"y{i}" for i in range(49)]
    assert reciprocal_rank_fusion([[*first, "both"], [*second, "both"]])[0] == ("both", pytest.approx(2 / 110))


def test_an_item_twice_in_a_ranking_counts_once_at_its_better_rank() -> None:
    assert reciprocal_rank_fusion([["a", "a", "b"]]) == [("a", 1 / 61), ("b", 1 / 62)]


def test_symmetric_ranks_tie_exactly_and_keep_the_first_rankings_order() -> None:
    # Each of a, b, c has ranks 1, 2 and 7 once; added in another order, 1/61 + 1/62 + 1/67 differs in its last bit.
    rankings = [
        [first, second, *(f"{first}{i}" for i in range(4)), last] for first, second, last in ("abc", "bca", "cab")
    ]
    for order in itertools.permutations(rankings):
        best = reciprocal_rank_fusion(order)[:3]
        assert len({score for _, score in best}) == 1
        assert [item for item, _ in best] == [order[0][0], order[0][1], order[0][6]]


@pytest.mark.parametrize("rankings", [[], [[]], [[], []]])
def test_nothing_in_nothing_out(rankings: list[list[str]]) -> None:
    assert reciprocal_rank_fusion(rankings) == []


def test_a_negative_k_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        reciprocal_rank_fusion([["a"]], k=-1)


@given(st.lists(st.lists(st.integers(0, 9), unique=True), max_size=4))
def test_every_item_once_and_scores_fall(rankings: list[list[int]]) -> None:
    fused = reciprocal_rank_fusion(rankings)
    assert sorted(item for item, _ in fused) == sorted(set(itertools.chain(*rankings)))
    scores = [score for _, score in fused]
    assert scores == sorted(scores, reverse=True)


class Fixed:
    """A retriever with one ranking, which notes how many hits it was asked for."""

    def __init__(self, *ids: str, corpus: str = "") -> None:
        self.hits = [Hit(Passage(i, "", corpus + i), 1.0) for i in ids]
        self.asked: list[int] = []

    def search(self, query: str, top_k: int = 3) -> list[Hit]:
        self.asked.append(top_k)
        return self.hits[:top_k]


def _ids(hits: list[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


async def test_sync_and_async_agree() -> None:
    search = FusedSearch([Fixed("a", "b", "c"), Fixed("b", "d", "a")])
    hits = search.search("q", 3)
    assert _ids(hits) == ["b", "a", "d"]
    assert hits[0].score == pytest.approx(1 / 62 + 1 / 61)
    assert await search.asearch("q", 3) == hits


async def test_retrievers_search_at_once() -> None:
    arrived = asyncio.Event()

    class Waits:
        async def asearch(self, query: str, top_k: int = 3) -> list[Hit]:
            await asyncio.wait_for(arrived.wait(), 5)
            return Fixed("a").hits

        def search(self, query: str, top_k: int = 3) -> list[Hit]:
            raise AssertionError("the async method is there")

    class Arrives(Waits):
        async def asearch(self, query: str, top_k: int = 3) -> list[Hit]:
            arrived.set()
            return Fixed("b").hits

    assert _ids(await FusedSearch([Waits(), Arrives()]).asearch("q")) == ["a", "b"]


@pytest.mark.parametrize(("top_k", "asked"), [(3, 100), (200, 200)])
def test_depth_goes_beyond_top_k(top_k: int, asked: int) -> None:
    inner = Fixed("a", "b")
    FusedSearch([inner]).search("q", top_k)
    assert inner.asked == [asked]


async def test_top_k_below_one_asks_nobody() -> None:
    inner = Fixed("a")
    assert FusedSearch([inner]).search("q", 0) == await FusedSearch([inner]).asearch("q", 0) == []
    assert inner.asked == []


def test_same_ids_of_two_corpora_stay_apart_unless_told() -> None:
    pair = [Fixed("1", corpus="wiki "), Fixed("1", corpus="news ")]
    assert [hit.passage.text for hit in FusedSearch(pair).search("q")] == ["wiki 1", "news 1"]
    merged = FusedSearch(pair, key=lambda passage: passage.id).search("q")
    assert [hit.passage.text for hit in merged] == ["wiki 1"]


def test_no_retrievers_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        FusedSearch([])


def test_fusing_a_real_ranking_with_itself_changes_nothing(musique: list) -> None:
    search = PassageSearch(musique[0].passages)
    fused = FusedSearch([search, search]).search(musique[0].text, 10)
    assert len(fused) == 10
    assert _ids(fused) == _ids(search.search(musique[0].text, 10))
