"""Taking secrets out of what is recorded: by the key they stand under, and by what they look like.

Redaction errs on the side of taking out too much. It works on plain JSON of any depth, on JSON inside texts (the
arguments of tool calls, also when they were cut off), and on `key: value` and `key=value` in prose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
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
_FOURS = rf"(?:[456][0-9]{{3}}|3[0-9]{{3}}|2[2-7][0-9]{{2}})(?:{_GAP}[0-9]{{4}}){{3}}"


def _card(layout: str) -> Pattern:
    return Pattern(re.compile(rf"(?<![0-9]){layout}(?![0-9])"), _luhn)


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
    # Networks and layouts of real cards, so that years and order numbers in a row are left alone.
    _card(rf"{_FOURS}{_GAP}[0-9]{{1,3}}"), _card(_FOURS), _card(rf"3[0-9]{{3}}{_GAP}[0-9]{{6}}{_GAP}[0-9]{{4,5}}"),
    _card(r"[456][0-9]{12}"),
)  # fmt: skip
"""Private keys, bearer and basic credentials, API keys of well-known services, JSON web tokens, logins inside URLs,
e-mail addresses, and card numbers."""

PHONE = Pattern(
    re.compile(r"(?<![\w.])(?:\+\d{1,3}[ .-]?)?(?:\(\d{1,4}\)[ .-]?)?\d{2,4}(?:[ .-]?\d{2,4}){2,3}(?!\w)"),
    lambda text: 8 <= sum(character.isdigit() for character in text) <= 15,
)
"""Phone numbers. Not among `PATTERNS`, because order numbers and dates look the same."""

_MAX_PARSED = 64
_ROUNDS = 8
_LONG = 5
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_A-Za-z]+")
_KEY_IN_TEXT = re.compile(
    # Perhaps in quotes, which may be escaped themselves; perhaps two words ("API key").
    r"(?P<open>(?:(?<!\\)\\*+[\"'])?)(?<![\w.-])(?P<key>(?:[\w.-]{1,40} )?[\w.-]{1,200})(?P=open)\s*[:=]\s*"
)
_OPENING = re.compile(r"(\\*+)([\"'])")
_BARE = re.compile(r"(?:(?:bearer|basic|digest|token|apikey)[ \t]+)?[^\s,;&]+", re.IGNORECASE)
_LITERALS = {"", "[]", "{}", "null", "true", "false", "none", "nil", "undefined"}
_CLOSERS = "\"'\\)]}>."


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

    def value(self, value: Any, *, keep: Container[str] = ()) -> Any:
        """Plain JSON without its secrets. Containers are copied, never altered.

        Args:
            value: plain JSON.
            keep: keys whose texts, numbers and lists of these stay: names and ids that give the JSON its structure.

        Raises:
            RecursionError: it is nested deeper than Python's own JSON reader goes.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return self._mapping(value, keep)
        if isinstance(value, list | tuple):
            return [self.value(item, keep=keep) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            told = str(value)
            return value if self.shapes(told) == told else MARK
        return value

    def text(self, text: str) -> str:
        """A text without its secrets; JSON inside it stays JSON."""
        for _ in range(_ROUNDS):  # what stands beside a mark may look different than before
            redacted = self.shapes(self._keyed(self._parsed(text)))
            if redacted == text:
                break
            text = redacted
        return text

    def shapes(self, text: str) -> str:
        """A text without what looks like a secret, whatever key it stands under."""
        for pattern in self._patterns:
            if pattern.hint in text:
                text = MARK.join(_sub(pattern, part) for part in text.split(MARK))
        return text

    def secret_key(self, key: str) -> bool:
        """Whether the value under this key is a secret."""
        if " " in key.strip():
            words = key.split()
            return self.secret_key(words[-1]) or _squashed(" ".join(words[-2:])) in self._keys
        squashed, words = _squashed(key), [word.lower() for word in _WORD.findall(key)]
        return any(squashed.endswith(secret) for secret in self._keys if len(secret) >= _LONG) or any(
            "".join(words[start:end]) in self._keys
            for start in range(len(words))
            for end in range(start + 1, min(start + 3, len(words)) + 1)
        )

    def _mapping(self, mapping: Mapping[Any, Any], keep: Container[str]) -> dict[Any, Any]:
        redacted: dict[Any, Any] = {}
        for key, value in mapping.items():
            if key in keep and _is_flat(value):
                redacted[key] = value
                continue
            name = self.text(key) if isinstance(key, str) else key
            number = 1
            while name in redacted:  # two keys that both were secrets
                number += 1
                name = f"{MARK} {number}"
            secret = isinstance(key, str) and self.secret_key(key)
            redacted[name] = _hidden(value) if secret else self.value(value, keep=keep)
        return redacted

    def _parsed(self, text: str) -> str:
        """Redact the JSON values that stand in a text."""
        parts, at, tried = [], 0, 0
        for start in _json_starts(text):
            if start < at or tried == _MAX_PARSED:
                continue
            tried += 1
            try:
                value, end = _decode(text, start)
                redacted = self.value(value)
            except (ValueError, RecursionError):
                continue
            if redacted != value:
                parts += [text[at:start], json.dumps(redacted, ensure_ascii=False)]
            else:
                parts.append(text[at:end])
            at = end
        return "".join([*parts, text[at:]]) if parts else text

    def _keyed(self, text: str) -> str:
        """Redact what follows the name of a secret, as in `password=...` or in JSON that was cut off."""
        if ":" not in text and "=" not in text:
            return text
        parts, at, position = [], 0, 0
        while (found := _KEY_IN_TEXT.search(text, position)) is not None:
            position = found.end()
            if self.secret_key(found["key"]):
                start, end = _value_after(text, position)
                if "".join(text[start:end].lower().split()) not in _LITERALS:
                    parts += [text[at:start], MARK]
                    at = position = end
        return "".join([*parts, text[at:]]) if parts else text


def _is_flat(value: Any) -> bool:
    """Whether it is a text or number, or a list of such."""
    inner = value if isinstance(value, list | tuple) else (value,)
    return not any(isinstance(item, Mapping | list | tuple) for item in inner)


def _squashed(key: str) -> str:
    return "".join(character for character in key.lower() if character.isalnum())


def _hidden(value: Any) -> Any:
    """The mark in the place of a secret; what is empty, true or false is none."""
    return value if value is None or isinstance(value, bool) or value in ("", [], {}) else MARK


def _sub(pattern: Pattern, text: str) -> str:
    if pattern.check is None:
        return pattern.regex.sub(MARK, text)
    parts, at, position = [], 0, 0
    while (found := pattern.regex.search(text, position)) is not None and found.end() > position:
        if pattern.check(found[0]):
            parts += [text[at : found.start()], MARK]
            at = position = found.end()
        else:
            position = found.start() + 1  # the next match may overlap this one
    return "".join([*parts, text[at:]])


def _json_starts(text: str) -> Iterator[int]:
    """Where JSON may begin: at the first character, and at every opening bracket."""
    stripped = text.lstrip()
    if stripped.startswith('"'):
        yield len(text) - len(stripped)
    yield from (found.start() for found in re.finditer(r"[{\[]", text))


def _decode(text: str, start: int) -> tuple[Any, int]:
    value, end = json.JSONDecoder().raw_decode(text, start)
    return value, end


def _value_after(text: str, start: int) -> tuple[int, int]:
    """Where the value that begins here ends: a quoted text, a bracket with what it holds, or a word."""
    if text.startswith(MARK, start):
        return start, start
    if (opening := _OPENING.match(text, start)) is not None:
        begin, depth, quote = opening.end(), len(opening[1]), opening[2]
        if text.startswith(MARK, begin):
            return begin, begin
        return begin, _closing_quote(text, begin, quote, depth)
    if text[start : start + 1] in ("{", "["):
        return start, _closing_bracket(text, start)
    found = _BARE.match(text, start)
    if found is None:
        return start, start
    return start, start + len(found[0].rstrip(_CLOSERS))


def _closing_quote(text: str, begin: int, quote: str, depth: int) -> int:
    """The end of a quoted text whose quotes carry `depth` backslashes; the end of all when it was cut off."""
    at = text.find(quote, begin)
    while at >= 0:
        slashes = at
        while slashes > begin and text[slashes - 1] == "\\":
            slashes -= 1
        if at - slashes <= depth:
            return slashes
        at = text.find(quote, at + 1)
    return len(text)


def _closing_bracket(text: str, start: int) -> int:
    level = 0
    for found in re.finditer(r"[\[\]{}]", text[start:]):
        level += 1 if found[0] in "[{" else -1
        if level == 0:
            return start + found.end()
    return len(text)
