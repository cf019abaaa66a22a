"""The BM25 index behind `PassageSearch` and `CorpusSearch`: bm25s, with stable ties and no progress bars."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

# One-letter words count: "Vitamin C", "Malcolm X", "Apollo 8". bm25s's own pattern drops them.
_WORD = r"(?u)\b\w+\b"
_PARAMS_FILE = "params.index.json"

#: Enters the cache key: change it when the words an index holds would change.
FORMAT = f"bm25-1;{_WORD};bm25s-{bm25s.__version__}"


def _fold(text: str) -> str:
    """Drop accents, so that "Pal Gabor" finds "Pál Gábor"; agents often leave them out."""
    if text.isascii():
        return text
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def _tokenize(texts: Sequence[str], *, ids: bool) -> Any:
    folded = [_fold(text) for text in texts]
    return bm25s.tokenize(folded, token_pattern=_WORD, stopwords="en", return_ids=ids, show_progress=False)


class Bm25Index:
    """BM25 (Lucene's variant, k1 1.5, b 0.75, English stopwords, accents folded, no stemming) over texts.

    Robertson & Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond"; Lù 2024, "BM25S".
    """

    def __init__(self, scorer: Any, size: int) -> None:
        self._scorer = scorer  # None when no text holds a word: bm25s cannot index that
        self.size = size

    @classmethod
    def build(cls, texts: Sequence[str]) -> Bm25Index:
        """Index the texts; position i of the index is texts[i]."""
        tokens = _tokenize(texts, ids=True)
        if not tokens.vocab:
            return cls(None, len(texts))
        scorer = bm25s.BM25()
        scorer.index(tokens, create_empty_token=False, show_progress=False)
        return cls(scorer, len(texts))

    def save(self, folder: Path) -> None:
        """Write plain arrays and JSON into an existing folder; nothing is pickled."""
        if self._scorer is not None:
            self._scorer.save(folder, allow_pickle=False, show_progress=False)

    @classmethod
    def load(cls, folder: Path, size: int) -> Bm25Index:
        """Read what `save` wrote.

        Raises:
            ValueError: the index is of another number of texts than `size`, or an array is unreadable.
            OSError: a file is missing.
        """
        if not (folder / _PARAMS_FILE).exists():
            return cls(None, size)
        scorer = bm25s.BM25.load(folder, allow_pickle=False, show_progress=False)
        if scorer.scores["num_docs"] != size:
            raise ValueError(f"{folder} indexes {scorer.scores['num_docs']} texts, not {size}")
        return cls(scorer, size)

    def top(self, query: str, k: int) -> list[tuple[int, float]]:
        """The best k positions with their scores, best first, ties by position; only scores above 0."""
        k = min(k, self.size)
        if self._scorer is None or k < 1:
            return []
        token_ids = self._scorer.get_tokens_ids(_tokenize([query], ids=False)[0])
        if not token_ids:
            return []
        scores = self._scorer.get_scores_from_ids(token_ids)
        # bm25s's own selection breaks ties arbitrarily. Take everything that reaches the k-th best score,
        # in order of position, and sort that stably.
        threshold = np.partition(scores, self.size - k)[self.size - k]
        reached = np.flatnonzero((scores >= threshold) & (scores > 0))
        best = reached[np.argsort(-scores[reached], kind="stable")][:k]
        return [(int(i), float(scores[i])) for i in best]
