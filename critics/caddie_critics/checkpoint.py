"""What a trained checkpoint says about itself: `caddie.json`, and the id it is served under.

A checkpoint carries the whole pack it was trained with, so whoever serves or consults it renders exactly what
it has learned to read, with or without the pack's folder (SPEC §2, §5). `caddie.json` lies beside the weights
(beside a GGUF file `X.gguf`, as `X.caddie.json` or `caddie.json`):

    {"format": 1,
     "pack": {"name": "search", "version": "1.0", "system": "...", "cue": "...", ...},
     "pack_hash": "8513cd2fb525bd75", "renderer_version": 1,
     "base_model": "Qwen/Qwen3-4B-Instruct-2507",
     "trained_with": {"steps": 100}}

Over the network the same check is made by the served model id, `name@pack-name-hash8`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from caddie_critics.packs import NAME_PATTERN, Pack, PackName, TaskTag, first_problem, list_packs, load_pack
from caddie_sdk.errors import PackError, PackMismatch
from caddie_sdk.render import RENDERER_VERSION, CriticPrompt

FILE, FORMAT = "caddie.json", 1

PackSource = Pack | str | os.PathLike[str]
"""A pack, a built-in pack's name, a pack's folder, or a checkpoint that carries one."""


def find_pack(source: PackSource) -> Pack:
    """The pack that is meant.

    Raises:
        PackError: there is none, or it is unusable.
    """
    if isinstance(source, Pack):
        return source
    if isinstance(source, str) and source in list_packs():
        return load_pack(source)
    facts = read_caddie_json(Path(source).expanduser())
    return load_pack(source) if facts is None else pack_from_checkpoint(facts)


# ------------------------------------------------------------------ caddie.json


def write_caddie_json(
    checkpoint: str | os.PathLike[str], pack: Pack, *, base_model: str | None = None, **trained_with: Any
) -> Path:
    """Write `caddie.json` beside a checkpoint's weights, whole or not at all.

    Args:
        checkpoint: folder of the weights, or a GGUF file (then `X.caddie.json` is written).
        pack: the pack the critic was trained with.
        base_model: what it was trained from.
        trained_with: anything else worth keeping (steps, seed, commit); must be JSON.

    Returns:
        The file written.

    Raises:
        PackError: a fact is not JSON, the pack is unusable, or the file cannot be written.
    """
    path = Path(checkpoint)
    target = path.with_suffix(f".{FILE}") if _is_gguf(path) else path / FILE
    facts = {
        "format": FORMAT,
        "pack": _dump_pack(pack),
        "pack_hash": pack.hash,
        "renderer_version": RENDERER_VERSION,
        "base_model": base_model,
        "trained_with": trained_with,
    }
    _checked(facts, f"pack {pack.name!r}")
    try:
        text = json.dumps(facts, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PackError(f"{target}: a fact about the training is not JSON ({error}); pass plain values") from None
    try:
        _write_atomically(target, text + "\n")
    except OSError as error:
        raise PackError(f"{target} cannot be written: {error.strerror or error}") from error
    return target


def read_caddie_json(checkpoint: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The facts beside a checkpoint's weights, or None when it carries none.

    Args:
        checkpoint: folder of the weights, a GGUF file, or the JSON file itself.

    Raises:
        PackError: the file is there and unusable; names file and field.
    """
    path = next((path for path in _places(Path(checkpoint)) if path.is_file()), None)
    if path is None:
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PackError(f"{path} cannot be read as JSON: {error}") from None
    return _checked(raw, f"{path}, written by another version of Caddie or edited")


def pack_from_checkpoint(facts: Mapping[str, Any]) -> Pack:
    """The pack a checkpoint was trained with, from what `read_caddie_json` gave.

    Raises:
        PackError: the facts are not those of a checkpoint.
    """
    data = dict(_checked(facts, "checkpoint facts")["pack"])
    version, description = data.pop("version"), data.pop("description")
    action_formats = tuple(data.pop("action_formats"))
    return Pack(CriticPrompt(**data), version, description, action_formats, "checkpoint")


def verify_pack(checkpoint_facts: Mapping[str, Any], pack: Pack, allow_mismatch: bool = False) -> str | None:
    """Make sure that a checkpoint was trained with this pack and this renderer.

    Returns:
        None when all is well; a warning when it is not, and `allow_mismatch` says to go on.

    Raises:
        PackMismatch: it was trained with another one. Names both hashes, the fields that differ, the renderer
            versions and the way around.
        PackError: the facts are not those of a checkpoint.
    """
    facts = _checked(checkpoint_facts, "checkpoint facts")
    if facts["pack_hash"] == pack.hash:
        return None
    reasons = _differences(facts, pack)
    message = (
        f"the checkpoint was trained with pack {facts['pack']['name']!r} (hash {facts['pack_hash']}), and the pack at "
        f"hand is {pack.name!r} (hash {pack.hash}): {'; '.join(reasons)}. The critic would be shown prompts it was not "
        "trained on. Use the pack that the checkpoint carries, or pass --allow-mismatch to go on all the same"
    )
    return mismatch(message, allow_mismatch)


