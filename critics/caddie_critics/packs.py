"""Critic packs: what makes a critic pluggable (SPEC §2).

A pack is a folder of three files: `critic.toml` (the manifest), `system.md` (who the critic is) and `cue.md`
(what it is asked at the end of each user message). The form of the answer is not in the prompts: it belongs
to the feedback format and is added here, so that prompt, grammar and parser cannot drift apart.

    pack = load_pack("search")               # one of list_packs()
    pack = load_pack("./my-pack")            # or a folder of your own
    messages = render(state, pack.prompt)    # what the critic is shown

The manifest:

    name = "search"                  # enters the hash and the served model id
    version = "1.0"                  # for people; does not enter the hash
    description = "..."
    feedback = "sections"            # or "feedback"
    task_tag = "task"                # or "query", as in CAFE
    show_system = false              # whether the critic sees the agent's system prompt
    show_tools = false               # and the names and descriptions of its tools
    action_formats = ["caddie"]      # what it was written for; informational
    [limits]                         # of one consultation, in tokens; do not enter the hash
    max_tokens = 512
    max_input_tokens = 7680
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from caddie_sdk.critique import FeedbackFormat, feedback_format
from caddie_sdk.errors import PackError
from caddie_sdk.render import CriticPrompt

MANIFEST, SYSTEM, CUE = "critic.toml", "system.md", "cue.md"

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
"""Pack names travel inside served model ids (`checkpoint.served_id`), so they are kept plain."""

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
PackName = Annotated[str, StringConstraints(pattern=rf"^{NAME_PATTERN}$")]
# The renderer escapes the tags it knows, so a block named otherwise could be closed by the task's own text.
TaskTag = Literal["task", "query"]


@dataclass(frozen=True, slots=True)
class Pack:
    """A critic pack, read and checked.

    Attributes:
        prompt: everything that shapes what the critic is shown; the one input of `caddie_sdk.render.render`.
        version: the author's own numbering.
        description: one line for people.
        action_formats: the agents' action formats it was written for.
        origin: where it was read from, for messages.
    """

    prompt: CriticPrompt
    version: str
    description: str = ""
    action_formats: tuple[str, ...] = ()
    origin: str = ""

    @property
    def name(self) -> str:
        """The pack's name."""
        return self.prompt.name

    @property
    def hash(self) -> str:
        """16 hex digits over everything that shapes a prompt; limits, version and description stay out."""
        return self.prompt.hash

    @property
    def form(self) -> FeedbackFormat:
        """The wire format of its critiques."""
        return feedback_format(self.prompt.feedback)


def load_pack(source: str | os.PathLike[str]) -> Pack:
    """Read a pack: one that comes with Caddie by its name, or any folder by its path.

    A name of `list_packs()` always means the built-in pack; write `./search` for a folder of that name.

    Raises:
        PackError: there is no such pack, or a file of it is missing, empty or wrong. Names file and field.
    """
    if isinstance(source, str) and source in list_packs():
        return _read(_builtin() / source, f"built-in pack {source!r}")
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise PackError(
            f"there is no critic pack {os.fspath(source)!r}: it is neither a folder nor one of the built-in packs "
            f"({', '.join(list_packs())})"
        )
    return _read(folder, str(folder))


def list_packs() -> tuple[str, ...]:
    """Names of the packs that come with Caddie."""
    return tuple(sorted(entry.name for entry in _builtin().iterdir() if entry.joinpath(MANIFEST).is_file()))


def compose_system(text: str, feedback: str) -> str:
    """The whole system prompt: the author's words, then the form of the answer.

    The only place that joins the two.

    Raises:
        ConfigError: there is no feedback format of that name.
    """
    return f"{text.strip()}\n\n{feedback_format(feedback).instruction}"


def first_problem(error: ValidationError) -> str:
    """What pydantic found first, as `field 'limits.max_tokens': ...`."""
    found = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in found["loc"]) or "(all of it)"
    message = "there is no such field" if found["type"] == "extra_forbidden" else found["msg"]
    return f"field {where!r}: {message}"


# ------------------------------------------------------------------ inside


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Limits(_Strict):
    max_tokens: int | None = Field(default=None, gt=0)
    max_input_tokens: int | None = Field(default=None, gt=0)


class _Manifest(_Strict):
    name: PackName
    version: Text
    description: Text
    feedback: Literal["sections", "feedback"] = "sections"
    task_tag: TaskTag = "task"
    show_system: bool = False
    show_tools: bool = False
    action_formats: list[Text] = Field(default_factory=list)
    limits: _Limits = Field(default_factory=_Limits)


def _builtin() -> Traversable:
    return files("caddie_critics") / "packs"


def _read(folder: Traversable, origin: str) -> Pack:
    manifest = _manifest(folder, origin)
    system, cue = _text(folder, SYSTEM, origin), _text(folder, CUE, origin)
    prompt = CriticPrompt(
        name=manifest.name,
        system=compose_system(system, manifest.feedback),
        cue=cue,
        feedback=manifest.feedback,
        task_tag=manifest.task_tag,
        show_system=manifest.show_system,
        show_tools=manifest.show_tools,
        max_tokens=manifest.limits.max_tokens,
        max_input_tokens=manifest.limits.max_input_tokens,
    )
    return Pack(prompt, manifest.version, manifest.description, tuple(manifest.action_formats), origin)


def _manifest(folder: Traversable, origin: str) -> _Manifest:
    text = _text(folder, MANIFEST, origin)
    try:
        return _Manifest.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PackError(f"{origin}: {MANIFEST} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise PackError(
            f"{origin}: {MANIFEST}, {first_problem(error)}. The fields are {', '.join(_Manifest.model_fields)} "
            f"and, under [limits], {', '.join(_Limits.model_fields)}"
        ) from None


def _text(folder: Traversable, name: str, origin: str) -> str:
    """A file's text, stripped, with `\\n` line ends, so that the hash is the same on every system."""
    try:
        text = folder.joinpath(name).read_text(encoding="utf-8-sig")
    except (FileNotFoundError, IsADirectoryError):
        raise PackError(
            f"{origin}: the file {name} is missing; a pack is a folder with {MANIFEST}, {SYSTEM} and {CUE}"
        ) from None
    except UnicodeDecodeError as error:
        raise PackError(f"{origin}: {name} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise PackError(f"{origin}: {name} cannot be read: {error.strerror or error}") from None
    if not text.strip():
        raise PackError(f"{origin}: {name} is empty; it must say {_MUST_SAY[name]}")
    return text.strip()


_MUST_SAY = {
    MANIFEST: "what the pack is called and how it is shown",
    SYSTEM: "who the critic is and what it must not do",
    CUE: "what the critic is asked for at the end of each message",
}
