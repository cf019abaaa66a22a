"""A secret put anywhere never survives; what holds none is left alone."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caddie_sdk.tracing import KEYS, PATTERNS, PHONE, Redactor
from caddie_sdk.tracing.redaction import MARK

REDACTOR = Redactor()
SHAPED = [
    "sk-proj-A1b2C3d4E5f6G7h8I9j0",
    "Bearer abcDEF123456.ghi",
    "bearer abcdefghijklmnopqrstuvwxyz",
    "Basic dXNlcjpodW50ZXIy",
    "jane.doe+shop@mail.example.co.uk",
    "jürgen@bücher.example",
    "4111111111111111",
    "4111 1111 1111 1111",
    "5555-5555-5555-4444",
    "3782 822463 10005",
    "ghp_0123456789abcdefghijABCDEFGHIJ",
    "AKIAIOSFODNN7EXAMPLE",
    "AIza" + "Ab1_-" * 7,
    "xoxb-123456789012-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
]
"""Secrets that are known by their looks."""
SPELLINGS = [
    "password", "PASSWORD", "db_password", "userPassword", "api_key", "apiKey", "API-KEY", "x-api-key",
    "openai.api.key", "Authorization", "proxy-authorization", "token", "accessToken", "refresh_token",
    "client_secret", "Cookie", "pin", "PIN", "ssn", "accesstoken", "credentials", "private_key",
]  # fmt: skip
INNOCENT = [
    "Where was Ada Vance born?",
    "max_tokens=512, prompt_tokens: 1024, completion_tokens: 77",
    '{"usage": {"prompt_tokens": 10, "total_tokens": 12}, "ok": true}',
    "Order W2378156 of 2024-05-07 at 12:30:45, tracking 1234567890123456, total $1,234.56",
    "The years 2001 2002 2003 2004 and 1990 1991 1992 1993 were dry.",
    '{"a": [1, 2.5, null, "x"], "b": {"c": "d"}}',
    "<search>who wrote the token economy</search>",
    "He was a bearer of bad news and taught basic understanding of mathematics.",
    "author: Jane Doe; shopping: done; spinning: no; key: C minor; monkey: yes",
    "https://example.com:8080/path?q=a@b and @handle, a @ b",
    "sk-learn and pk-fire, task-force-one-hundred-and-twenty-seven",
    'broken {"query": "Ada", [[[ {',
    '{"password": null, "token": "", "secret": false}',
    "",
    "   ",
    "\\" * 50,
]

plain_words = st.text(string.ascii_letters + " .,-\n", max_size=30)
secret_words = st.text(string.ascii_letters + string.digits, min_size=8, max_size=20).map("zQ7".__add__)
keys = plain_words.filter(lambda key: not REDACTOR.secret_key(key))
anywhere = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | plain_words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


WRAPS: list[Callable[[Any], Any]] = [
    lambda value: [value],
    lambda value: {"x": value},
    lambda value: {"a": 1, "rows": [{"text": value}]},
    json.dumps,
    lambda value: json.dumps({"arguments": json.dumps(value)}),
    lambda value: json.dumps({"r": value}, indent=2),
    lambda value: "<tool_call>" + json.dumps({"name": "pay", "arguments": value}) + "</tool_call>",
    lambda value: f"calling pay with {json.dumps({'v': value})} now",
    lambda value: json.dumps({"r": value})[:-1],  # cut off
    lambda value: json.dumps(json.dumps({"r": value}))[:-2],
    lambda value: {"list": [1, [2, [value]]]},
]
nested = st.lists(st.sampled_from(WRAPS), max_size=4)


def wrapped(value: Any, wraps: list[Callable[[Any], Any]]) -> Any:
    for wrap in wraps:
        value = wrap(value)
    return value


def leaves(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@given(st.sampled_from(SPELLINGS), secret_words, nested, anywhere)
@example("password", "zQ7hunter2", [WRAPS[4], WRAPS[8]], None)
@settings(max_examples=400, deadline=None)
def test_what_stands_under_a_secrets_key_never_survives(
    key: str, secret: str, wraps: list[Callable[[Any], Any]], beside: Any
) -> None:
    for held in ({key: secret}, {"beside": beside, key: secret}, {key: [secret, {"x": secret}]}):
        redacted = REDACTOR.value(wrapped(held, wraps))
        assert secret not in leaves(redacted)
        assert REDACTOR.value(redacted) == redacted


@given(st.sampled_from(SHAPED), plain_words, plain_words, nested)
@settings(max_examples=400, deadline=None)
def test_what_looks_like_a_secret_never_survives(
    secret: str, before: str, after: str, wraps: list[Callable[[Any], Any]]
) -> None:
    for held in (
        secret,
        f"{before} {secret} {after}",
        f"({secret})",
        {f"{before} {secret}": 1},
        [before, secret, after],
    ):
        redacted = REDACTOR.value(wrapped(held, wraps))
        assert secret not in leaves(redacted)
        assert secret.encode("ascii", "backslashreplace").decode() not in leaves(redacted)
        assert REDACTOR.value(redacted) == redacted


@given(st.text(max_size=80) | st.text("\"'\\{}[]:=,; pinasword1234@.-\n", max_size=60))
@settings(max_examples=600, deadline=None)
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once = REDACTOR.text(text)
    assert REDACTOR.text(once) == once


@given(st.text(string.ascii_letters + " .,;!?()[]{}\"'\n\\<>", max_size=200))
@settings(max_examples=400, deadline=None)
def test_prose_without_secrets_is_unchanged(text: str) -> None:
    assert REDACTOR.text(text) == text


@given(st.dictionaries(st.sampled_from(["query", "max_tokens", "name", "order", "author"]), anywhere, max_size=4))
@settings(max_examples=200, deadline=None)
def test_plain_json_without_secrets_is_unchanged(value: Any) -> None:
    before = json.dumps(value)
    assert REDACTOR.value(value) == value
    assert REDACTOR.text(before) == before
    assert json.dumps(value) == before


@pytest.mark.parametrize("text", INNOCENT)
def test_innocent_texts_are_unchanged(text: str) -> None:
    assert REDACTOR.text(text) == text


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("password: hunter2", "password: [redacted]"),
        ("my API key: abc123, thanks", "my API key: [redacted], thanks"),
        ("?user=ann&token=abc&x=1", "?user=ann&token=[redacted]&x=1"),
        ("Authorization: Basic abc def", "Authorization: [redacted] def"),
        ("-H 'Authorization: Bearer abc'", "-H 'Authorization: [redacted]'"),
        ("postgres://ann:hunter2@db/x", "postgres://[redacted]@db/x"),
        ('{"password": "a\\"b", "n": 1}', '{"password": "[redacted]", "n": 1}'),
        ('{"pin": 1234}', '{"pin": "[redacted]"}'),
        ('{"password": "cut of', '{"password": "[redacted]'),
        ('{"n": 1, "secret": {"a": "cut', '{"n": 1, "secret": [redacted]'),
        ('{"e": "ann\\u0040x.org"}', '{"e": "[redacted]"}'),
        ('{"x": "ann@x.org", "x": "ok"}', '{"x": "[redacted]", "x": "ok"}'),
        ('{"p\\u0061ssword": "hunter2"}', '{"password": "[redacted]"}'),
        ("card 4111 1111 1111 1111 123", "card [redacted] 123"),
        ("cards 4000 4111 1111 1111 1111", "cards 4000 [redacted]"),
        ("not a card 4111 1111 1111 1112", "not a card 4111 1111 1111 1112"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nok", "[redacted]\nok"),
    ],
)
def test_what_becomes_of_a_text(text: str, redacted: str) -> None:
    assert REDACTOR.text(text) == redacted


def test_numbers_and_keys_are_looked_at_too() -> None:
    assert REDACTOR.value({"card": 4111111111111111, "year": 2024, "share": 0.5}) == {
        "card": MARK, "year": 2024, "share": 0.5,
    }  # fmt: skip
    assert REDACTOR.value({"a@x.org": 1, "b@x.org": 2}) == {MARK: 1, f"{MARK} 2": 2}


def test_what_goes_in_is_not_altered() -> None:
    given = {"a": [{"password": "hunter2"}]}
    REDACTOR.value(given)
    assert given == {"a": [{"password": "hunter2"}]}


def test_both_lists_can_be_extended_and_replaced() -> None:
    own = Redactor(keys=(*KEYS, "iban"), patterns=(*PATTERNS, PHONE, r"W[0-9]{7}"))
    assert own.value({"IBAN": "DE00", "password": "x", "note": "order W2378156, call +49 30 1234 5678"}) == {
        "IBAN": MARK, "password": MARK, "note": f"order {MARK}, call {MARK}",
    }  # fmt: skip
    assert Redactor(keys=(), patterns=()).value({"password": "ann@x.org"}) == {"password": "ann@x.org"}


@pytest.mark.parametrize(
    "text",
    ["\\" * 200_000, "[" * 200_000, '{"a":' * 40_000, "a" * 200_000, "a." * 100_000, "1 " * 100_000, '"' * 200_000,
     "password=" * 20_000, "a@" * 100_000, "4111 " * 40_000, "secret: [" * 20_000, ": " * 100_000, '\\"' * 100_000],
    ids=lambda text: text[:9],
)  # fmt: skip
def test_no_text_takes_long(text: str) -> None:
    started = time.process_time()
    REDACTOR.text(text)
    assert time.process_time() - started < 5.0
