"""Streams: what arrives when, odd servers, and the same message with a stream as without one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import (
    ASK,
    TOOLS,
    USER,
    Start,
    ask,
    calls,
    critic,
    drive,
    function,
    look,
    result,
    roles,
    starter,
    turn_of,
)
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from upstream import USAGE, Scripted, Upstream, chunk

from caddie_sdk import Budget, Critique
from caddie_sdk.intervention import parse_protocol
from caddie_sdk.relay import sse
from caddie_sdk.relay.adopt import Terms
from caddie_sdk.relay.flow import Relay
from caddie_sdk.testing import tool_call

Upstreams = Callable[..., Upstream]


@pytest.fixture(params=["sync-stream", "proxy-stream"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    with starter(request.param) as made:
        yield made


def piece(index: int | None = 0, id: str | None = None, name: str | None = None, arguments: str | None = None) -> Any:
    """One piece of a tool call, with nothing in it that is not asked for."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    facts = {"index": index, "id": id, "type": "function" if id is not None else None, "function": function}
    return {key: value for key, value in facts.items() if value is not None}


def stream(*pieces: Any, finish: str | None = "tool_calls", **odd: Any) -> Scripted:
    """A reply whose calls arrive in exactly these pieces."""
    chunks = [chunk({"role": "assistant", "content": None}), *(chunk({"tool_calls": [one]}) for one in pieces)]
    return Scripted(raw_chunks=[*chunks, chunk({}, finish)] if finish else chunks, **odd)


# ---------------------------------------------------------------------- real streaming


def test_text_passes_as_it_arrives(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask(), text="Let me ask somebody."), "This is the answer."], strict=True)
    turn = start(upstream, critic()).say(ASK)
    assert turn.texts == ["Let m", "e ask", " some", "body.", "\n\nThis ", "is th", "e ans", "wer."]
    assert {choice.index for one in turn.chunks for choice in one.choices} == {0}
    assert len({one.id for one in turn.chunks}) == 1
    finished = [choice.finish_reason for one in turn.chunks for choice in one.choices if choice.finish_reason]
    assert finished == ["stop"]
    assert [one.usage is None for one in turn.chunks] == [*[True] * (len(turn.chunks) - 1), False]


def test_text_is_there_before_the_upstream_is_done(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([Scripted("0123456789", gap=0.1)])
    caller = start(upstream, critic())
    with caller.client.chat.completions.create(model="m", messages=ASK, stream=True) as events:
        first = next(one for one in events if one.choices[0].delta.content)
        assert first.choices[0].delta.content == "01234"
        assert not upstream.requests[0].finished


def test_the_callers_calls_pass_as_they_arrive_and_indices_stay_contiguous(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(look("1", "a1"), ask("c1"), look("2", "a2"))], strict=True)
    turn = start(upstream, critic()).say(ASK)
    pieces = [one for each in turn.chunks for choice in each.choices for one in choice.delta.tool_calls or ()]
    assert [one.index for one in pieces] == sorted(one.index for one in pieces)
    assert {one.index for one in pieces} == {0, 1}
    assert [(one.id, one.function.name) for one in pieces if one.id] == [("a1", "look"), ("a2", "look")]
    assert len(pieces) > 4


def test_usage_is_told_only_to_those_who_ask(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask()), "Done."], strict=True)
    turn = start(upstream, critic()).say(ASK, stream_options={"include_usage": False})
    assert turn.usage is None
    assert all(one.usage is None for one in turn.chunks)
    assert turn.caddie is not None


def test_usage_that_a_server_tells_unasked_is_told_on(start: Start, upstreams: Upstreams) -> None:
    last = {**chunk({}, "stop"), "usage": USAGE}
    script = [calls(ask()), Scripted(raw_chunks=[chunk({"role": "assistant", "content": "Done."}), last])]
    turn = start(upstreams(script), critic()).say(ASK, stream_options=None)
    assert turn.usage == USAGE


