"""Questions and passages, read from the files they are published in.

    loaded = load_musique("musique_ans_v1.0_dev.jsonl")
    for problem in loaded.problems:
        print(problem)  # …dev.jsonl, line 17, field 'answer': missing
    for question in loaded.questions:
        ...

A bad record never hides the good ones: it becomes a `DataError` in `problems` that names file, line and
field (the first one found bad), and everything else still loads. What is wrong with a whole file is raised.
"""

from __future__ import annotations

import codecs
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from caddie_sdk.errors import ConfigError, DataError
from caddie_tools.passages import Passage

WHOLE_LINE = "(line)"
"""The `DataError.field` of a problem that no single field has: not JSON, not an object, not UTF-8."""

PathLike: TypeAlias = str | os.PathLike[str]
_Source = TypeVar("_Source")
_Item = TypeVar("_Item", "Question", Passage)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its reference answers and the passages that come with it.

    Attributes:
        id: unique within its data set.
        question: what the agent is asked.
        answers: accepted answers, the main one first, no duplicates; empty when unknown.
        passages: what the agent may search in the attached setting; ids are unique within the question.
        supporting: ids of the passages that the answer rests on, in the order of `passages`.
        hops: reasoning steps the question is composed of; 0 when the data does not say.
    """

    id: str
    question: str
    answers: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()
    supporting: tuple[str, ...] = ()
    hops: int = 0


@dataclass(frozen=True, slots=True)
class LoadedQuestions:
    """The usable questions of a file in file order, and one problem per unusable line."""

    questions: list[Question]
    problems: list[DataError]


@dataclass(frozen=True, slots=True)
class LoadedPassages:
    """The usable passages of a file in file order, and one problem per unusable record."""

    passages: list[Passage]
    problems: list[DataError]


def load_musique(path: PathLike) -> LoadedQuestions:
    """Read the official MuSiQue-Ans JSONL (Trivedi et al., 2022), v1.0.

    A passage's id is its `idx` as text, so `supporting` can be written back as `predicted_support_idxs`.
    `hops` is the length of `question_decomposition`, or else the number the id starts with ("3hop1__…").
    Questions marked unanswerable (MuSiQue-Full) are problems: exact match cannot score them.

    Raises:
        ConfigError: the file cannot be opened.
        DataError: the file is empty.
    """
    file = Path(path)
    questions, problems = _collect(file, _lines(file), lambda raw, _: _musique_question(_json_object(raw)))
    return LoadedQuestions(questions, problems)


def load_passages(path: PathLike) -> LoadedPassages:
    """Read a user's own passages; the file's suffix says how.

    - `.jsonl`: one object a line, `{"text", "title"?, "id"?}` or Search-R1's `{"contents", "id"?}`, which
      `Passage.from_contents` takes apart unless a "title" stands beside it.
    - `.json`: a list of such objects. Problems name the line on which the object starts.
    - `.txt`, `.md`: paragraphs separated by blank lines, titled by the file's name; in `.md` by the headings
      above them ("Guide > Install"), which are not passages themselves.

    A passage without an id gets the file's name and the number of its record or paragraph: "notes:3".

    Raises:
        ConfigError: the file cannot be opened, or has another suffix.
        DataError: the file is empty, or is a `.json` that is not a list.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix == ".jsonl":
        found = _collect(file, _lines(file), lambda raw, n: _passage(_json_object(raw), f"{file.stem}:{n}"))
    elif suffix == ".json":
        found = _collect(file, _list_elements(file), lambda row, n: _passage(_object(row), f"{file.stem}:{n}"))
    elif suffix in {".txt", ".md"}:
        outline = _Outline(file.stem, headings=suffix == ".md")
        found = _collect(file, _paragraphs(file), lambda raw, n: outline.passage(_decode(raw), f"{file.stem}:{n}"))
    else:
        raise ConfigError(f"cannot read passages from {file}: its name must end in .jsonl, .json, .txt or .md")
    return LoadedPassages(*found)


# --- one record after another -------------------------------------------------------------------------------


class _Unusable(Exception):
    """A record cannot be used; becomes a `DataError` once file and line are known."""

    def __init__(self, field: str, problem: str, line_offset: int = 0) -> None:
        super().__init__(problem)
        self.field, self.problem, self.line_offset = field, problem, line_offset


