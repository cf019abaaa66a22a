"""The answer metrics, on numbers worked by hand and on properties that hold for every text."""

from __future__ import annotations

import string
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from caddie_evals.metrics import exact_match, normalize_caddie, normalize_squad, token_f1

# Characters whose upper, lower and folded forms agree (dotless ı, for one, does not: it capitalises to I).
letters = st.characters(categories=["L", "N"]).filter(
    lambda char: char.upper().casefold() == char.lower().casefold() == char.casefold()
)
words = st.text(letters, min_size=1, max_size=8)
SHAPES: list[Callable[[str], str]] = [str.upper, str.lower, str.title, str.swapcase, str]
punctuation = st.text(st.sampled_from(string.punctuation + "“”‘’–—…«»¿§€°×"), max_size=3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Beatles", "beatles"),
        ("  A \t Day\nin  the   Life ", "day in life"),
        ("Spider-Man: Homecoming!", "spider man homecoming"),
        ("U.S.A.", "u s"),  # each full stop is a blank, so the last letter stands alone, as an article
        ("Straße", "strasse"),  # case-folding, not only lower-casing
        ("1950–1953)", "1950 1953"),
        ("“Weird Al” Yankovic’s", "weird al yankovic s"),
        ("¿Qué?", "qué"),
        ("$5.00", "5 00"),
        ("25 °C", "25 c"),
        ("snake_case", "snake case"),
        ("theatre and antheap", "theatre and antheap"),
        ("Á la carte", "á la carte"),
        ("the", ""),
        ("?! … —", ""),
        ("", ""),
    ],
)
def test_normalize_caddie(text: str, expected: str) -> None:
    assert normalize_caddie(text) == expected


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("the eiffel tower.", ["Eiffel Tower"], True),
        ("Eiffel Tower in Paris", ["Eiffel Tower"], False),
        ("NYC", ["New York City", "nyc"], True),
        ("LA", ["New York City", "NYC"], False),
        ("Spider Man", ["Spider-Man"], True),
        ("Spiderman", ["Spider-Man"], False),  # where the SQuAD normaliser would say yes
        ("München", ["münchen"], True),
        ("Munchen", ["München"], False),
        ("", [""], False),
        ("The", ["the"], False),
        ("...", ["..."], False),
        ("anything", [], False),
        ("", ["answer"], False),
        (None, ["None"], False),
    ],
)
def test_exact_match(prediction: str | None, references: list[str], expected: bool) -> None:
    assert exact_match(prediction, references) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Beatles!", "beatles"),
        ("Spider-Man", "spiderman"),
        ("U.S.A.", "usa"),
        ("a  b\tthe c", "b c"),
        ("Straße", "straße"),
        ("1950–1953)", "1950–1953"),  # only ASCII punctuation is removed
        ("a–b", "–b"),
        ("the", ""),
    ],
)
def test_normalize_squad(text: str, expected: str) -> None:
    assert normalize_squad(text) == expected


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        # "henry baring" vs "sir henry baring baronet": precision 2/2, recall 2/4
        ("Henry Baring", ["Sir Henry Baring, Baronet"], 2 / 3),
        # precision 2/4, recall 2/3
        ("in the city of Paris", ["Paris, a city (France)"], 4 / 7),
        # repeated tokens count as often as both sides have them: 2 shared of 3 and 2
        ("New York New", ["New New"], 4 / 5),
        ("rock", ["rock n roll"], 1 / 2),
        ("rock", ["jazz", "rock n roll", "hard rock"], 2 / 3),
        ("The Beatles.", ["beatles"], 1.0),
        ("blue", ["red"], 0.0),
        ("", ["red"], 0.0),
        ("", [""], 0.0),
        ("the", ["a"], 0.0),
        ("red", [], 0.0),
        (None, ["red"], 0.0),
        # HotpotQA's rule: a verdict is right or wrong, never half right
        ("Yes.", ["yes"], 1.0),
        ("yes it is", ["yes"], 0.0),
        ("no", ["no one"], 0.0),
        ("noanswer", ["noanswer given"], 0.0),
        ("no", ["no one", "No!"], 1.0),
        ("yes men", ["yes man"], 1 / 2),
    ],
)
def test_token_f1(prediction: str | None, references: list[str], expected: float) -> None:
    assert token_f1(prediction, references) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metric", [exact_match, token_f1])
def test_a_lone_string_is_refused_as_references(metric: Callable[[str, str], object]) -> None:
    with pytest.raises(TypeError, match=r"write \[reference\]"):
        metric("a", "a")


@given(st.lists(words, min_size=1, max_size=5), st.data())
def test_exact_match_ignores_case_punctuation_articles_and_blanks(answer: list[str], data: st.DataObject) -> None:
    """Noise between words changes nothing; only an answer made of articles alone never matches."""
    noisy = data.draw(punctuation)
    for word in answer:
        shape = data.draw(st.sampled_from(SHAPES))
        assume(shape(word).casefold() == word.casefold())
        article = data.draw(st.sampled_from(["", "the ", "An ", "A\t"]))
        noisy += " " + article + data.draw(punctuation) + shape(word) + data.draw(punctuation) + "\n"
    reference = " ".join(answer)
    assert exact_match(noisy, ["unrelated reference", reference]) is (normalize_caddie(reference) != "")


@given(st.text())
def test_normalize_caddie_is_idempotent_and_any_text_it_leaves_matches_itself(text: str) -> None:
    once = normalize_caddie(text)
    assert normalize_caddie(once) == once
    assert exact_match(text, [text]) is (once != "")


@given(st.text(), st.text())
def test_token_f1_is_symmetric_and_between_0_and_1(left: str, right: str) -> None:
    score = token_f1(left, [right])
    assert 0.0 <= score <= 1.0
    assert score == token_f1(right, [left])


@given(st.lists(st.sampled_from(["red", "green", "blue", "the", "yes", "no"]), min_size=1, max_size=6), st.data())
def test_token_f1_is_1_for_the_same_words_in_any_order(answer: list[str], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(answer))
    kept = [word for word in answer if word != "the"]
    assert token_f1(" ".join(shuffled), [" ".join(answer)]) == (1.0 if kept else 0.0)


@given(st.text(), st.lists(st.text(), max_size=4))
def test_token_f1_takes_the_best_reference(prediction: str, references: list[str]) -> None:
    singles = [token_f1(prediction, [reference]) for reference in references]
    assert token_f1(prediction, references) == max(singles, default=0.0)