def test_usage_in_the_finish_chunk_adds_up_once(start: Start, upstreams: Upstreams) -> None:
    def said(delta: dict[str, Any], reason: str) -> Scripted:
        return Scripted(raw_chunks=[chunk(delta), {**chunk({}, reason), "usage": USAGE}])

    script = [
        said({"tool_calls": [piece(0, "c1", "call_critic", "{}")]}, "tool_calls"),
        said({"content": "Done."}, "stop"),
    ]
    turn = start(upstreams(script), critic()).say(ASK)
    assert turn.content == "Done."
    assert turn.usage is not None
    assert turn.usage["prompt_tokens"] == 2 * USAGE["prompt_tokens"]  # type: ignore[operator]
    assert sum(one.usage is not None for one in turn.chunks) == 1


def test_what_stands_beside_a_chunk_stays_beside_it(start: Start, upstreams: Upstreams) -> None:
    chunks = [
        {**chunk({"role": "assistant", "content": "One."}), "citations": ["a"], "system_fingerprint": "f"},
        chunk({"content": " Two."}),
        {**chunk({}, "stop"), "timings": {"ms": 3}},
    ]
    turn = start(upstreams([Scripted(raw_chunks=chunks)]), critic()).say(ASK)
    assert [(one.model_extra or {}).get("citations") for one in turn.chunks] == [["a"], None, None]
    assert (turn.chunks[-1].model_extra or {})["timings"] == {"ms": 3}
    assert {one.system_fingerprint for one in turn.chunks} == {"f"}