def _collect(
    file: Path, records: Iterable[tuple[int, _Source]], build: Callable[[_Source, int], _Item | None]
) -> tuple[list[_Item], list[DataError]]:
    """Build an item of each (line, record). `build` also gets the number of the record; None is skipped."""
    items: dict[str, _Item] = {}
    problems: list[DataError] = []
    for number, (line, record) in enumerate(records, start=1):
        try:
            item = build(record, number)
            if item is not None and item.id in items:
                raise _Unusable("id", f"{item.id!r} is already taken by an earlier record")
        except _Unusable as bad:
            problems.append(DataError(str(file), line + bad.line_offset, bad.field, bad.problem))
            continue
        if item is not None:
            items[item.id] = item
    if not items and not problems:
        raise DataError(str(file), 1, WHOLE_LINE, "the file is empty: it holds nothing to load")
    return list(items.values()), problems


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers; bytes, so that one bad line spoils no other."""
    for number, line in enumerate(_read(file).split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _paragraphs(file: Path) -> Iterator[tuple[int, bytes]]:
    """Runs of lines that are not blank, with the number of their first line."""
    numbered = enumerate(_read(file).split(b"\n"), start=1)
    for blank, run in itertools.groupby(numbered, key=lambda row: not row[1].strip()):
        if not blank:
            rows = list(run)
            yield rows[0][0], b"\n".join(line for _, line in rows)


def _list_elements(file: Path) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON list, with the number of the line each starts on."""
    try:
        text = _decode(_read(file))
        if not text.strip():
            return
        if not isinstance(_parse(text), list):
            raise _Unusable(WHOLE_LINE, "not a list of passages")
    except _Unusable as bad:
        hint = " (a file with one object a line is named .jsonl)"
        raise DataError(str(file), 1 + bad.line_offset, bad.field, bad.problem + hint) from None
    decoder = json.JSONDecoder()
    line, seen, at = 1, 0, _skip(text, 0) + 1  # past the opening bracket
    while text[at := _skip(text, at)] != "]":
        line, seen = line + text.count("\n", seen, at), at
        element, at = decoder.raw_decode(text, at)
        yield line, element


def _skip(text: str, at: int) -> int:
    """The position after any blanks and commas."""
    while text[at] in " \t\r\n,":
        at += 1
    return at


# --- what a record says -------------------------------------------------------------------------------------


def _musique_question(row: dict[str, Any]) -> Question:
    question_id, question = _text(row, "id"), _text(row, "question")
    answers = _answers(row)
    if row.get("answerable", True) is not True:
        raise _Unusable("answerable", "not true: only answerable questions (MuSiQue-Ans) can be scored")
    rows = _list(row, "paragraphs")
    if not rows:
        raise _Unusable("paragraphs", "missing or empty")
    paragraphs = [_musique_paragraph(item, position) for position, item in enumerate(rows)]
    counts = Counter(passage.id for passage, _ in paragraphs)
    for position, (passage, _) in enumerate(paragraphs):
        if counts[passage.id] > 1:
            raise _Unusable(f"paragraphs[{position}].idx", f"{passage.id} stands on several paragraphs")
    return Question(
        id=question_id,
        question=question,
        answers=answers,
        passages=tuple(passage for passage, _ in paragraphs),
        supporting=tuple(passage.id for passage, supports in paragraphs if supports),
        hops=len(_list(row, "question_decomposition")) or _hops_in_id(question_id),
    )


def _musique_paragraph(row: object, position: int) -> tuple[Passage, bool]:
    """The passage and whether the answer rests on it."""
    prefix = f"paragraphs[{position}]"
    if not isinstance(row, dict):
        raise _Unusable(prefix, f"not an object but {_kind(row)}")
    index, supports = row.get("idx", position), row.get("is_supporting", False)
    if not isinstance(index, int) or isinstance(index, bool):
        raise _Unusable(f"{prefix}.idx", f"not a whole number but {_kind(index)}")
    if not isinstance(supports, bool):
        raise _Unusable(f"{prefix}.is_supporting", f"neither true nor false but {_kind(supports)}")
    title = _text(row, "title", prefix + ".", optional=True)
    return Passage(id=str(index), title=title, text=_text(row, "paragraph_text", prefix + ".")), supports