def mismatch(message: str, allowed: bool) -> str:
    """The message as a warning when mismatches are allowed, else as `PackMismatch`."""
    if not allowed:
        raise PackMismatch(message)
    return message


# ------------------------------------------------------------------ served model ids

_SERVED = re.compile(rf"(?P<name>.+)@(?P<pack>{NAME_PATTERN})-(?P<hash>[0-9a-f]{{8}})", re.DOTALL)
# llama.cpp splits aliases at commas, and ids travel in URLs, logs and shell commands.
_AWKWARD = re.compile(r"[\s,\x00-\x1f\x7f]+")


def served_id(name: str, pack: Pack) -> str:
    """The model id under which a critic is served: `name@pack-name-hash8`.

    Blanks, commas and control characters in the name become `_`; an empty name becomes `critic`.

    Raises:
        PackError: the pack's name cannot be part of an id.
    """
    if not re.fullmatch(NAME_PATTERN, pack.name):
        raise PackError(f"pack name {pack.name!r}: use lower-case letters, digits, '.', '_' and '-', at most 64")
    return f"{_AWKWARD.sub('_', name) or 'critic'}@{pack.name}-{pack.hash[:8]}"


def parse_served_id(model_id: str) -> tuple[str, str, str] | None:
    """(name, pack name, first 8 digits of the pack's hash) of a served id; None of any other model id."""
    match = _SERVED.fullmatch(model_id)
    return (match["name"], match["pack"], match["hash"]) if match else None


# ------------------------------------------------------------------ inside


# Not stripped: what a critic was trained on is kept to the letter.
_Words = Annotated[str, StringConstraints(pattern=r"\S")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _PackRecord(_Record):
    name: PackName
    version: str
    description: str = ""
    action_formats: list[str] = Field(default_factory=list)
    system: _Words
    cue: _Words
    feedback: Literal["sections", "feedback"]
    task_tag: TaskTag
    show_system: bool
    show_tools: bool
    max_tokens: int | None = Field(default=None, gt=0)
    max_input_tokens: int | None = Field(default=None, gt=0)


class _Facts(_Record):
    format: Literal[1]
    pack: _PackRecord
    pack_hash: str = Field(pattern=r"^[0-9a-f]{16}$")
    renderer_version: int = Field(ge=1)
    base_model: str | None = None
    trained_with: dict[str, Any] = Field(default_factory=dict)


def _checked(raw: Any, where: str) -> dict[str, Any]:
    try:
        return _Facts.model_validate(raw).model_dump()
    except ValidationError as error:
        raise PackError(f"{where}: {first_problem(error)}") from None


def _dump_pack(pack: Pack) -> dict[str, Any]:
    return {
        **asdict(pack.prompt),
        "version": pack.version,
        "description": pack.description,
        "action_formats": list(pack.action_formats),
    }


def _differences(facts: Mapping[str, Any], pack: Pack) -> list[str]:
    """Why two hashes differ, in words."""
    trained = facts["pack"]
    names = [field.name for field in fields(CriticPrompt) if field.name not in ("max_tokens", "max_input_tokens")]
    different = [name for name in names if trained[name] != getattr(pack.prompt, name)]
    reasons = [f"different fields: {', '.join(different)}"] if different else []
    renderer = facts["renderer_version"]
    if renderer != RENDERER_VERSION:
        reasons.append(f"renderer version {renderer} then, {RENDERER_VERSION} now")
    else:
        reasons.append(f"renderer version {RENDERER_VERSION} both times")
    if not different and renderer == RENDERER_VERSION:
        reasons.append(f"no field differs, so {FILE} was edited by hand")
    return reasons


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _places(path: Path) -> list[Path]:
    if _is_gguf(path):
        return [path.with_suffix(f".{FILE}"), path.parent / FILE]
    return [path] if path.suffix == ".json" and not path.is_dir() else [path / FILE]


def _write_atomically(target: Path, text: str) -> None:
    """Through a neighbour and a rename: a killed process leaves the old file or the new one, never half of one."""
    neighbour = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with neighbour.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        neighbour.replace(target)
    except BaseException:
        neighbour.unlink(missing_ok=True)
        raise