def test_a_first_chunk_without_choices_does_not_name_the_stream(start: Start, upstreams: Upstreams) -> None:
    chunks = [
        {"id": "", "object": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": [{"n": 1}]},
        chunk({"role": "assistant", "content": "Done."}),
        chunk({}, "stop"),
    ]
    turn = start(upstreams([Scripted(raw_chunks=chunks)]), critic()).say(ASK)
    assert turn.content == "Done."
    assert [one.id for one in turn.chunks][1:] == ["chatcmpl-raw"] * 2


def test_comments_between_events_do_no_harm(start: Start, upstreams: Upstreams) -> None:
    chunks = [": PROCESSING\n\n", chunk({"content": "Done."}), b": still\r\n\r\n", chunk({}, "stop")]
    assert start(upstreams([Scripted(raw_chunks=chunks)]), critic()).say(ASK).seen == ("Done.", [], "stop")


# ---------------------------------------------------------------------- odd calls

ONE, TWO = '{"order": "1"}', '{"order": "2"}'
ODD: dict[str, tuple[list[Any], list[tuple[str, str]]]] = {
    "whole calls in one piece": (
        [piece(0, "a1", "look", ONE), piece(1, "c1", "call_critic", "{}"), piece(2, "a2", "look", TWO)],
        [("look", ONE), ("look", TWO)],
    ),
    "one index for all": (
        [piece(0, "a1", "look", ONE), piece(0, "c1", "call_critic", "{}"), piece(0, "a2", "look", TWO)],
        [("look", ONE), ("look", TWO)],
    ),
    "one index, in pieces": (
        [
            *(piece(0, "a1", "look", ""), piece(0, arguments=ONE[:5]), piece(0, arguments=ONE[5:])),
            *(piece(0, "c1", "call_critic", ""), piece(0, arguments="{}")),
            *(piece(0, "a2", "look", ""), piece(0, arguments=TWO)),
        ],
        [("look", ONE), ("look", TWO)],
    ),
    "no index": (
        [
            *(piece(None, "c1", "call_critic", "{}"), piece(None, "a1", "look", ONE[:5])),
            *(piece(None, arguments=ONE[5:]), piece(None, "a2", "look", TWO)),
        ],
        [("look", ONE), ("look", TWO)],
    ),
    "no index and mixed up": (
        [
            *(piece(None, "a1", "look", ""), piece(None, "a2", "look", "")),
            *(
                piece(None, "a1", arguments=ONE),
                piece(None, "a2", arguments=TWO),
                piece(None, "c1", "call_critic", "{}"),
            ),
        ],
        [("look", ONE), ("look", TWO)],
    ),
    "empty ids": (
        [piece(0, "", "look", ONE), piece(1, "", "call_critic", "{}"), piece(2, "", "look", TWO)],
        [("look", ONE), ("look", TWO)],
    ),
    "empty ids and one index": (
        [piece(0, "", "look", ONE), piece(0, "", "look", TWO), piece(0, "", "call_critic", "{}")],
        [("look", ONE), ("look", TWO)],
    ),
    "empty ids, one index, in pieces": (
        [
            *(piece(0, "", "look", ""), piece(0, arguments=ONE[:5]), piece(0, arguments=ONE[5:])),
            *(piece(0, "", "look", ""), piece(0, arguments=TWO), piece(1, "", "call_critic", "{}")),
        ],
        [("look", ONE), ("look", TWO)],
    ),
    "no ids and no indices": (
        [piece(None, None, "look", ONE), piece(None, None, "call_critic", "{}"), piece(None, None, "look", TWO)],
        [("look", ONE), ("look", TWO)],
    ),
    "one id twice": (
        [piece(0, "a1", "look", ONE), piece(1, "a1", "look", TWO), piece(2, "a1", "call_critic", "{}")],
        [("look", ONE), ("look", TWO)],
    ),
    "indices that start anywhere": (
        [piece(1, "c1", "call_critic", "{}"), piece(7, "a1", "look", ONE), piece(3, "a2", "look", TWO)],
        [("look", ONE), ("look", TWO)],
    ),
    "names in pieces": (
        [
            *(piece(0, "c1", "call", ""), piece(0, name="_critic"), piece(0, arguments="{}")),
            *(piece(1, "a1", "lo"), piece(1, name="ok"), piece(1, arguments=ONE)),
        ],
        [("look", ONE)],
    ),
    "the name in every piece": (
        [
            *(piece(0, "c1", "call_critic", ""), piece(0, "c1", "call_critic", "{}"), piece(1, "a1", "look", ONE[:4])),
            *(piece(1, "a1", "look", ONE[4:]), piece(1, "a1", "look", "")),
        ],
        [("look", ONE)],
    ),
    "mixed up": (
        [
            *(piece(0, "a1", "look", ""), piece(1, "c1", "call_critic", ""), piece(2, "a2", "look", "")),
            *(
                piece(2, arguments=TWO[:3]),
                piece(0, arguments=ONE),
                piece(1, arguments="{}"),
                piece(2, arguments=TWO[3:]),
            ),
        ],
        [("look", ONE), ("look", TWO)],
    ),
    "no arguments": ([piece(0, "c1", "call_critic"), piece(1, "a1", "look")], [("look", "")]),
    "null arguments": (
        [
            {**piece(0, "c1", "call_critic"), "function": {"name": "call_critic", "arguments": None}},
            piece(1, "a1", "look", ONE),
        ],
        [("look", ONE)],
    ),
    "arguments as an object": (
        [
            piece(0, "c1", "call_critic", "{}"),
            {**piece(1, "a1"), "function": {"name": "look", "arguments": {"order": "1"}}},
        ],
        [("look", ONE)],
    ),
    "an unknown tool": ([piece(0, "c1", "call_critic", "{}"), piece(1, "a1", "nope", ONE)], [("nope", ONE)]),
    "a name that begins like ours": ([piece(0, "c1", "call_critic", "{}"), piece(1, "a1", "call_")], [("call_", "")]),
    "cut off": (
        [piece(0, "c1", "call_critic", '{"wh'), piece(1, "a1", "look", ONE[:6])],
        [("look", ONE[:6])],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_calls_are_told_apart(start: Start, upstreams: Upstreams, name: str) -> None:
    pieces, wanted = ODD[name]
    upstream = upstreams([stream(*pieces), "Done."], strict=True)
    caller, judge = start(upstream, one := critic()), one
    turn = caller.say(ASK)
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in turn.calls] == wanted
    assert len(judge.seen) == 1
    assert len({call["id"] for call in turn.calls}) == len(wanted)
    assert turn.finish_reason == "tool_calls"
    caller.say([*ASK, turn.message, *map(result, turn.calls)])
    assert sorted(roles(upstream.chats[1])[2:]) == sorted("MA" + "t" * len(wanted))


@pytest.mark.parametrize("whole", [True, False])
def test_a_guarded_name_in_pieces_is_not_shown_before_it_is_whole(
    start: Start, upstreams: Upstreams, whole: bool
) -> None:
    tools = [*TOOLS, function("refund_all")]
    pieces = [piece(0, "r1", "refund_"), piece(0, name="all"), piece(0, arguments="{}")]
    script = [
        stream(*([piece(0, "r1", "refund_all", "{}")] if whole else pieces)),
        calls(tool_call("refund_all", {}, "r2")),
    ]
    upstream = upstreams(script, strict=True)
    turn = start(upstream, critic(), protocol="guarded:refund_all").say(ASK, tools=tools)
    assert [call["id"] for call in turn.calls] == ["r2"]


@pytest.mark.parametrize("whole", [True, False])
def test_the_answer_to_a_cut_off_call_says_so(upstreams: Upstreams, whole: bool) -> None:
    cut = Scripted(
        calls(ask("c1", '{"wh'), look(id="a1") | {"function": {"name": "look", "arguments": '{"ord'}}),
        finish_reason="length",
    )
    upstream = upstreams([cut, "Done."], strict=True)
    with starter("sync-create" if whole else "sync-stream") as start:
        caller = start(upstream, critic())
        turn = caller.say(ASK)
        assert turn.finish_reason == "length"
        assert [call["function"]["arguments"] for call in turn.calls] == ['{"ord']
        caller.say([*ASK, turn.message, result(turn.calls[0], "no JSON")])
    assert roles(upstream.chats[1]) == "suMAt"


def test_no_finish_reason_is_told_where_the_server_tells_none(start: Start, upstreams: Upstreams) -> None:
    asked = stream(piece(0, "c1", "call_critic", "{}"), finish=None)
    upstream = upstreams([asked, Scripted(raw_chunks=[chunk({"content": "Done."})])], strict=True)
    assert start(upstream, critic()).say(ASK).seen == ("Done.", [], None)


def test_a_finished_stream_needs_no_done_mark(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([Scripted(calls(ask("c1")), end=False), Scripted("Done.", end=False), "Bye."], strict=True)
    caller = start(upstream, critic())
    turn = caller.say(ASK)
    assert turn.seen == ("Done.", [], "stop")
    caller.say([*ASK, turn.message, USER])
    assert roles(upstream.chats[2]) == "suCAau"


def test_lists_of_provider_fields_are_told_again(start: Start, upstreams: Upstreams) -> None:
    thoughts = [{"type": "reasoning.text", "text": text, "index": at} for at, text in enumerate("ab")]
    asked = Scripted(
        raw_chunks=[
            *(chunk({"reasoning_details": [one]}) for one in thoughts),
            chunk({"tool_calls": [piece(0, "c1", "call_critic", "{}")]}, "tool_calls"),
        ]
    )
    upstream = upstreams([asked, "Done."], strict=True)
    start(upstream, critic()).say(ASK)
    assert upstream.chats[1]["messages"][2]["reasoning_details"] == thoughts


def test_an_answer_that_is_no_stream_passes_as_it_is(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([Scripted(body={"detail": "no streams here"})])
    caller = start(upstream, critic())
    raw = caller.client.chat.completions.with_raw_response.create(model="m", messages=ASK, stream=True)
    assert json.loads(raw.http_response.read()) == {"detail": "no streams here"}


# ---------------------------------------------------------------------- with a stream as without one

TEXT = st.text(st.sampled_from("ab é🏔\n"), max_size=8)
ARGUMENTS = st.sampled_from(['{"order": "7"}', "{}", "", '{"ord', '{"order": {"é": [1, 2.0]}}'])
MAKE = st.sampled_from(["look", "refund", "call_critic", "call", "nope"])
CALL = st.builds(tool_call, MAKE, ARGUMENTS, st.sampled_from(["", "x1", "x2", "x3"]))
SPOKEN = st.fixed_dictionaries(
    {"content": TEXT, "tool_calls": st.lists(CALL, max_size=4)}, optional={"reasoning_content": TEXT}
)
NAMES = [*TOOLS, function("call")]


def cut_up(message: dict[str, Any], size: int, style: str) -> Iterator[dict[str, Any]]:
    """The deltas of a message, as servers of several styles send them."""
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        yield from ({name: text[at : at + size]} for at in range(0, len(text), size))
    for index, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if style == "whole":
            yield {"tool_calls": [{"index": index, **call}]}
            continue
        names = [name[at : at + size] for at in range(0, len(name), size)] if style == "names" else [name]
        first = piece(index, call["id"] or None, names[0], "")
        for one in [first, *(piece(index, name=rest) for rest in names[1:])]:
            yield {"tool_calls": [one]}
        for at in range(0, len(arguments), size):
            yield {"tool_calls": [piece(index, arguments=arguments[at : at + size])]}


def as_stream(message: dict[str, Any], size: int, style: str) -> bytes:
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    chunks = [*map(chunk, cut_up(message, size, style)), chunk({}, reason), {**chunk(), "choices": [], "usage": USAGE}]
    return b"".join(map(sse.event, [*chunks, sse.DONE]))


def as_answer(message: dict[str, Any]) -> bytes:
    said = {"role": "assistant", **message, "content": message["content"] or None}
    if not said["tool_calls"]:
        del said["tool_calls"]
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": said, "finish_reason": reason}
    facts = {"id": "chatcmpl-raw", "object": "chat.completion", "created": 1_700_000_000, "model": "scripted"}
    return json.dumps({**facts, "choices": [choice], "usage": USAGE}).encode()


def told(bodies: Sequence[Any]) -> list[Any]:
    """What went upstream, as it matters: servers do not tell an empty text from none."""
    return [
        [
            (
                m["role"],
                m.get("content") or "",
                m.get("tool_calls") or [],
                m.get("tool_call_id"),
                m.get("reasoning_content") or "",
            )
            for m in body["messages"]
        ]
        for body in bodies
    ]


@settings(max_examples=150, deadline=None)
@given(
    script=st.lists(SPOKEN, min_size=1, max_size=5),
    size=st.integers(1, 9),
    cut=st.sampled_from([1, 7, 100, 2**20]),
    style=st.sampled_from(["usual", "names", "whole"]),
    protocol=st.sampled_from(["self-call", "guarded:refund", "guarded:look,refund;self_call=no", "fixed:0", "off"]),
    form=st.sampled_from(["text", "json_object"]),
)
def test_a_stream_says_what_the_whole_answer_says(
    script: list[dict[str, Any]], size: int, cut: int, style: str, protocol: str, form: str
) -> None:
    terms, critique = Terms(parse_protocol(protocol), Budget(max_uses=2)), Critique("As seen.", "Beware.")
    request: dict[str, Any] = {"messages": ASK, "tools": NAMES, "response_format": {"type": form}}
    end: list[Any] = [{"content": "End.", "tool_calls": []}]
    said = [*script, *itertools.repeat(end[0], 12)]
    data, bodies = drive(Relay(terms), request, map(as_answer, said), critique)
    whole = turn_of(ChatCompletion.model_validate_json(data))
    streamed = {**request, "stream": True, "stream_options": {"include_usage": True}}
    data, others = drive(Relay(terms), streamed, (as_stream(one, size, style) for one in said), critique, cut=cut)
    state, reader = ChatCompletionStreamState(), sse.EventReader()
    chunks = [ChatCompletionChunk.model_validate(one.json()) for one in reader.feed(data) if one.data != sse.DONE]
    for one in chunks:
        state.handle_chunk(one)
    turn = turn_of(state.current_completion_snapshot, chunks)
    assert turn.seen == whole.seen
    assert (turn.message.get("reasoning_content") or "") == (whole.message.get("reasoning_content") or "")
    assert turn.usage == whole.usage
    assert turn.caddie == whole.caddie
    assert told(others) == told(bodies)
    assert len(whole.calls) == len({call["id"] for call in whole.calls})
    assert not any(call["function"]["name"] == "call_critic" for call in whole.calls)
