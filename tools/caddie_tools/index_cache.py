"""Indexes kept on disk: written whole or not at all, checked when read, rebuilt when damaged."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from caddie_sdk.errors import ConfigError

T = TypeVar("T")

_MANIFEST = "manifest.json"
_log = logging.getLogger(__name__)


def cached_index(
    cache_dir: Path,
    name: str,
    *,
    build: Callable[[], T],
    save: Callable[[T, Path], None],
    load: Callable[[Path], T],
) -> T:
    """Load the index `name` from `cache_dir`, or build it and keep it there.

    Each index is a folder with a manifest of its files' SHA-256 sums; it appears by one rename, so that
    neither a kill nor a second process leaves or sees half an index. A folder that fails its sums, or that
    `load` cannot read, is replaced.

    Args:
        name: must change with everything the index depends on.
        save: writes files into the empty folder it is given.
        load: reads them; OSError, ValueError, KeyError, TypeError and RuntimeError mean "unreadable".

    Raises:
        ConfigError: the cache folder cannot be made. One that is merely full costs a warning, not the index.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the index cache folder {cache_dir}: {error}") from error
    folder = cache_dir / name
    if folder.exists():
        try:
            _verify(folder)
            return load(folder)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            _log.warning("cached index %s is unusable (%s): building it again", folder, error)
    index = build()
    try:
        _store(folder, lambda target: save(index, target))
    except (OSError, RuntimeError) as error:  # faiss reports a failed write as RuntimeError
        _log.warning("cannot keep the index in %s (%s): going on without", folder, error)
    return index


def _sums(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name != _MANIFEST:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _verify(folder: Path) -> None:
    manifest = json.loads((folder / _MANIFEST).read_text("utf-8"))
    if manifest["sha256"] != _sums(folder):
        raise ValueError("its files do not match its manifest")


def _store(folder: Path, save: Callable[[Path], None]) -> None:
    # Not tempfile.mkdtemp: its folders are private, and a shared cache should follow the umask.
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        save(draft)
        (draft / _MANIFEST).write_text(json.dumps({"sha256": _sums(draft)}, indent=1), "utf-8")
        try:
            draft.rename(folder)
        except OSError:
            # A damaged index, or one another process has just finished: either way ours is good.
            _replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _replace(draft: Path, folder: Path) -> None:
    aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    os.rename(folder, aside)
    try:
        draft.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
