"""Loaders of questions and passages: the real MuSiQue file, each kind of bad line, each passage format."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caddie_evals.metrics import exact_match, token_f1
from caddie_evals.questions import WHOLE_LINE, Question, load_musique, load_passages
from caddie_sdk.errors import ConfigError, DataError
from caddie_tools.passages import Passage

SHARED_DATA = Path(os.environ.get("CADDIE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
MUSIQUE = SHARED_DATA / "musique" / "musique_ans_dev_150.jsonl"
CORPUS = SHARED_DATA / "corpus" / "2wiki_corpus_hipporag.jsonl"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.sampled_from(["id", "title", "text", "contents"]), values),
)
json_texts = st.builds(
    lambda value, indent: json.dumps(value, indent=indent).encode(), json_values, st.sampled_from([None, 1])
)


def row(question_id: str = "2hop__1_2", **changes: Any) -> dict[str, Any]:
    """A MuSiQue record in the official form, small; a change of ... removes the field."""
    record = {
        "id": question_id,
        "paragraphs": [
            {"idx": 0, "title": "Ada", "paragraph_text": "Ada wrote notes.", "is_supporting": True},
            {"idx": 1, "title": "Bob", "paragraph_text": "Bob did not.", "is_supporting": False},
            {"idx": 2, "title": "Notes", "paragraph_text": "Notes are on paper.", "is_supporting": True},
        ],
        "question": "What is the work of Ada on?",
        "question_decomposition": [{"id": 1, "answer": "notes"}, {"id": 2, "answer": "paper"}],
        "answer": "paper",
        "answer_aliases": ["on paper", "paper", ""],
        "answerable": True,
    }
    return {field: value for field, value in (record | changes).items() if value is not ...}


def paragraph(**changes: Any) -> dict[str, Any]:
    record = {"idx": 0, "title": "T", "paragraph_text": "Text.", "is_supporting": False} | changes
    return {field: value for field, value in record.items() if value is not ...}


def write(path: Path, *lines: bytes | str | dict[str, Any]) -> Path:
    texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    encoded = [text if isinstance(text, bytes) else text.encode() for text in texts]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def test_a_musique_record_becomes_a_question(tmp_path: Path) -> None:
    loaded = load_musique(write(tmp_path / "m.jsonl", row()))
    assert loaded.problems == []
    assert loaded.questions == [
        Question(
            id="2hop__1_2",
            question="What is the work of Ada on?",
            answers=("paper", "on paper"),
            passages=(
                Passage(id="0", title="Ada", text="Ada wrote notes."),
                Passage(id="1", title="Bob", text="Bob did not."),
                Passage(id="2", title="Notes", text="Notes are on paper."),
            ),
            supporting=("0", "2"),
            hops=2,
        )
    ]


@pytest.mark.parametrize(
    ("record", "hops"),
    [
        (row("4hop1__9_9"), 2),  # the decomposition counts, where there is one
        (row("4hop1__9_9", question_decomposition=...), 4),
        (row("3hop2__9_9", question_decomposition=[]), 3),
        (row("mine", question_decomposition=None), 0),
    ],
)
def test_hops(tmp_path: Path, record: dict[str, Any], hops: int) -> None:
    assert load_musique(write(tmp_path / "m.jsonl", record)).questions[0].hops == hops


def test_what_the_format_leaves_optional(tmp_path: Path) -> None:
    bare = row(
        answer_aliases=...,
        answerable=...,
        paragraphs=[{"paragraph_text": "One."}, {"paragraph_text": "Two."}],
    )
    (question,) = load_musique(write(tmp_path / "m.jsonl", bare)).questions
    assert question.answers == ("paper",)
    assert question.passages == (
        Passage(id="0", title="", text="One."),
        Passage(id="1", title="", text="Two."),
    )
    assert question.supporting == ()


BAD_LINES: list[tuple[str, bytes | str | dict[str, Any], str, str]] = [
    ("not JSON", '{"id": "x", ', WHOLE_LINE, "not JSON"),
    ("endless brackets", "[" * 100_000, WHOLE_LINE, "not usable JSON"),
    ("endless number", "9" * 5_000, WHOLE_LINE, "not usable JSON"),
    ("a list", "[1, 2]", WHOLE_LINE, "not an object but a list"),
    ("null", "null", WHOLE_LINE, "not an object but null"),
    ("a number", "3.5", WHOLE_LINE, "not an object but a number"),
    ("Latin-1", '{"id": "café"}'.encode("latin-1"), WHOLE_LINE, "not UTF-8"),
    ("half a surrogate pair", row("x", question="what \ud800?"), "question", "surrogate"),
    ("no id", row(...), "id", "missing"),  # type: ignore[arg-type]
    ("numeric id", row(7), "id", "not a text but a number"),  # type: ignore[arg-type]
    ("duplicate id", row("first"), "id", "already taken"),
    ("no question", row("x", question=...), "question", "missing"),
    ("blank question", row("x", question=" \t"), "question", "empty"),
    ("question a list", row("x", question=["Who?"]), "question", "not a text but a list"),
    ("no answer", row("x", answer=...), "answer", "missing"),
    ("null answer", row("x", answer=None), "answer", "empty"),
    ("blank answer", row("x", answer=""), "answer", "empty"),
    ("boolean answer", row("x", answer=True), "answer", "not a text but true"),
    ("aliases a text", row("x", answer_aliases="paper"), "answer_aliases", "not a list but a text"),
    ("alias a number", row("x", answer_aliases=["a", 1912]), "answer_aliases[1]", "not a text but a number"),
    ("unanswerable", row("x", answerable=False), "answerable", "only answerable"),
    ("no paragraphs", row("x", paragraphs=...), "paragraphs", "missing or empty"),
    ("empty paragraphs", row("x", paragraphs=[]), "paragraphs", "missing or empty"),
    ("paragraphs an object", row("x", paragraphs={"0": "t"}), "paragraphs", "not a list but an object"),
    ("paragraph a text", row("x", paragraphs=["t"]), "paragraphs[0]", "not an object but a text"),
    (
        "paragraph without text",
        row("x", paragraphs=[paragraph(), paragraph(idx=1, paragraph_text=...)]),
        "paragraphs[1].paragraph_text",
        "missing",
    ),
    (
        "paragraph blank",
        row("x", paragraphs=[paragraph(paragraph_text=" ")]),
        "paragraphs[0].paragraph_text",
        "empty",
    ),
    ("title a number", row("x", paragraphs=[paragraph(title=1984)]), "paragraphs[0].title", "not a text"),
    (
        "idx a text",
        row("x", paragraphs=[paragraph(idx="0")]),
        "paragraphs[0].idx",
        "not a whole number but a text",
    ),
    ("idx a boolean", row("x", paragraphs=[paragraph(idx=True)]), "paragraphs[0].idx", "but true"),
    ("idx twice", row("x", paragraphs=[paragraph(), paragraph()]), "paragraphs[0].idx", "several paragraphs"),
    (
        "is_supporting a number",
        row("x", paragraphs=[paragraph(is_supporting=1)]),
        "paragraphs[0].is_supporting",
        "neither true nor false",
    ),
    ("decomposition a number", row("x", question_decomposition=2), "question_decomposition", "not a list"),
]


@pytest.mark.parametrize(("bad", "field", "problem"), [case[1:] for case in BAD_LINES], ids=[c[0] for c in BAD_LINES])
def test_a_bad_line_is_named_and_the_others_load(
    tmp_path: Path, bad: bytes | str | dict[str, Any], field: str, problem: str
) -> None:
    path = write(tmp_path / "m.jsonl", row("first"), "", bad, "   ", row("last"))
    loaded = load_musique(path)
    assert [question.id for question in loaded.questions] == ["first", "last"]
    (found,) = loaded.problems
    assert (found.path, found.line, found.field) == (str(path), 3, field)
    assert problem in found.problem
    assert f"line 3, field '{field}'" in str(found)


def test_every_bad_line_is_reported_and_none_good_may_remain(tmp_path: Path) -> None:
    loaded = load_musique(write(tmp_path / "m.jsonl", "{", row(question=""), "[]"))
    assert loaded.questions == []
    assert [(problem.line, problem.field) for problem in loaded.problems] == [
        (1, WHOLE_LINE), (2, "question"), (3, WHOLE_LINE)
    ]  # fmt: skip


def test_an_id_is_free_again_when_its_first_line_was_unusable(tmp_path: Path) -> None:
    loaded = load_musique(write(tmp_path / "m.jsonl", row("x", answer=""), row("x"), row("x")))
    assert [question.id for question in loaded.questions] == ["x"]
    assert [(problem.line, problem.field) for problem in loaded.problems] == [(1, "answer"), (3, "id")]


def test_byte_order_mark_crlf_and_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row("a")).encode() + b"\r\n\r\n" + json.dumps(row("b")).encode())
    loaded = load_musique(path)
    assert loaded.problems == []
    assert [question.id for question in loaded.questions] == ["a", "b"]


def test_unicode_line_separators_inside_a_string_do_not_split_it(tmp_path: Path) -> None:
    line = json.dumps(row("a", question="one\u2028two\x85three?"), ensure_ascii=False)
    loaded = load_musique(write(tmp_path / "m.jsonl", line, "{"))
    assert loaded.questions[0].question == "one\u2028two\x85three?"
    assert [problem.line for problem in loaded.problems] == [2]


@pytest.mark.parametrize("load", [load_musique, load_passages])
def test_missing_directory_and_empty_files(tmp_path: Path, load: Any) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl: No such file"):
        load(tmp_path / "absent.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.jsonl: Is a directory"):
        load(str(tmp_path / "folder.jsonl"))
    for content in (b"", b"\n \r\n\n", b"\xef\xbb\xbf"):
        path = tmp_path / "empty.jsonl"
        path.write_bytes(content)
        with pytest.raises(DataError, match="the file is empty") as caught:
            load(path)
        assert (caught.value.path, caught.value.line) == (str(path), 1)


# --- the real file ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def musique() -> list[Question]:
    if not MUSIQUE.is_file():
        pytest.skip(f"no MuSiQue questions at {MUSIQUE}; set CADDIE_SHARED_DATA to the folder of real data")
    loaded = load_musique(MUSIQUE)
    assert loaded.problems == []
    return loaded.questions


def test_real_musique_questions_load_whole(musique: list[Question]) -> None:
    assert len(musique) == len({question.id for question in musique}) == 150
    for question in musique:
        assert [passage.id for passage in question.passages] == [str(index) for index in range(20)]
        assert len(question.supporting) == question.hops == int(question.id[0])
        assert all(passage.title and passage.text for passage in question.passages)
    assert Counter(question.hops for question in musique) == {2: 107, 3: 26, 4: 17}


def test_real_musique_first_question(musique: list[Question]) -> None:
    first = musique[0]
    assert first.id == "2hop__403712_793210"
    assert first.answers == ("Sir Francis Baring, 1st Baronet",)
    assert first.supporting == ("6", "17")
    assert first.passages[0].title == "Peter Baden-Powell, 2nd Baron Baden-Powell"


def test_real_musique_gold_answers_score_full_marks(musique: list[Question]) -> None:
    assert sum(len(question.answers) > 1 for question in musique) > 20  # aliases are read
    for question in musique:
        for answer in question.answers:
            assert exact_match(answer, question.answers), question.id
            assert token_f1(answer, question.answers) == 1.0, question.id
    assert not exact_match(musique[0].answers[0], musique[1].answers)


# --- passages -----------------------------------------------------------------------------------------------


def test_passages_jsonl_in_both_forms(tmp_path: Path) -> None:
    loaded = load_passages(
        write(
            tmp_path / "notes.jsonl",
            {"title": "Ada", "text": "Ada wrote."},
            {"id": "7", "contents": '" Bob (writer) "\nBob wrote.\nMuch.'},
            {"id": 8, "contents": "Unquoted title\nText."},
            "",
            {"id": None, "contents": "Only one line, so it is text."},
            {"id": "t", "title": "Given", "contents": "First line.\nSecond."},
            {"text": "No title.", "title": None},
        )
    )
    assert loaded.problems == []
    assert loaded.passages == [
        Passage(id="notes:1", title="Ada", text="Ada wrote."),
        Passage(id="7", title="Bob (writer)", text="Bob wrote.\nMuch."),
        Passage(id="8", title="Unquoted title", text="Text."),
        Passage(id="notes:4", title="", text="Only one line, so it is text."),
        Passage(id="t", title="Given", text="First line.\nSecond."),
        Passage(id="notes:6", title="", text="No title."),
    ]


@pytest.mark.parametrize(
    ("bad", "field", "problem"),
    [
        ("{", WHOLE_LINE, "not JSON"),
        ('"text"', WHOLE_LINE, "not an object but a text"),
        (b'{"text": "\xff"}', WHOLE_LINE, "not UTF-8"),
        ({"title": "T"}, "text", "missing"),
        ({"title": "T", "text": " "}, "text", "empty"),
        ({"text": 5}, "text", "not a text but a number"),
        ({"text": "t", "title": ["T"]}, "title", "not a text but a list"),
        ({"contents": ""}, "contents", "empty"),
        ({"contents": {}}, "contents", "not a text but an object"),
        ({"contents": '"Only a title"\n \n'}, "contents", "a title without text"),
        ({"id": "first", "text": "again"}, "id", "already taken"),
        ({"id": "", "text": "t"}, "id", "empty"),
        ({"id": False, "text": "t"}, "id", "not a text but false"),
        ({"id": 1.5, "text": "t"}, "id", "not a text but a number"),
    ],
)
def test_a_bad_passage_is_named_and_the_others_load(
    tmp_path: Path, bad: bytes | str | dict[str, Any], field: str, problem: str
) -> None:
    good = {"id": "first", "text": "one"}, {"id": "last", "text": "two"}
    loaded = load_passages(write(tmp_path / "p.jsonl", "", good[0], bad, good[1]))
    assert [passage.id for passage in loaded.passages] == ["first", "last"]
    (found,) = loaded.problems
    assert (found.line, found.field) == (3, field)
    assert problem in found.problem


def test_passages_json_list_names_the_line_of_a_bad_element(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('\n[ {"text": "a, [b]\\n"},\n\n {"title":\n "T"}, 5\n,\n{"id": "x", "contents": "T\\nU"}\n]\n')
    loaded = load_passages(path)
    assert loaded.passages == [
        Passage(id="notes:1", title="", text="a, [b]"),
        Passage(id="x", title="T", text="U"),
    ]
    assert [(problem.line, problem.field) for problem in loaded.problems] == [(4, "text"), (5, WHOLE_LINE)]


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        (b'{"text": "a"}', 1, "not a list"),
        (b'{"text": "a"}\n{"text": "b"}\n', 2, "named .jsonl"),
        (b'[\n{"text": "a"},\n]', 3, "not JSON"),
        (b'[\n"\xff"]', 2, "not UTF-8"),
        (b"[]", 1, "empty"),
        (b" \n", 1, "empty"),
    ],
)
def test_a_json_file_that_is_no_list_is_refused(tmp_path: Path, content: bytes, line: int, problem: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=problem) as caught:
        load_passages(path)
    assert caught.value.line == line


def test_passages_txt_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "Field Notes.TXT"
    path.write_bytes(b"\n# One,\r\nstill one.\r\n \t\r\n\r\nCaf\xc3\xa9.\n\nbad \xff\n\n\xc2\xa0\n\nlast")
    loaded = load_passages(path)
    assert loaded.passages == [
        Passage(id="Field Notes:1", title="Field Notes", text="# One,\nstill one."),
        Passage(id="Field Notes:2", title="Field Notes", text="Café."),
        Passage(id="Field Notes:5", title="Field Notes", text="last"),
    ]
    assert [(problem.line, problem.field) for problem in loaded.problems] == [(8, WHOLE_LINE)]


def test_a_bad_byte_deep_in_a_paragraph_is_named_by_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"good\n\none\ntwo \xff\nthree\n")
    loaded = load_passages(path)
    assert [passage.text for passage in loaded.passages] == ["good"]
    assert [problem.line for problem in loaded.problems] == [4]


def test_passages_md_are_titled_by_the_headings_above(tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    path.write_text(
        "Preface.\n\n# Guide #\n\n### Deep\nBody one.\n\n"
        "## Install C#\n\nBody two.\n# Next\n\nBody three.\n\n"
        "```sh\n# a comment\n\n# another comment\n```\n\n#hashtag\n\n# Last\n"
    )
    loaded = load_passages(path)
    assert loaded.problems == []
    assert [(passage.title, passage.text) for passage in loaded.passages] == [
        ("guide", "Preface."),
        ("Guide > Deep", "Body one."),
        ("Guide > Install C#", "Body two.\n# Next"),
        ("Next", "Body three."),
        ("Next", "```sh\n# a comment"),
        ("Next", "# another comment\n```"),
        ("Next", "#hashtag"),
    ]


def test_a_markdown_file_of_headings_alone_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "outline.md"
    path.write_text("# One\n\n## Two\n")
    with pytest.raises(DataError, match="holds nothing to load"):
        load_passages(path)


@given(
    content=st.binary() | st.text().map(str.encode) | json_texts,
    suffix=st.sampled_from(["jsonl", "json", "txt", "md"]),
)
def test_no_content_breaks_a_loader(tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str) -> None:
    """Whatever the bytes: usable passages, or problems within the file's lines, or one of our own errors."""
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    path.write_bytes(content)
    try:
        loaded = load_passages(path)
    except DataError as error:
        problems = [error]
    else:
        problems = loaded.problems
        assert loaded.passages or problems
        assert all(passage.id and passage.text.strip() == passage.text != "" for passage in loaded.passages)
    assert all(1 <= problem.line <= content.count(b"\n") + 1 for problem in problems)


@pytest.mark.parametrize("name", ["notes.pdf", "notes", "notes.csv"])
def test_another_suffix_is_refused_before_reading(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.jsonl, \.json, \.txt or \.md"):
        load_passages(tmp_path / name)


def test_real_corpus_of_passages(tmp_path: Path) -> None:
    if not CORPUS.is_file():
        pytest.skip(f"no corpus at {CORPUS}; set CADDIE_SHARED_DATA to the folder of real data")
    loaded = load_passages(CORPUS)
    assert loaded.problems == []
    assert len(loaded.passages) == 6119
    assert loaded.passages[0].title == "Teutberga"
    assert loaded.passages[0].text.startswith("Teutberga( died 11 November 875) was a queen")
    assert not any(passage.title.startswith('"') and passage.title.endswith('"') for passage in loaded.passages)
