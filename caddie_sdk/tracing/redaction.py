"""Taking secrets out of what is recorded: by the key they stand under, and by what they look like.

Redaction errs on the side of taking out too much. It works on plain JSON of any depth, on JSON inside texts (the
arguments of tool calls, also when they were cut off), and on `key: value` and `key=value` in prose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MARK = "[redacted]"

KEYS: tuple[str, ...] = (
    "api_key", "access_key", "private_key", "authorization", "cookie", "credential", "credentials", "cvc", "cvv",
    "passphrase", "passwd", "password", "pin", "pwd", "secret", "secrets", "session_key", "ssn", "token",
)  # fmt: skip
"""Keys whose values are secrets, in any case and spelling (`api_key`, `apiKey`, `X-API-Key`), also as the end of a
longer one (`refresh_token`). `tokens` is another word: counts of tokens stay."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a secret looks like.

    Attributes:
        regex: matches it; the whole match is taken out.
        check: says of a match whether it is one; None takes every match.
        hint: a text without this cannot match, which saves a search; "" always searches.
    """

    regex: re.Pattern[str]
    check: Callable[[str], bool] | None = None
    hint: str = ""


def _luhn(text: str) -> bool:
    """Whether the digits of a text carry a card number's check digit."""
    digits = [int(character) for character in reversed(text) if character.isdigit()]
    doubled = [digit * 2 - 9 * (digit > 4) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


_GAP = "[ \u00a0-]?"
_CARD = re.compile(
    # Networks and lengths of real cards, so that years and order numbers in a row are left alone.
    rf"(?<![0-9])(?:3[0-9]{{3}}{_GAP}[0-9]{{6}}{_GAP}[0-9]{{4,5}}"
    rf"|(?:[456][0-9]{{3}}|3[0-9]{{3}}|2[2-7][0-9]{{2}})(?:{_GAP}[0-9]{{4}}){{3}}(?:{_GAP}[0-9]{{1,3}})?"
    rf"|[456][0-9]{{12}})(?![0-9])"
)

PATTERNS: tuple[Pattern, ...] = (
    Pattern(re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.*?-----END [A-Z ]*PRIVATE KEY-----|.*)", re.DOTALL),
            hint="PRIVATE KEY"),
    Pattern(re.compile(r"\b(?:bearer|basic)[ \t]+(?=[\w.~+/-]*[0-9]|[\w.~+/-]{24})[\w.~+/-]{8,}+=*", re.IGNORECASE)),
    Pattern(re.compile(r"(?<![A-Za-z0-9])(?:sk|pk|rk)[-_](?=[\w-]{0,48}[0-9])[\w-]{16,}+")),
    Pattern(re.compile(r"(?<![A-Za-z0-9])(?:gh[a-z]_|github_pat_|glpat-|hf_|tvly-|xox[a-z]-|npm_|pypi-)[\w-]{12,}+")),
    Pattern(re.compile(r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])")),
    Pattern(re.compile(r"(?<![A-Za-z0-9])AIza[\w-]{35}+"), hint="AIza"),
    Pattern(re.compile(r"(?<![A-Za-z0-9])eyJ[\w-]{8,}+\.[\w-]{8,}+(?:\.[\w-]*+)?"), hint="eyJ"),
    Pattern(re.compile(r"(?<=://)[^\s/:@\"']++:[^\s/@\"']++(?=@)"), hint="://"),
    Pattern(re.compile(r"(?<![\w.%+-])[\w.%+-]++@[\w-]++(?:\.[\w-]++)+"), hint="@"),
    Pattern(_CARD, _luhn),
)  # fmt: skip
"""Private keys, bearer and basic credentials, API keys of well-known services, JSON web tokens, logins inside URLs,
e-mail addresses, and card numbers."""

PHONE = Pattern(
    re.compile(r"(?<![\w.])(?:\+[0-9]{1,3}[ .-]?)?(?:\([0-9]{1,4}\)[ .-]?)?[0-9]{2,4}(?:[ .-]?[0-9]{2,4}){2,3}(?![\w])"),
    lambda text: 8 <= sum(character.isdigit() for character in text) <= 15,
)
"""Phone numbers. Not among `PATTERNS`, because order numbers and dates look the same."""

_MAX_PARSED = 64
_ROUNDS = 8
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_A-Za-z]+")
_LITERALS = {"null", "true", "false", "none", "nil", "undefined"}


class Redactor:
    """Takes secrets out of text and plain JSON, leaving `[redacted]`.

    What holds no secret comes back unchanged, and redacting twice is redacting once.

        Redactor(keys=(*KEYS, "iban"), patterns=(*PATTERNS, PHONE, r"W[0-9]{7}"))

    Args:
        keys: names whose values are secrets.
        patterns: what secrets look like: `Pattern`s, or regular expressions.
    """

    def __init__(
        self, keys: Iterable[str] = KEYS, patterns: Iterable[Pattern | re.Pattern[str] | str] = PATTERNS
    ) -> None:
        self._keys = {_squashed(key) for key in keys} - {""}
        self._patterns = tuple(
            given if isinstance(given, Pattern) else Pattern(re.compile(given)) for given in patterns
        )
        spelled = sorted((r"[\s_.-]*".join(_WORD.findall(key)) for key in keys), key=len, reverse=True)
        one_of = "|".join(word for word in spelled if word)
        # A key, perhaps in quotes that are themselves escaped, and what parts it from its value.
        self._key_in_text = re.compile(
            rf"(?P<open>\\*+[\"']?)(?<![A-Za-z])(?P<key>[\w.-]{{0,64}}?(?:{one_of}))(?P=open)\s*[:=]\s*", re.IGNORECASE
        ) if one_of else None  # fmt: skip

    def value(self, value: Any) -> Any:
        """Plain JSON without its secrets. Containers that change are copied, never altered."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            told = str(value)
            return value if self._shapes(told) == told else MARK
        return value

    def text(self, text: str) -> str:
        """A text without its secrets; JSON inside it stays JSON."""
        for _ in range(_ROUNDS):  # what stands beside a mark may look different than before
            redacted = self._once(text)
            if redacted == text:
                break
            text = redacted
        return text

    def secret_key(self, key: str) -> bool:
        """Whether the value under this key is a secret."""
        squashed = _squashed(key)
        words = [word.lower() for word in _WORD.findall(key)]
        return any(squashed.endswith(secret) for secret in self._keys) or any(
            "".join(words[start:end]) in self._keys
            for start in range(len(words))
            for end in range(start + 1, min(start + 3, len(words)) + 1)
        )
