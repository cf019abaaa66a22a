"""Canonical messages and wire copies (SPEC §4, rules 1 and 3)."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import session_driver as driver
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie_sdk.errors import ConfigError, MessageError
from caddie_sdk.messages import (
    PROFILES,
    Message,
    canonical,
    clean,
    dump_json,
    parse_arguments,
    profile,
    profile_for,
    text_of,
    wire,
    wire_arguments,
    wire_tools,
)

PICTURE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}


def call(arguments: Any, id: Any = "a", name: Any = "search") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# ---------------------------------------------------------------- canonical form


def test_canonical_of_plain_messages() -> None:
    assert canonical({"role": "user", "content": "hi", "name": "bob", "extra": 1}) == {"role": "user", "content": "hi"}
    assert canonical({"role": "developer", "content": "be exact"}) == {"role": "system", "content": "be exact"}
    assert canonical({"role": "assistant", "content": None}) == {"role": "assistant", "content": ""}
    assert canonical({"role": "assistant"}) == {"role": "assistant", "content": ""}
    assert canonical({"role": "tool", "tool_call_id": "a", "content": "r", "name": "search"}) == {
        "role": "tool",
        "tool_call_id": "a",
        "content": "r",
    }


def test_canonical_of_content_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert canonical({"role": "user", "content": parts})["content"] == "one\ntwo"
    assert canonical({"role": "user", "content": ["one", "two"]})["content"] == "one\ntwo"
    assert canonical({"role": "user", "content": []})["content"] == ""
    assert canonical({"role": "user", "content": [{"type": "text", "text": None}]})["content"] == ""
    mixed = canonical({"role": "user", "content": [{"type": "text", "text": "see \ud800"}, PICTURE]})
    assert mixed["content"][1] == PICTURE
    assert mixed["content"][0]["text"].rstrip("\ufffd") == "see "
    assert text_of(mixed).rstrip("\n[image_url]").rstrip("\ufffd") == "see "
    textless = canonical({"role": "user", "content": [{"type": "text"}, PICTURE]})
    assert text_of(textless) == "\n[image_url]"


def test_canonical_of_tool_calls() -> None:
    message = canonical(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call('{"q": 1}'), call({"q": 2}, id=None), call(None, id=7), {"function": {"name": "x"}}],
        }
    )
    assert message["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"q": 1}'}},
        {"id": "", "type": "function", "function": {"name": "search", "arguments": '{"q": 2}'}},
        {"id": "7", "type": "function", "function": {"name": "search", "arguments": ""}},
        {"id": "", "type": "function", "function": {"name": "x", "arguments": ""}},
    ]
    for empty in (None, [], ()):
        assert "tool_calls" not in canonical({"role": "assistant", "content": "x", "tool_calls": empty})
    assert "tool_calls" not in canonical({"role": "user", "content": "x", "tool_calls": [call("{}")]})


def test_canonical_keeps_reasoning_under_one_name() -> None:
    for key in ("reasoning_content", "reasoning"):
        assert canonical({"role": "assistant", "content": "x", key: "why"})["reasoning_content"] == "why"
    assert "reasoning_content" not in canonical({"role": "assistant", "content": "x", "reasoning": {"effort": "low"}})
    assert "reasoning_content" not in canonical({"role": "user", "content": "x", "reasoning": "why"})


def test_canonical_of_the_openai_clients_own_objects() -> None:
    chat = pytest.importorskip("openai.types.chat")
    tool = pytest.importorskip("openai.types.chat.chat_completion_message_function_tool_call")
    made = tool.ChatCompletionMessageFunctionToolCall(
        id="c1", type="function", function=tool.Function(name="search", arguments='{"query": "x"}')
    )
    said = chat.ChatCompletionMessage(role="assistant", content=None, tool_calls=[made], reasoning_content="why")
    expected = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call('{"query": "x"}', id="c1")],
        "reasoning_content": "why",
    }
    assert canonical(said) == expected
    assert canonical({"role": "assistant", "content": None, "tool_calls": [made], "reasoning": "why"}) == expected
    assert canonical(chat.ChatCompletionMessage(role="assistant", content="hi")) == {
        "role": "assistant",
        "content": "hi",
    }


@pytest.mark.parametrize(
    "bad",
    [
        {"content": "x"},
        {"role": "robot", "content": "x"},
        {"role": None, "content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"text": "x"}},
        {"role": "assistant", "tool_calls": "search"},
        {"role": "assistant", "tool_calls": [{"id": "a"}]},
        {"role": "assistant", "tool_calls": ["search"]},
        "hello",
        None,
    ],
)
def test_canonical_refuses_what_is_no_message(bad: Any) -> None:
    with pytest.raises(MessageError):
        canonical(bad)


def test_canonical_is_what_it_gives_and_takes_nothing_from_the_caller() -> None:
    raw = {"role": "assistant", "content": None, "tool_calls": [call({"q": [1]})], "reasoning": "why"}
    before = copy.deepcopy(raw)
    once = canonical(raw)
    assert raw == before
    assert canonical(once) == once


@given(st.text(alphabet=st.characters(exclude_categories=())))
@settings(max_examples=300, deadline=None)
def test_clean_gives_utf8_and_touches_nothing_else(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode("utf-8")
    if not any("\ud800" <= c <= "\udfff" for c in text):
        assert cleaned is text
    assert [c for c in cleaned if c != "�"] == [c for c in text if not "\ud800" <= c <= "\udfff" and c != "�"]
    for message in (
        {"role": "user", "content": text},
        {"role": "tool", "content": text, "tool_call_id": text},
        {"role": "user", "content": [{"type": "text", "text": text}, PICTURE]},
        {"role": "assistant", "content": text, "reasoning": text, "tool_calls": [call(text, text, text)]},
        {"role": "assistant", "content": text, "tool_calls": [call({text: text}, text, text)]},
    ):
        json.dumps(canonical(message), ensure_ascii=False).encode("utf-8")


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("", {}),
        ("  \n", {}),
        ("{}", {}),
        (' {"a": [1, null]} ', {"a": [1, None]}),
        ("[]", None),
        ("null", None),
        ('"{}"', None),
        ("5", None),
        ("{a: 1}", None),
        ('{"a": NaN}', None),
        ('{"a": -Infinity}', None),
        ("{} {}", None),
        ("[" * 100_000, None),
        ('{"a":' * 100_000, None),
        ('{"n": ' + "9" * 5000 + "}", None),
    ],
)
def test_parse_arguments(raw: str, value: Any) -> None:
    assert parse_arguments(raw) == value


@pytest.mark.parametrize(
    ("raw", "sent"),
    [
        ('{"b": 1,  "a": 2}', '{"b": 1,  "a": 2}'),
        ("", "{}"),
        (" \t", "{}"),
        ("[1]", '{"invalid_arguments": "[1]"}'),
        ('{"a": NaN}', '{"invalid_arguments": "{\\"a\\": NaN}"}'),
        ("{bad", '{"invalid_arguments": "{bad"}'),
    ],
)
def test_wire_arguments_are_always_one_object_and_good_ones_pass_to_the_byte(raw: str, sent: str) -> None:
    assert wire_arguments(raw) == sent


@given(st.text(max_size=60) | st.recursive(st.none() | st.floats() | st.text(max_size=5), st.lists).map(dump_json))
@settings(max_examples=300, deadline=None)
def test_wire_arguments_satisfy_a_strict_parser(raw: str) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    assert isinstance(json.loads(wire_arguments(raw), parse_constant=refuse), dict)


def test_dump_json_writes_what_json_cannot() -> None:
    assert dump_json({"a": {1, }, "é": "\ud800"}).startswith('{"a": "{1}", "é": ')  # fmt: skip
    assert math.isnan(json.loads(dump_json({"a": float("nan")}))["a"])


# ---------------------------------------------------------------- the wire copy

HISTORY: list[Message] = [
    {"role": "system", "content": "Be exact."},
    {"role": "user", "content": "one"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "", "tool_calls": [call("[1]")], "reasoning_content": "why"},  # type: ignore[list-item]
    {"role": "tool", "tool_call_id": "a", "content": ""},
    {"role": "assistant", "content": "  "},
    {"role": "user", "content": ""},
]


def test_wire_for_a_compatible_server() -> None:
    before = copy.deepcopy(HISTORY)
    assert wire(HISTORY, profile("compatible")) == [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": None, "tool_calls": [call('{"invalid_arguments": "[1]"}')]},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "assistant", "content": "(empty)"},
        {"role": "user", "content": "(empty)"},
    ]
    assert before == HISTORY, "the stored history is never rewritten"


def test_wire_for_the_other_profiles() -> None:
    sent = {name: wire(HISTORY, profile(name)) for name in PROFILES}
    assert [m["content"] for m in sent["openai"][:3]] == ["Be exact.", "one", "two"]
    assert sent["reasoning"][2]["reasoning_content"] == "why"
    assert all("reasoning_content" not in m for name in ("compatible", "openai", "no-system") for m in sent[name])
    assert sent["no-system"][0] == {"role": "user", "content": "Be exact.\n\none\n\ntwo"}
    assert wire(HISTORY[:1], profile("no-system")) == [{"role": "user", "content": "Be exact."}]
    assert wire([HISTORY[0], HISTORY[5]], profile("no-system"))[0] == {"role": "user", "content": "Be exact."}


def test_wire_merges_parts_too_and_never_a_message_with_calls() -> None:
    parts: Message = {"role": "user", "content": [{"type": "text", "text": "see"}, PICTURE]}
    text: Message = {"role": "user", "content": "and"}
    joined = [{"type": "text", "text": "see"}, PICTURE, {"type": "text", "text": "and"}]
    assert wire([parts, text], profile("compatible")) == [{"role": "user", "content": joined}]
    assert wire([text, parts], profile("compatible")) == [{"role": "user", "content": [joined[2], *joined[:2]]}]
    assert len(wire([parts, text], profile("openai"))) == 2
    assert parts["content"] == [{"type": "text", "text": "see"}, PICTURE]
    with_system = wire([HISTORY[0], parts], profile("no-system"))
    assert with_system == [{"role": "user", "content": [{"type": "text", "text": "Be exact."}, *joined[:2]]}]
    calling, said = HISTORY[3], {"role": "assistant", "content": "x"}
    assert len(wire([calling, said, calling], profile("compatible"))) == 3  # type: ignore[list-item]


def test_profiles_by_name_and_by_model() -> None:
    assert profile("openai").merge_same_role is False
    with pytest.raises(ConfigError, match="compatible, openai, reasoning, no-system"):
        profile("strict")
    assert profile_for("google/Gemma-2-9b-it").name == "no-system"
    assert profile_for("deepseek-reasoner").name == "reasoning"
    assert profile_for("moonshotai/Kimi-K2-Thinking").name == "reasoning"
    assert profile_for("qwen3-4b").name == "compatible"


def test_wire_tools_drop_strict_and_leave_the_callers_schema_alone() -> None:
    before = copy.deepcopy(driver.SEARCH)
    sent = wire_tools([driver.SEARCH, {"type": "web_search"}])
    assert "strict" not in sent[0]["function"]
    assert sent[0]["function"]["parameters"] == driver.SEARCH["function"]["parameters"]
    assert sent[1] == {"type": "web_search"}
    assert before == driver.SEARCH
