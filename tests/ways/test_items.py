"""Items of the Responses API as a history: grouping, pairing, and no surprise on any JSON."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie_sdk.errors import MessageError
from caddie_sdk.relay.adopt import Said, Terms, Unadopted, adopted
from caddie_sdk.relay.items import CALLS, assistant_turn, chat_tools, flat_tool, open_calls, read_items
from caddie_sdk.relay.ledger import MemoryLedger
from caddie_sdk.relay.responses import ResponsesRequest, restate
from caddie_sdk.testing import check_wire

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("type", "role", "content", "call_id", "name", "arguments", "output", "id", "status", "input", "action", "text")
WORDS = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "custom_tool_call", "custom_tool_call_output",
     "user", "assistant", "developer", "system", "tool", "text", "output_text", "input_image", "refusal", "shell_call",
     "shell_call_output", "item_reference", "mcp_call", "compaction", "x_output", "function", "f", ""]
)  # fmt: skip
CRAZY = st.dictionaries(st.sampled_from(KEYS), WORDS | JSON, max_size=6)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(ident: str, kind: str = "function_call") -> dict[str, Any]:
    more = {"name": "f", "arguments": "{}"} if kind == "function_call" else {"name": "f", "input": "x"}
    return {"type": kind, "call_id": ident, **more}


def output(ident: str, kind: str = "function_call") -> dict[str, Any]:
    return {"type": f"{kind}_output", "call_id": ident, "output": f"of {ident}"}


# ---------------------------------------------------------------------- properties


@given(st.lists(CRAZY, max_size=6) | JSON)
@settings(max_examples=150, deadline=None)
def test_any_json_is_read_or_refused(items: Any) -> None:
    body = {
        "model": "m",
        "input": items,
        "tools": items,
        "text": items,
        "tool_choice": items,
        "instructions": items,
        "previous_response_id": items,
    }
    try:
        request = ResponsesRequest(json.loads(json.dumps(body)))
        request.exchange(Terms(), MemoryLedger(), "")
    except (Unadopted, MessageError):
        pass


@given(st.lists(CRAZY, max_size=8))
@settings(max_examples=150, deadline=None)
def test_every_item_is_in_one_message_in_order(items: list[Any]) -> None:
    try:
        history = read_items(items)
    except (Unadopted, MessageError):
        return
    flat = [raw for one in history for raw in one.raw]
    assert len(flat) == len(items)
    assert all(mine is theirs for mine, theirs in zip(flat, items, strict=True))
    for one, following in itertools.pairwise(history):
        assert not one.message["role"] == following.message["role"] == "assistant"
    for one in history:
        assert len(one.raw) == 1 or one.message["role"] == "assistant"


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Whole conversations as agents have them: turns of reasoning, texts, calls of several kinds, and their results."""
    items: list[dict[str, Any]] = [user("Task")]
    count = 0
    for _ in range(draw(st.integers(0, 4))):
        made: list[tuple[str, str]] = []
        turn: list[dict[str, Any]] = []
        for what in draw(
            st.lists(st.sampled_from(["think", "say", "call", "custom", "built in"]), min_size=1, max_size=4)
        ):
            count += 1
            if what in ("call", "custom"):
                made.append((f"c{count}", "function_call" if what == "call" else "custom_tool_call"))
                turn.append(call(*made[-1]))
            else:
                kinds = {"think": {"type": "reasoning", "id": f"rs{count}", "summary": []}, "say": said(f"say {count}")}
                turn.append(kinds.get(what, {"type": "web_search_call", "id": f"ws{count}", "status": "completed"}))
        items += turn
        results = [output(*one) for one in made]
        items += draw(st.permutations(results))
        if not made or draw(st.booleans()):
            items.append(user(f"user {count}"))
    return items


@given(conversations())
@settings(max_examples=100, deadline=None)
def test_turns_and_results_pair_up_and_come_back_as_they_were(items: list[dict[str, Any]]) -> None:
    history = read_items(items)
    session = adopted(history, [], Terms())
    messages = session.transcript()
    check_wire([message for message in messages if message["content"] or message.get("tool_calls")])
    body = {"model": "m", "input": items}
    request = ResponsesRequest(body)
    sent = request.upstream(request.exchange(Terms(), MemoryLedger(), ""))["input"]
    # Results come back in the order of their calls; nothing else moves or changes.
    assert sorted(map(json.dumps, sent)) == sorted(map(json.dumps, items))
    rest = [item for item in sent if not item.get("type", "").endswith("_output")]
    assert rest == [item for item in items if not item.get("type", "").endswith("_output")]