def _answers(row: dict[str, Any]) -> tuple[str, ...]:
    """The answer and its aliases, each once; blank aliases, which could never match, are left out."""
    answers = [_text(row, "answer")]
    for position, alias in enumerate(_list(row, "answer_aliases")):
        name = f"answer_aliases[{position}]"
        answers.append(_text({name: alias}, name, optional=True))
    return tuple(dict.fromkeys(filter(None, answers)))


def _hops_in_id(question_id: str) -> int:
    found = re.match(r"(\d{1,3})hop", question_id)
    return int(found[1]) if found else 0


def _passage(row: dict[str, Any], default_id: str) -> Passage:
    """A passage from `{"text", "title"}` or from `{"contents"}`."""
    given = row.get("id")
    if given is None:
        given = default_id
    elif isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    passage_id, title = _text({"id": given}, "id"), _text(row, "title", optional=True)
    if "text" in row or "contents" not in row:
        return Passage(id=passage_id, title=title, text=_text(row, "text"))
    contents = _text(row, "contents")
    if title:
        return Passage(id=passage_id, title=title, text=contents)
    passage = Passage.from_contents(passage_id, contents)
    if not passage.text.strip():
        raise _Unusable("contents", "a title without text")
    return Passage(id=passage_id, title=passage.title.strip(), text=passage.text.strip())


class _Outline:
    """Titles the paragraphs of a text file by the Markdown headings above them, or by the file's name."""

    _HEADING = re.compile(r" {0,3}(#{1,6})[ \t]+(\S.*)")

    def __init__(self, name: str, headings: bool) -> None:
        self._name, self._reads_headings = name, headings
        self._above: list[tuple[int, str]] = []  # (level, heading), outermost first
        self._fenced = False  # inside a ``` code block, where # starts a comment

    def passage(self, paragraph: str, passage_id: str) -> Passage | None:
        """None for headings alone. A heading below other text stays in the text and titles what follows."""
        title, body = "", list[str]()
        for line in paragraph.replace("\r\n", "\n").split("\n"):
            is_heading = self._reads_headings and self._enter(line)
            if is_heading and not body:
                continue
            title = title if body else " > ".join(text for _, text in self._above) or self._name
            body.append(line)
        text = "\n".join(body).strip()
        return Passage(id=passage_id, title=title, text=text) if text else None

    def _enter(self, line: str) -> bool:
        """Take note of a heading or a code fence; says whether the line is a heading."""
        if line.lstrip().startswith(("```", "~~~")):
            self._fenced = not self._fenced
        heading = None if self._fenced else self._HEADING.match(line)
        if not heading:
            return False
        level, text = len(heading[1]), heading[2].strip()
        if (closed := text.rstrip("#")) != closed.rstrip():  # "## Title ##"
            text = closed.rstrip() or text
        self._above = [*((depth, above) for depth, above in self._above if depth < level), (level, text)]
        return True


# --- single values ------------------------------------------------------------------------------------------


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _Unusable(WHOLE_LINE, "not UTF-8 text", raw.count(b"\n", 0, error.start)) from None


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"not JSON: {error.msg} at column {error.colno}"
        raise _Unusable(WHOLE_LINE, where, error.lineno - 1) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets without end
        raise _Unusable(WHOLE_LINE, f"not usable JSON: {error}") from None


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Unusable(WHOLE_LINE, f"not an object but {_kind(value)}")
    return value


def _json_object(raw: bytes) -> dict[str, Any]:
    return _object(_parse(_decode(raw)))


def _text(row: dict[str, Any], field: str, prefix: str = "", optional: bool = False) -> str:
    """A stripped string; optional ones may be absent, null or blank and are then ""."""
    value = row.get(field)
    if value is None:
        value = ""
    if not isinstance(value, str):
        raise _Unusable(prefix + field, f"not a text but {_kind(value)}")
    if not value.strip() and not optional:
        raise _Unusable(prefix + field, "empty" if field in row else "missing")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Unusable(prefix + field, "holds half a surrogate pair, which is no text") from None
    return value.strip()


def _list(row: dict[str, Any], field: str) -> list[Any]:
    """A list; [] if absent or null."""
    value = row.get(field)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Unusable(field, f"not a list but {_kind(value)}")
    return value


def _kind(value: object) -> str:
    """What JSON calls the type of a value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
    return names.get(type(value), "a number")
