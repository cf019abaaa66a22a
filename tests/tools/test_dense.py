"""Search by meaning with the real MiniLM model."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from caddie_sdk.errors import ConfigError, MissingExtra
from caddie_tools import CorpusSearch, DenseSearch, Hit, Passage
from caddie_tools.dense import default_model, model_fingerprint

PASSAGES = [
    Passage("cat", "Felines", "A small domesticated animal that purrs and hunts mice."),
    Passage("bank", "Finance", "An institution that takes deposits and lends money."),
    Passage("sun", "Astronomy", "The star at the centre of the solar system."),
    Passage("sea", "Oceans", "A large body of salt water that covers much of the Earth."),
]


def _ids(hits: list[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


@pytest.fixture(scope="module")
def dense(minilm: str) -> DenseSearch:
    search = DenseSearch(PASSAGES)
    assert search.model == minilm
    return search


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "best"),
    [("Where could I get a loan?", "bank"), ("kitten", "cat"), ("heat and daylight come from it", "sun")],
)
def test_meaning_is_found_without_a_shared_word(dense: DenseSearch, query: str, best: str) -> None:
    hits = dense.search(query, 2)
    assert len(hits) == 2
    assert _ids(hits)[0] == best
    assert 1 >= hits[0].score > hits[1].score >= -1


@pytest.mark.slow
def test_scores_are_cosines(dense: DenseSearch) -> None:
    hits = dense.search(PASSAGES[1].searchable, 10)
    assert len(hits) == 4
    assert hits[0].passage == PASSAGES[1]
    assert hits[0].score == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
def test_threads_can_share_it(dense: DenseSearch) -> None:
    queries = ["loan", "kitten", "daylight", "salt water"] * 8
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: _ids(dense.search(query, 1)), queries))
    assert found == [["bank"], ["cat"], ["sun"], ["sea"]] * 8


@pytest.mark.slow
def test_a_query_with_half_a_surrogate_is_searched(dense: DenseSearch) -> None:
    assert _ids(dense.search("kitten \ud83d", 1)) == ["cat"]


@pytest.mark.slow
def test_the_cached_vectors_are_used_and_damage_is_mended(
    minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = CorpusSearch(PASSAGES, mode="dense", cache_dir=tmp_path).search("kitten", 4)
    (vectors,) = tmp_path.glob("dense-*/vectors.faiss")
    vectors.write_bytes(vectors.read_bytes()[:-100])
    assert CorpusSearch(PASSAGES, mode="dense", cache_dir=tmp_path).search("kitten", 4) == first

    monkeypatch.setattr(DenseSearch, "_load_model", lambda self: pytest.fail("the model is not needed to start"))
    assert len(CorpusSearch(PASSAGES, mode="dense", cache_dir=tmp_path)) == 4


@pytest.mark.slow
def test_prompts_change_the_vectors_and_their_cache(minilm: str, tmp_path: Path) -> None:
    plain = CorpusSearch(PASSAGES, mode="dense", cache_dir=tmp_path).search("kitten", 4)
    prompted = CorpusSearch(PASSAGES, mode="dense", cache_dir=tmp_path, passage_prompt="passage: ").search("kitten", 4)
    assert len(list(tmp_path.iterdir())) == 2
    assert [hit.score for hit in plain] != [hit.score for hit in prompted]


@pytest.mark.slow
def test_fused_finds_what_either_finds(minilm: str, tmp_path: Path, musique: list) -> None:
    """First-hop passages in the top 3 of 200, ten questions; measured: BM25 8, MiniLM 9, fused 10."""
    questions = musique[:10]
    passages = [passage for question in questions for passage in question.passages]

    def found(mode: str) -> int:
        search = CorpusSearch(passages, mode=mode, cache_dir=tmp_path)  # type: ignore[arg-type]
        return sum(q.passages[q.first_hop].id in _ids(search.search(q.text, 3)) for q in questions)

    counts = {mode: found(mode) for mode in ("bm25", "dense", "fused")}
    assert counts["dense"] >= 7, counts
    assert counts["fused"] >= 8, counts
    assert counts["fused"] >= counts["bm25"], counts


def test_blank_queries_and_empty_corpora_need_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseSearch, "_load_model", lambda self: pytest.fail("not needed"))
    assert DenseSearch(PASSAGES).search("  ") == []
    assert DenseSearch(PASSAGES).search("kitten", 0) == []
    assert DenseSearch([]).search("kitten") == []
    assert CorpusSearch([], mode="dense").search("kitten") == []


def test_an_empty_corpus_can_be_cached(tmp_path: Path) -> None:
    for _ in range(2):
        assert CorpusSearch([], mode="fused", cache_dir=tmp_path).search("kitten") == []
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("package", ["faiss", "sentence_transformers"])
def test_a_missing_extra_names_the_install_command(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"pip install 'caddie-sdk\[retrieval\]'"):
        DenseSearch(PASSAGES).search("kitten")


@pytest.mark.slow
def test_a_model_that_is_not_there_is_named(minilm: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot load the embedding model .*no-model"):
        DenseSearch(PASSAGES, tmp_path / "no-model").search("kitten")


def test_without_the_package_the_default_is_the_hub_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert default_model() == "sentence-transformers/all-MiniLM-L6-v2"


def test_the_model_fingerprint_follows_the_weights_not_the_folder(tmp_path: Path) -> None:
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "model.safetensors").write_bytes(weights)
    a, b, c = (model_fingerprint(str(tmp_path / name)) for name in "abc")
    assert a == b != c
    assert model_fingerprint("org/model") == "org/model"
