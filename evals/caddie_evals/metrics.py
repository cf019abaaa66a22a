"""Answer metrics of question answering, as pure functions.

Two normalisers live here because the papers use two. They differ in what punctuation becomes:

    "Spider-Man"   normalize_caddie -> "spider man"    normalize_squad -> "spiderman"
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLES = frozenset({"a", "an", "the"})
_SQUAD_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_SQUAD_PUNCTUATION = str.maketrans("", "", string.punctuation)
_VERDICTS = frozenset({"yes", "no", "noanswer"})


def normalize_caddie(text: str) -> str:
    """Bring an answer into the form in which Caddie compares it.

    Source: Caddie paper, appendix C ("case-folding, replacing punctuation with spaces, removing English
    articles, and collapsing whitespace"), in that order.

    The paper does not say what punctuation is. Here it is every character of a Unicode category P*
    (punctuation) or S* (symbols). That covers `string.punctuation`, nine of whose characters Unicode counts
    as symbols ("$", "+", "<" and others), and treats their relatives beyond ASCII (“ ” – € °) alike. Letters
    are compared as written: accents count, and composed and decomposed forms differ. Articles go as whole
    words only, so "á" and "a1" stay.
    """
    spaced = "".join(" " if unicodedata.category(char)[0] in "PS" else char for char in text.casefold())
    return " ".join(word for word in spaced.split() if word not in _ARTICLES)


def exact_match(prediction: str | None, references: Sequence[str]) -> bool:
    """Whether the prediction equals any reference after `normalize_caddie`.

    Source: Caddie paper, appendix C ("a nonempty normalized exact match against any reference answer").
    `None` and anything that normalises to nothing ("", "The", "?!") never match, not even themselves.
    """
    _refuse_bare_string(references)
    answer = normalize_caddie(prediction) if prediction is not None else ""
    return answer != "" and any(answer == normalize_caddie(reference) for reference in references)


def normalize_squad(text: str) -> str:
    """Bring an answer into the form in which SQuAD-style evaluators compare it.

    Source: the normaliser of the SQuAD 1.1 evaluator (Rajpurkar et al., 2016), shared by those of HotpotQA
    and MuSiQue and described in appendix I of LoongReflect. Lower-case, delete `string.punctuation` (ASCII
    only, so “curly quotes” stay), drop articles, collapse whitespace. An article is found at the word
    boundaries of regular expressions, as there: "a–b" loses its "a".
    """
    return " ".join(_SQUAD_ARTICLE.sub(" ", text.lower().translate(_SQUAD_PUNCTUATION)).split())


def token_f1(prediction: str | None, references: Sequence[str]) -> float:
    """Token F1 after `normalize_squad`, the best over the references, in [0, 1].

    Source: SQuAD 1.1 evaluator, with the rule of HotpotQA's (`hotpot_evaluate_v1.py`) that a prediction or
    reference which normalises to "yes", "no" or "noanswer" earns either 1 or 0: "no, it is" gets nothing for
    the reference "no". Where nothing is left to compare the score is 0, as in those two; the SQuAD 2.0 rule
    (1 if both are empty) is for unanswerable questions, which Caddie does not score.
    """
    _refuse_bare_string(references)
    if prediction is None:
        return 0.0
    answer = normalize_squad(prediction)
    return max((_overlap(answer, normalize_squad(reference)) for reference in references), default=0.0)


def _overlap(answer: str, reference: str) -> float:
    """F1 of two normalised texts: 2·shared / (tokens of both), the harmonic mean of precision and recall."""
    if answer != reference and (answer in _VERDICTS or reference in _VERDICTS):
        return 0.0
    answer_tokens, reference_tokens = answer.split(), reference.split()
    shared = (Counter(answer_tokens) & Counter(reference_tokens)).total()
    return 2 * shared / (len(answer_tokens) + len(reference_tokens)) if shared else 0.0


def _refuse_bare_string(references: Sequence[str]) -> None:
    """A lone string is a sequence too, of letters: it would score nonsense in silence."""
    if isinstance(references, str):
        raise TypeError("references must be a sequence of strings, not one string: write [reference]")