# ---------------------------------------------------------------------- cases


def test_a_string_is_a_user_turn() -> None:
    assert read_items("Hi") == [Said(user("Hi"), (user("Hi"),))]  # type: ignore[arg-type]


def test_reasoning_texts_and_calls_of_one_turn_are_one_message() -> None:
    turn = [{"type": "reasoning", "id": "rs"}, said("A"), call("c1"), said("B"), call("c2")]
    history = read_items([user("x"), *turn, output("c1"), output("c2"), user("y")])
    assert [one.message["role"] for one in history] == ["user", "assistant", "tool", "tool", "user"]
    message = history[1].message
    assert message["content"] == "A\n\nB"
    assert [one["id"] for one in message["tool_calls"]] == ["c1", "c2"]
    assert history[1].raw == tuple(turn)
    assert [one.message["content"] for one in history[2:4]] == ["of c1", "of c2"]


@pytest.mark.parametrize("kind", [None, "message", ""])
def test_a_message_may_leave_its_type_out(kind: str | None) -> None:
    assert read_items([{"type": kind, "role": "user", "content": "x"}])[0].message == user("x")


def test_the_texts_of_a_refusal_and_of_parts_are_read() -> None:
    parts = [{"type": "output_text", "text": "A"}, {"type": "refusal", "refusal": "No."}]
    assert read_items([{"role": "assistant", "content": parts}])[0].message["content"] == "A\nNo."
    assert read_items([{"role": "developer", "content": "Be brief."}])[0].message["role"] == "system"


@pytest.mark.parametrize("kind", CALLS)
def test_calls_of_every_kind_wait_for_their_result(kind: str) -> None:
    item, back = call("c1", kind), output("c1", kind)
    history = read_items([user("x"), item, back])
    assert history[1].message["tool_calls"][0]["function"]["name"] == "f"
    assert adopted(history, [], Terms()).phase == "model"
    assert open_calls([item]) == [item]
    # A server that runs its call itself puts the result beside it: nothing is left to wait for.
    assert open_calls([item, back]) == []
    assert "tool_calls" not in assistant_turn([item, back, said("Done")])


@pytest.mark.parametrize(
    ("given_output", "text"),
    [
        ("plain", "plain"),
        ([{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}], "A\nB"),
        ([{"stdout": "hello", "stderr": ""}], '[{"stdout": "hello", "stderr": ""}]'),
        (None, "failed"),
        ([], ""),
    ],
)
def test_results_of_every_form_can_be_read(given_output: Any, text: str) -> None:
    item = {"type": "shell_call_output", "call_id": "c", "output": given_output, "status": "failed"}
    assert read_items([user("x"), call("c", "shell_call"), item])[2].message["content"] == text


@pytest.mark.parametrize(
    "item", [{"type": "item_reference", "id": "x"}, {"type": "tool_search_output"}, "text", 7, None]
)
def test_what_cannot_be_told_is_refused(item: Any) -> None:
    with pytest.raises(Unadopted):
        read_items([user("x"), item])
    with pytest.raises(MessageError):
        read_items([{"role": "robot", "content": "x"}])


def test_the_sessions_own_results_have_the_type_that_their_call_wants() -> None:
    kinds: dict[str, str] = {}
    turn = assistant_turn([call("c1", "custom_tool_call"), call("c2")])
    restate(turn, (call("c1", "custom_tool_call"), call("c2")), kinds)
    held = [restate({"role": "tool", "tool_call_id": one, "content": "later"}, None, kinds)[0] for one in ("c1", "c2")]
    assert [item["type"] for item in held] == ["custom_tool_call_output", "function_call_output"]


def test_tools_in_both_forms() -> None:
    flat = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    chat = chat_tools([flat, {"type": "web_search"}, "x", {"type": "custom", "name": "p"}])
    assert chat == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    ]
    assert flat_tool(chat[0]) == {key: value for key, value in flat.items() if key != "strict"}
