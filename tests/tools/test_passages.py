"""Passages, Search-R1's contents field, and BM25 search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caddie_sdk.errors import ConfigError
from caddie_tools import Hit, Passage, PassageSearch
from caddie_tools.passages import search_source

_LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))


def _ids(hits: list[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


@pytest.fixture
def three() -> PassageSearch:
    return PassageSearch(
        [
            Passage("a", "Kodak", "George Eastman founded the company in 1888."),
            Passage("b", "Malcolm X", "An American minister."),
            Passage("c", "Pál Gábor", "A Hungarian film director."),
        ]
    )


def test_contents_is_search_r1s_form() -> None:
    assert Passage("7", "Kodak", "A company.\nIt made film.").contents == '"Kodak"\nA company.\nIt made film.'


@given(_LINE, st.text(st.characters(exclude_categories=["Cs"])))
def test_contents_can_be_read_back(title: str, text: str) -> None:
    passage = Passage("7", title, text)
    assert Passage.from_contents("7", passage.contents) == passage


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('""Heroes""\nA song.', '"Heroes"', "A song."),  # a title that is itself in quotes
        ('"Kodak"\r\nA company.', "Kodak", "A company."),
        ("Kodak\nA company.", "Kodak", "A company."),
        ("A company.", "", "A company."),
        ('"Kodak"', "Kodak", ""),
        ('"', "", '"'),
        ("", "", ""),
    ],
)
def test_contents_of_other_writers(contents: str, title: str, text: str) -> None:
    assert Passage.from_contents("7", contents) == Passage("7", title, text)


def test_a_line_break_in_a_title_does_not_leak_into_the_text() -> None:
    read = Passage.from_contents("7", Passage("7", "One\nTwo", "Text").contents)
    assert (read.title, read.text) == ("One Two", "Text")


def test_title_and_text_are_both_searched(three: PassageSearch) -> None:
    assert _ids(three.search("kodak")) == ["a"]
    assert _ids(three.search("who was EASTMAN?")) == ["a"]


def test_one_letter_words_and_accents_count(three: PassageSearch) -> None:
    assert _ids(three.search("X")) == ["b"]
    assert _ids(three.search("Pal Gabor")) == _ids(three.search("Pál Gábor")) == ["c"]


@pytest.mark.parametrize("query", ["", "  \n", "zebra", "the of and", "?!", "\ud800"])
def test_nothing_to_find_is_an_empty_list(three: PassageSearch, query: str) -> None:
    assert three.search(query) == []


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_below_one_finds_nothing(three: PassageSearch, top_k: int) -> None:
    assert three.search("kodak", top_k) == []


@pytest.mark.parametrize("texts", [[], ["", "  "], ["the of", "?"]])
def test_a_corpus_without_words(texts: list[str]) -> None:
    assert PassageSearch([Passage(str(i), "", text) for i, text in enumerate(texts)]).search("the kodak") == []


def test_top_k_beyond_the_corpus(three: PassageSearch) -> None:
    assert len(three.search("company minister film", 50)) == 3


def test_scores_are_bm25s_by_hand() -> None:
    # Two texts of one word each, N = 2, df = 1, tf = 1, length = mean length. Lucene's variant:
    # idf = ln(1 + (N - df + 0.5) / (df + 0.5)) = ln 2; tf part = 1 / (1 + k1) with k1 = 1.5.
    hits = PassageSearch([Passage("a", "", "apple"), Passage("b", "", "pear")]).search("apple")
    assert [(hit.passage.id, round(hit.score, 6)) for hit in hits] == [("a", 0.277259)]  # 0.693147 / 2.5


def test_ties_keep_the_order_given() -> None:
    texts = ["film film pad", "film pad pad", "pad pad pad"]  # three scores, the last of them 0
    search = PassageSearch([Passage(str(i), "", texts[i % 3]) for i in range(3000)])
    ranked = [str(i) for i in range(0, 3000, 3)] + [str(i) for i in range(1, 3000, 3)]
    assert _ids(search.search("film", 3000)) == ranked
    assert _ids(search.search("film", 1007)) == ranked[:1007]
    assert _ids(search.search("film", 7)) == ranked[:7]


def test_ranking_does_not_depend_on_the_hash_seed(musique: list) -> None:
    passages = [[p.id, p.title, p.text] for question in musique[:5] for p in question.passages]
    program = (
        "import json, sys; from caddie_tools import Passage, PassageSearch\n"
        "passages, query = json.load(sys.stdin)\n"
        "hits = PassageSearch([Passage(*p) for p in passages]).search(query, 20)\n"
        "print(json.dumps([[h.passage.id, h.score] for h in hits]))"
    )
    answers = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps([passages, musique[0].text]),
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        answers.append(json.loads(done.stdout))
    assert len(answers[0]) == 20
    assert answers[0] == answers[1]


def test_no_progress_bars(capfd: pytest.CaptureFixture[str]) -> None:
    PassageSearch([Passage(str(i), "", f"word{i} film") for i in range(2000)]).search("film")
    assert capfd.readouterr() == ("", "")


def test_first_hop_passages_are_found_among_a_questions_own(musique: list) -> None:
    """Measured: 38 of 50 (0.76) in the top 3 of 20, where chance is 0.15."""
    found = 0
    for question in musique:
        hits = PassageSearch(question.passages).search(question.text, 3)
        found += question.passages[question.first_hop] in [hit.passage for hit in hits]
    assert found / len(musique) >= 0.7


def test_first_hop_passages_are_found_among_all(musique: list) -> None:
    """Measured: 39 of 50 (0.78) in the top 3 of 871 distinct passages."""
    pool = {p.contents: Passage(p.contents, p.title, p.text) for q in musique for p in q.passages}
    search = PassageSearch(list(pool.values()))
    found = 0
    for question in musique:
        needed = question.passages[question.first_hop].contents
        found += needed in _ids(search.search(question.text, 3))
    assert len(search) > 800
    assert found / len(musique) >= 0.7


class _Async:
    async def asearch(self, query: str, top_k: int = 3) -> list[Hit]:
        return [Hit(Passage(query, "", ""), float(top_k))]


class _Sync:
    def search(self, query: str, top_k: int = 3) -> list[Hit]:
        return [Hit(Passage(query, "", ""), float(top_k))]


async def _coroutine(query: str, top_k: int) -> list[Hit]:
    return [Hit(Passage(query, "", ""), float(top_k))]


def _function(query: str, top_k: int) -> list[Hit]:
    return [Hit(Passage(query, "", ""), float(top_k))]


class _AsyncCallable:
    async def __call__(self, query: str, top_k: int) -> list[Hit]:
        return await _coroutine(query, top_k)


@pytest.mark.parametrize("source", [_Async(), _Sync(), _coroutine, _function, _AsyncCallable()])
async def test_every_kind_of_source_can_be_searched(source: object) -> None:
    assert await search_source(source, "q", 2) == [Hit(Passage("q", "", ""), 2.0)]  # type: ignore[arg-type]


@pytest.mark.parametrize("source", ["a path", lambda query, top_k: "text", lambda query, top_k: ["text"]])
async def test_what_is_no_source_is_named(source: object) -> None:
    with pytest.raises(ConfigError, match=r"cannot search|must return a list of caddie_tools\.Hit"):
        await search_source(source, "q", 2)  # type: ignore[arg-type]


def test_importing_the_package_is_light() -> None:
    heavy = ["torch", "faiss", "sentence_transformers", "numpy", "bm25s", "httpx", "tavily", "langchain_core"]
    program = f"import sys, caddie_tools; print([m for m in {heavy} if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_stays_on_its_floor() -> None:
    program = (
        "import sys, caddie_tools\n"
        "[getattr(caddie_tools, name) for name in caddie_tools.__all__]\n"
        "up = ('caddie_critics', 'caddie_evals', 'caddie_training', 'torch', 'faiss', 'sentence_transformers')\n"
        "print([m for m in up if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    import caddie_tools

    assert caddie_tools.__all__ == [
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
    assert all(getattr(caddie_tools, name).__name__ == name for name in caddie_tools.__all__)
    assert Path(caddie_tools.__file__).with_name("py.typed").exists()
    with pytest.raises(AttributeError, match="no_such_name"):
        caddie_tools.no_such_name
