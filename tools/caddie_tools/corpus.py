"""A corpus on disk: read it, and search it by words, by meaning, or both."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from caddie_sdk.errors import ConfigError, DataError
from caddie_tools.fusion import FusedSearch
from caddie_tools.passages import Hit, Passage, PassageSearch, Retriever

Mode = Literal["bm25", "dense", "fused"]


def load_corpus(path: str | os.PathLike[str]) -> list[Passage]:
    """Read a JSONL corpus, one passage a line.

    A line is `{"id", "contents"}` (Search-R1's form, `contents` = `"Title"`, newline, text) or
    `{"id", "title", "text"}`. Ids are strings or integers. Other fields and blank lines are ignored.

    Raises:
        DataError: a line is not UTF-8 or not a JSON object, a field is missing, empty or of the wrong type,
            or an id comes twice; names file, line and field.
        ConfigError: the file cannot be read.
    """
    name = os.fspath(path)
    passages: list[Passage] = []
    lines_by_id: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                passage = _parse_line(raw, name, number)
                first = lines_by_id.setdefault(passage.id, number)
                if first != number:
                    raise DataError(name, number, "id", f"{passage.id!r} is already on line {first}")
                passages.append(passage)
    except OSError as error:
        raise ConfigError(f"cannot read the corpus {name}: {error.strerror or error}") from error
    return passages


def _parse_line(raw: bytes, name: str, number: int) -> Passage:
    def bad(field: str, problem: str) -> DataError:
        return DataError(name, number, field, problem)

    try:
        record = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise bad("(line)", f"not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise bad("(line)", f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise bad("(line)", f"a JSON object is needed, this is {_kind(record)}")
    identifier = record.get("id")
    if isinstance(identifier, int) and not isinstance(identifier, bool):
        identifier = str(identifier)
    fields = {"id": identifier, **{f: record[f] for f in ("contents", "title", "text") if f in record}}
    needed = ("id", "title", "text") if "text" in fields and "contents" not in fields else ("id", "contents")
    for field in needed:
        problem = _problem(fields, field)
        if problem:
            raise bad(field, problem)
    if "contents" in needed:
        return Passage.from_contents(fields["id"], fields["contents"])
    return Passage(fields["id"], fields["title"], fields["text"])


def _problem(fields: Mapping[str, Any], field: str) -> str | None:
    value = fields.get(field)
    if value is None:
        return "missing"
    if not isinstance(value, str):
        return f"a string is needed, this is {_kind(value)}"
    if not value.strip() and field != "title":
        return "empty"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which is no character"
    return None


def _kind(value: object) -> str:
    return {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )


def corpus_fingerprint(passages: Sequence[Passage]) -> str:
    """A digest of ids, titles and texts in order (hex, SHA-256)."""
    digest = hashlib.sha256()
    for passage in passages:
        for part in (passage.id, passage.title, passage.text):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(f"{len(data)}:".encode())  # lengths keep ("ab", "c") apart from ("a", "bc")
            digest.update(data)
    return digest.hexdigest()


class CorpusSearch:
    """Search a corpus, with the index kept on disk.

    The index is made, or taken from the cache, here; the cache's key is the content of the corpus and all
    else the index depends on, so a changed corpus never meets an old index. A damaged one is rebuilt. For
    "dense" and "fused" the model itself is loaded when first needed: see `DenseSearch`.

    Args:
        corpus: path of a JSONL corpus (see `load_corpus`), or passages.
        mode: "bm25" by words; "dense" by meaning; "fused" both, by reciprocal rank fusion.
        cache_dir: folder for indexes; None keeps them in memory only.
        model, query_prompt, passage_prompt, device: see `DenseSearch`; unused with "bm25".

    Raises:
        ConfigError: unknown mode, unreadable corpus file or cache folder, or model that cannot be loaded.
        DataError: a bad line in the corpus.
        MissingExtra: "dense" or "fused" without the extra `[retrieval]`.
    """

    def __init__(
        self,
        corpus: str | os.PathLike[str] | Sequence[Passage],
        *,
        mode: Mode = "bm25",
        cache_dir: str | os.PathLike[str] | None = None,
        model: str | Path | None = None,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
        device: str | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"unknown search mode {mode!r}: choose one of {', '.join(get_args(Mode))}")
        self.mode = mode
        self.passages = tuple(load_corpus(corpus) if isinstance(corpus, str | os.PathLike) else corpus)
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._fingerprint = corpus_fingerprint(self.passages) if self._cache_dir else ""
        retrievers: list[Retriever] = []
        if mode != "dense":
            retrievers.append(self._by_words())
        if mode != "bm25":
            retrievers.append(self._by_meaning(model, query_prompt, passage_prompt, device))
        self._search = retrievers[0] if len(retrievers) == 1 else FusedSearch(retrievers)

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, query: str, top_k: int = 3) -> list[Hit]:
        """Return at most `top_k` hits, best first; scores are BM25's, cosines or fused ones, by mode."""
        return self._search.search(query, top_k)

    def _by_words(self) -> PassageSearch:
        from caddie_tools.bm25 import FORMAT, Bm25Index
        from caddie_tools.index_cache import cached_index

        if self._cache_dir is None:
            return PassageSearch(self.passages)
        index = cached_index(
            self._cache_dir,
            self._name("bm25", FORMAT),
            build=lambda: Bm25Index.build([passage.searchable for passage in self.passages]),
            save=Bm25Index.save,
            load=lambda folder: Bm25Index.load(folder, len(self.passages)),
        )
        return PassageSearch(self.passages, index=index)

    def _by_meaning(
        self,
        model: str | Path | None,
        query_prompt: str | None,
        passage_prompt: str | None,
        device: str | None,
    ) -> Retriever:
        from caddie_tools.dense import DenseSearch
        from caddie_tools.index_cache import cached_index

        search = DenseSearch(
            self.passages, model, query_prompt=query_prompt, passage_prompt=passage_prompt, device=device
        )

        def build() -> DenseSearch:
            search.prepare()
            return search

        def load(folder: Path) -> DenseSearch:
            search.load_index(folder)
            return search

        if self._cache_dir is None:
            return build()
        name = self._name("dense", search.fingerprint())
        return cached_index(self._cache_dir, name, build=build, save=DenseSearch.save_index, load=load)

    def _name(self, kind: str, depends_on: str) -> str:
        digest = hashlib.sha256(f"{depends_on}\0{self._fingerprint}".encode()).hexdigest()
        return f"{kind}-{digest[:32]}"
