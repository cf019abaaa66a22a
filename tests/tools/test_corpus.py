"""Reading a corpus, and the index cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from caddie_sdk.errors import ConfigError, DataError
from caddie_tools import CorpusSearch, Hit, Passage, PassageSearch, load_corpus
from caddie_tools.corpus import corpus_fingerprint
from caddie_tools.index_cache import cached_index

GOOD = b'{"id": "0", "contents": "\\"Kodak\\"\\nA company."}\n'


def _write(folder: Path, content: bytes) -> Path:
    path = folder / "corpus.jsonl"
    path.write_bytes(content)
    return path


def test_both_forms_and_what_is_passed_over(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        b"\xef\xbb\xbf" + GOOD + b"\n"
        b'{"id": 1, "title": "", "text": "No title.", "url": "x"}\r\n'
        b'{"id": "2", "contents": "\\"T\\"\\nUsed.", "text": "not used", "title": 3}',
    )
    assert load_corpus(path) == [
        Passage("0", "Kodak", "A company."),
        Passage("1", "", "No title."),
        Passage("2", "T", "Used."),
    ]


@pytest.mark.parametrize(
    ("line", "field", "problem"),
    [
        (b'{"contents": "x"}', "id", "missing"),
        (b'{"id": null, "contents": "x"}', "id", "missing"),
        (b'{"id": "", "contents": "x"}', "id", "empty"),
        (b'{"id": true, "contents": "x"}', "id", "this is a boolean"),
        (b'{"id": 1.5, "contents": "x"}', "id", "this is a number"),
        (b'{"id": "0", "contents": "x"}', "id", "already on line 1"),
        (b'{"id": 0, "contents": "x"}', "id", "already on line 1"),
        (b'{"id": "1"}', "contents", "missing"),
        (b'{"id": "1", "title": "x"}', "contents", "missing"),
        (b'{"id": "1", "contents": " "}', "contents", "empty"),
        (b'{"id": "1", "contents": ["x"]}', "contents", "this is an array"),
        (b'{"id": "1", "contents": "\\ud800"}', "contents", "surrogate"),
        (b'{"id": "1", "text": "x"}', "title", "missing"),
        (b'{"id": "1", "title": "x", "text": {}}', "text", "this is an object"),
        (b'{"id": "1", "contents": ', "(line)", "not JSON"),
        (b"[" * 100_000, "(line)", "not JSON"),
        (b'"text"', "(line)", "this is a string"),
        (b"null", "(line)", "this is null"),
        (b'{"id": "1", "contents": "\xff"}', "(line)", "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, field: str, problem: str) -> None:
    path = _write(tmp_path, GOOD + b"\n" + line + b"\n")
    with pytest.raises(DataError) as caught:
        load_corpus(path)
    error = caught.value
    assert (error.path, error.line, error.field) == (str(path), 3, field)
    assert problem in error.problem
    assert f"{path}, line 3, field '{field}'" in str(error)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: No such file"):
        load_corpus(tmp_path / "nowhere.jsonl")


def test_the_real_corpus(shared_data: Path) -> None:
    passages = load_corpus(shared_data / "corpus" / "2wiki_corpus_hipporag.jsonl")
    assert len(passages) == 6119
    assert passages[0].title == "Teutberga"
    assert passages[0].text.startswith("Teutberga( died 11 November 875) was a queen")
    best = CorpusSearch(passages).search("Teutberga, daughter of Boso the Elder", 1)
    assert [hit.passage for hit in best] == [passages[0]]


def test_the_fingerprint_sees_order_and_field_borders() -> None:
    one, two = Passage("1", "ab", "c"), Passage("2", "d", "e")
    variants = [[one, two], [two, one], [Passage("1", "a", "bc"), two], [one], []]
    variants += [[Passage("1", "a:b", "c")], [Passage("1", "a", "b:c")]]
    assert len({corpus_fingerprint(v) for v in variants}) == len(variants)
    assert corpus_fingerprint([one, two]) == corpus_fingerprint([Passage("1", "ab", "c"), Passage("2", "d", "e")])


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'sparse'.*bm25, dense, fused"):
        CorpusSearch([], mode="sparse")  # type: ignore[arg-type]


# --- the cache ---------------------------------------------------------------------------------------


@pytest.fixture
def passages(musique: list) -> list[Passage]:
    return [p for question in musique[:5] for p in question.passages]


@pytest.fixture
def forbid_building(monkeypatch: pytest.MonkeyPatch):
    def forbid() -> None:
        def build(texts: object) -> None:
            raise AssertionError("the cached index should have been used")

        monkeypatch.setattr("caddie_tools.bm25.Bm25Index.build", build)

    return forbid


def _hits(search: CorpusSearch, musique: list) -> list[list[Hit]]:
    return [search.search(question.text, 5) for question in musique[:5]]


def test_a_second_start_takes_the_index_from_disk(
    tmp_path: Path, passages: list[Passage], musique: list, forbid_building
) -> None:
    first = _hits(CorpusSearch(passages, cache_dir=tmp_path / "deep" / "cache"), musique)
    assert all(len(hits) == 5 for hits in first)
    forbid_building()
    assert _hits(CorpusSearch(passages, cache_dir=tmp_path / "deep" / "cache"), musique) == first


def test_cached_and_plain_search_agree(tmp_path: Path, passages: list[Passage], musique: list) -> None:
    plain = [PassageSearch(passages).search(question.text, 5) for question in musique[:5]]
    CorpusSearch(passages, cache_dir=tmp_path)
    assert _hits(CorpusSearch(passages, cache_dir=tmp_path), musique) == plain


def test_nothing_is_pickled(tmp_path: Path, passages: list[Passage]) -> None:
    import numpy as np

    CorpusSearch(passages, cache_dir=tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".npy", ".json"}
    for path in files:
        if path.suffix == ".npy":
            np.load(path, allow_pickle=False)  # raises for pickled content
        else:
            json.loads(path.read_text("utf-8"))


def test_a_changed_corpus_gets_its_own_index(tmp_path: Path, passages: list[Passage]) -> None:
    CorpusSearch(passages, cache_dir=tmp_path)
    changed = [*passages[:-1], Passage(passages[-1].id, passages[-1].title, "Xylophone.")]
    search = CorpusSearch(changed, cache_dir=tmp_path)
    assert [hit.passage for hit in search.search("xylophone")] == [changed[-1]]
    assert len(list(tmp_path.iterdir())) == 2


def _index_folder(cache: Path) -> Path:
    (folder,) = cache.iterdir()
    return folder


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["data.csc.index.npy", "vocab.index.json", "params.index.json", "manifest.json"])
def test_a_damaged_cache_is_rebuilt(tmp_path, passages, musique, caplog, forbid_building, name, damage) -> None:
    good = _hits(CorpusSearch(passages, cache_dir=tmp_path), musique)
    damage(_index_folder(tmp_path) / name)
    assert _hits(CorpusSearch(passages, cache_dir=tmp_path), musique) == good
    assert "building it again" in caplog.text
    forbid_building()  # and now it is whole again, with no rubbish beside it
    assert _hits(CorpusSearch(passages, cache_dir=tmp_path), musique) == good
    assert _index_folder(tmp_path).name.startswith("bm25-")


def test_a_corpus_without_words_can_be_cached(tmp_path: Path) -> None:
    for _ in range(2):
        assert CorpusSearch([Passage("1", "", "the")], cache_dir=tmp_path).search("kodak") == []
    assert _index_folder(tmp_path).is_dir()


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, passages: list[Passage]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="index cache folder"):
        CorpusSearch(passages, cache_dir=tmp_path / "file" / "cache")


def _text_index(cache: Path, text: str, save=None) -> str:
    return cached_index(
        cache,
        "name",
        build=lambda: text,
        save=save or (lambda index, folder: (folder / "index.txt").write_text(index)),
        load=lambda folder: (folder / "index.txt").read_text(),
    )


def test_a_full_disk_costs_the_cache_but_not_the_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def full(index: str, folder: Path) -> None:
        (folder / "index.txt").write_text("ha")
        raise OSError(28, "No space left on device")

    assert _text_index(tmp_path, "one", full) == "one"
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert _text_index(tmp_path, "two") == "two"


def test_a_kill_while_writing_leaves_no_half_index(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys; from caddie_tools.index_cache import cached_index\n"
        "def save(index, folder):\n"
        "    (folder / 'index.txt').write_text('ha')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "cached_index(pathlib.Path(sys.argv[1]), 'name', build=lambda: 'half', save=save, load=lambda f: '')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=False)
    assert done.returncode == -9
    assert not (tmp_path / "name").exists()
    assert _text_index(tmp_path, "whole") == "whole"
    assert _text_index(tmp_path, "not built again") == "whole"


def test_many_at_once_all_get_the_index(tmp_path: Path) -> None:
    gate, results = threading.Barrier(8), []

    def start() -> None:
        gate.wait()
        results.append(_text_index(tmp_path, "same"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["same"] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["name"]
    assert _text_index(tmp_path, "not built again") == "same"
