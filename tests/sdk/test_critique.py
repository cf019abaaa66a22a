"""The strict parsers of critiques, the same in training and in serving (SPEC §2, §5)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caddie_sdk.critique import FEEDBACK, FEEDBACK_FORMATS, SECTIONS, Critique, feedback_format, parse_critique
from caddie_sdk.errors import ConfigError
from caddie_sdk.usage import Usage

GOOD = "Analysis: The birthplace is missing.\nAdvices for next steps: Search for it."
PARTS = ("The birthplace is missing.", "Search for it.")


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"  \n{GOOD}\n\n",
        "Analysis:The birthplace is missing.\nAdvices for next steps:Search for it.",
        "Analysis:\nThe birthplace is missing.\n\n  Advices for next steps:\nSearch for it.",
        f"<think>Let me see.\nAnalysis: no</think>\n{GOOD}",
        f"<think>a</think> <think>b</think>{GOOD}<think>done</think>",
    ],
)
def test_two_sections_and_nothing_else(text: str) -> None:
    assert SECTIONS.parse(text) == PARTS


def test_a_section_may_have_many_lines_and_mention_the_words() -> None:
    text = (
        "Analysis: First line.\n- a point\n\n- my Analysis: of it, and Advices for next steps: later\n"
        "Advices for next steps:\n1. one\n2. see the Analysis: above"
    )
    parsed = SECTIONS.parse(text)
    assert parsed is not None
    assert parsed[0].startswith("First line.\n- a point\n\n- my Analysis: of it")
    assert parsed[1] == "1. one\n2. see the Analysis: above"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "Looks good to me.",
        "Analysis: only",
        "Advices for next steps: only",
        "Analysis:\nAdvices for next steps: Search.",
        "Analysis: Missing.\nAdvices for next steps:",
        "Analysis: Missing.\nAdvices for next steps:  \n ",
        "Analysis:\n \nAdvices for next steps:\n",
        "Advices for next steps: Search.\nAnalysis: Missing.",
        f"Sure, here it is:\n{GOOD}",
        f"# Review\n{GOOD}",
        f"{GOOD}\nAnalysis: And again.",
        f"{GOOD}\nAdvices for next steps: And again.",
        f"{GOOD}\n  Analysis: And again.",
        f"{GOOD}\n{GOOD}",
        "Analysis: a\nAnalysis: b\nAdvices for next steps: c",
        "Analysis: a Advices for next steps: b",
        "analysis: a\nadvices for next steps: b",
        "Analysis: a\nAdvice for next steps: b",
        "**Analysis:** a\n**Advices for next steps:** b",
        "Analysis : a\nAdvices for next steps : b",
        f"<think>{GOOD}",
        f"<think>never closed\n{GOOD}",
        f"{GOOD} <think>and one more thing",
        "Analysis: a <think>\nAdvices for next steps: b",
        "<think>a</think><think>b\n" + GOOD,
        f"<feedback>{GOOD}</feedback>",
        "<think>all of it</think>",
    ],
)
def test_anything_else_is_malformed(text: str) -> None:
    assert SECTIONS.parse(text) is None
    critique = parse_critique(text, SECTIONS)
    assert critique.status == "malformed"
    assert not critique.ok
    assert (critique.analysis, critique.advice, critique.raw) == ("", "", text)
    assert critique.detail == ("empty" if not text.strip() else "not in the 'sections' format")


def test_the_feedback_format() -> None:
    assert FEEDBACK.parse("<feedback> Look\nagain. </feedback>") == ("", "Look\nagain.")
    assert FEEDBACK.parse("<think>t</think>\n<feedback>a < b</feedback>\n") == ("", "a < b")
    for text in (
        "Look again.",
        "<feedback></feedback>",
        "<feedback>  </feedback>",
        "<feedback>a",
        "a</feedback>",
        "Here: <feedback>a</feedback>",
        "<feedback>a</feedback> done",
        "<feedback>a</feedback><feedback>b</feedback>",
        "<feedback><feedback>a</feedback></feedback>",
        "<feedback>a</feedback><think>b",
        "<FEEDBACK>a</FEEDBACK>",
        GOOD,
    ):
        assert FEEDBACK.parse(text) is None, text


_words = st.text(alphabet=st.characters(exclude_characters="<"), min_size=1, max_size=80).filter(
    lambda text: text == text.strip() and "Analysis:" not in text and "Advices for next steps:" not in text
)


@given(_words, _words)
@example("a\nb", "c\n\nd")
@settings(max_examples=300, deadline=None)
def test_what_is_rendered_is_read_back(analysis: str, advice: str) -> None:
    assert SECTIONS.parse(SECTIONS.render(analysis, advice)) == (analysis, advice)
    assert FEEDBACK.parse(FEEDBACK.render("", advice)) == ("", advice)
    critique = Critique(analysis, advice)
    assert SECTIONS.parse(critique.text) == (analysis, advice), "the agent reads the wire format"
    assert Critique(advice=advice).text == advice


@given(_words, _words, st.sampled_from(["Analysis:", "Advices for next steps:"]), _words, st.integers(0, 2))
@settings(max_examples=200, deadline=None)
def test_a_third_header_anywhere_is_malformed(analysis: str, advice: str, header: str, extra: str, where: int) -> None:
    lines = [f"Analysis: {analysis}", f"Advices for next steps: {advice}"]
    lines.insert(where, f"{header} {extra}")
    assert SECTIONS.parse("\n".join(lines)) is None


@pytest.mark.parametrize("name", sorted(FEEDBACK_FORMATS))
def test_whatever_the_regex_admits_is_well_formed(name: str) -> None:
    form = FEEDBACK_FORMATS[name]

    @given(st.from_regex(form.regex.replace("1199", "60").replace("1599", "60"), fullmatch=True))
    @settings(max_examples=200, deadline=None)
    def check(text: str) -> None:
        assert form.parse(text) is not None

    check()


@pytest.mark.parametrize("name", sorted(FEEDBACK_FORMATS))
def test_the_instruction_shows_the_form(name: str) -> None:
    """A critic that copies the last lines of its instruction has written a well-formed critique."""
    form = feedback_format(name)
    assert form.parse(form.instruction.split("\n", 1)[1]) is not None


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="sections, feedback"):
        feedback_format("xml")


def test_parse_critique_keeps_the_facts() -> None:
    critique = parse_critique(GOOD, SECTIONS, usage=Usage(5, 3, 2, 1), seconds=0.5, model="critic-7b")
    assert critique.ok
    assert (critique.analysis, critique.advice) == PARTS
    assert (critique.raw, critique.usage, critique.seconds, critique.model) == (
        GOOD,
        Usage(5, 3, 2, 1),
        0.5,
        "critic-7b",
    )


@given(
    st.text(max_size=20), st.text(max_size=20), st.sampled_from(["ok", "timeout", "malformed"]), st.integers(0, 10**6)
)
@settings(max_examples=100, deadline=None)
def test_a_critique_survives_json(analysis: str, advice: str, status: Any, tokens: int) -> None:
    critique = Critique(analysis, advice, status, "raw", "detail", Usage(tokens, 2, 1, 1), 1.25, "m")
    assert Critique.load(json.loads(json.dumps(critique.dump()))) == critique


def test_a_record_of_another_version_loads() -> None:
    assert Critique.load({"advice": "a", "new_field": 1}) == Critique(advice="a")
