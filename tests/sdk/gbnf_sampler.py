"""Draws random sentences from a GBNF grammar, so that tests can ask: does the parser take all that it admits?

Covers what Caddie's grammars use: literals, character classes, groups, alternatives, rule names, `?`, `*`, `+`,
`{n}`, `{n,m}`. Anything else is a syntax error, as it would be in a real engine.
"""

from __future__ import annotations

import random
import re
from typing import Any

_TOKEN = re.compile(
    r"\s*(?:(?P<literal>\"(?:[^\"\\]|\\.)*\")|(?P<cls>\[(?:[^\]\\]|\\.)*\])|(?P<name>[a-zA-Z][\w-]*)"
    r"|(?P<repeat>\{\d+(?:,\d*)?\}|[?*+])|(?P<mark>[()|]))"
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
# What a model could come up with at its worst: blanks of all kinds, quotes, tags, other scripts.
_POOL = "abz019 \t\r\n\x00\x0b\x1c\x7f\x85\xa0\u2003\u3000\"\\'{}[]<>/:;,.&#éß漢😀_-"


def unescape(text: str) -> str:
    """GBNF escapes as characters."""

    def one(match: re.Match[str]) -> str:
        body = match[1]
        if body[0] in "xu" and len(body) > 1:
            return chr(int(body[1:], 16))
        return {"n": "\n", "t": "\t", "r": "\r"}.get(body, body)

    return _ESCAPE.sub(one, text)


def parse(grammar: str) -> dict[str, Any]:
    """Rule name to expression."""
    rules: dict[str, Any] = {}
    for line in grammar.splitlines():
        if not line.strip():
            continue
        name, arrow, body = line.partition("::=")
        assert arrow, f"no rule: {line!r}"
        assert name.strip() not in rules, f"rule {name.strip()} twice"
        tokens = []
        at = 0
        while body[at:].strip():
            match = _TOKEN.match(body, at)
            assert match, f"syntax error at {body[at : at + 30]!r}"
            tokens.append((match.lastgroup, match[match.lastgroup or 0]))
            at = match.end()
        rest = list(reversed(tokens))
        rules[name.strip()] = _alternatives(rest)
        assert not rest, f"left over in {name}: {rest}"
    for expression in list(rules.values()):
        for used in _names(expression):
            assert used in rules, f"rule {used!r} is not defined"
    return rules


def _alternatives(tokens: list[Any]) -> Any:
    options = [_sequence(tokens)]
    while tokens and tokens[-1] == ("mark", "|"):
        tokens.pop()
        options.append(_sequence(tokens))
    return ("or", options)


def _sequence(tokens: list[Any]) -> Any:
    items: list[Any] = []
    while tokens and tokens[-1] not in (("mark", "|"), ("mark", ")")):
        kind, text = tokens.pop()
        if kind == "repeat":
            items[-1] = ("repeat", items[-1], *_bounds(text))
        elif kind == "literal":
            items.append(("literal", unescape(text[1:-1])))
        elif kind == "cls":
            items.append(("class", _characters(text[1:-1])))
        elif kind == "name":
            items.append(("rule", text))
        else:
            items.append(_alternatives(tokens))
            assert tokens, "group not closed"
            assert tokens.pop() == ("mark", ")")
    return ("then", items)


def _bounds(text: str) -> tuple[int, int]:
    if text in "?*+":
        return {"?": (0, 1), "*": (0, 9), "+": (1, 9)}[text]
    low, comma, high = text[1:-1].partition(",")
    return int(low), int(high) if high else int(low) + (9 if comma else 0)


def _characters(body: str) -> str:
    """The characters of the pool that a class admits, and some of its own."""
    negated, body = body.startswith("^"), body.removeprefix("^")
    pattern = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|[^\\]", re.DOTALL)
    units = [(piece, unescape(piece)) for piece in pattern.findall(body)]
    ranges: list[tuple[str, str]] = []
    index = 0
    while index < len(units):
        if index + 2 < len(units) and units[index + 1][0] == "-":
            ranges.append((units[index][1], units[index + 2][1]))
            index += 3
        else:
            ranges.append((units[index][1], units[index][1]))
            index += 1
    pool = _POOL + "".join(low + high for low, high in ranges)
    inside = [c for c in dict.fromkeys(pool) if any(low <= c <= high for low, high in ranges) != negated]
    assert inside, f"empty class [{body}]"
    return "".join(inside)


def _names(expression: Any) -> list[str]:
    kind, *rest = expression
    if kind == "rule":
        return [rest[0]]
    if kind in ("or", "then"):
        return [name for item in rest[0] for name in _names(item)]
    return _names(rest[0]) if kind == "repeat" else []


def sample(rules: dict[str, Any], rng: random.Random, name: str = "root", depth: int = 0) -> str:
    """One sentence. Deep nesting is cut short by taking the fewest repetitions and the last alternative."""
    return _emit(rules, rng, rules[name], depth)


def _emit(rules: dict[str, Any], rng: random.Random, expression: Any, depth: int) -> str:
    kind, *rest = expression
    match kind:
        case "literal":
            return str(rest[0])
        case "class":
            return rng.choice(rest[0])
        case "rule":
            return sample(rules, rng, rest[0], depth + 1)
        case "or":
            return _emit(rules, rng, rest[0][-1] if depth > 8 else rng.choice(rest[0]), depth)
        case "then":
            return "".join(_emit(rules, rng, item, depth) for item in rest[0])
        case "repeat":
            inner, low, high = rest
            count = low if depth > 8 else rng.choice((low, high, rng.randint(low, high), min(high, low + 2)))
            if count > 3 and inner[0] != "class":
                count = max(low, min(count, 3))
            return "".join(_emit(rules, rng, inner, depth) for _ in range(count))
    raise AssertionError(kind)
