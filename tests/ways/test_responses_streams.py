"""Streams of the Responses API past a critic: what shows, when it shows, and what happens when they break."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from responding import (
    ADVICE,
    ASK,
    REFUND,
    SEARCH,
    WAYS,
    Caller,
    assert_nothing_hidden,
    checked,
    events_of,
    function_call,
    items,
    kinds,
    message,
    reasoning,
    result,
    script,
)
from upstream import Scripted, Upstream, failure

from caddie_sdk.testing import calls, tool_call

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own parsing
Upstreams = Callable[..., Upstream]
Callers = Callable[..., Caller]
BARE_ASK = calls(tool_call("call_critic"))
CRITIC, FIND, PAY = function_call("call_critic", "c"), function_call("search", "s"), function_call("refund", "r")
BODY: dict[str, Any] = {"model": "m", "input": "Which river?", "tools": [SEARCH, REFUND]}


@pytest.fixture
def callers() -> Iterator[Callers]:
    """Makes `Caller(...)`s; all of them are closed with the test."""
    with ExitStack() as stack:

        def make(*given: Any, **settings: Any) -> Caller:
            caller = Caller(*given, **settings)
            stack.callback(caller.close)
            return caller

        yield make


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def told(output: Sequence[Any], status: str = "completed", ident: str = "resp_x") -> list[dict[str, Any]]:
    """The events of one upstream stream, to be cut and changed."""
    response = {
        "id": ident, "object": "response", "created_at": 1, "model": "m", "status": status, "output": list(output),
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None, "incomplete_details": None,
        "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
    }  # fmt: skip
    return list(events_of(response))


def until_it_breaks(caller: Caller, **body: Any) -> tuple[list[dict[str, Any]], Exception | None]:
    """The events that arrive, and what the client raises in the end."""
    got: list[dict[str, Any]] = []

    async def read(stream: Any) -> None:
        async for event in stream:
            got.append(event.to_dict())

    try:
        stream = caller.wait(caller.client.responses.create(**{**BODY, **body}, stream=True))
        if hasattr(stream, "__aiter__"):
            caller.wait(read(stream))
        else:
            for event in stream:
                got.append(event.to_dict())
    except openai.APIError as error:
        return got, error
    return got, None


def types(events: Sequence[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


# ---------------------------------------------------------------------- order and time


@pytest.mark.parametrize("opening", [[], [BARE_ASK]], ids=["at once", "after a consultation"])
def test_text_arrives_as_it_comes(upstreams: Upstreams, callers: Callers, way: str, opening: list[Any]) -> None:
    upstream = upstreams([*opening, Scripted("The river is called the Thames.", gap=0.03)])
    caller = callers(way, upstream, [ADVICE])
    seen: list[bool] = []

    def note(event: Any) -> None:
        if event.type == "response.output_text.delta":
            seen.append(upstream.requests[-1].finished)

    async def read(stream: Any) -> None:
        async for event in stream:
            note(event)

    stream = caller.wait(caller.client.responses.create(**BODY, stream=True))
    if way == "async":
        caller.wait(read(stream))
    else:
        for event in stream:
            note(event)
    assert len(seen) == 7
    assert not any(seen[:5])
    assert upstream.requests[-1].finished


def test_the_beginning_is_told_before_the_critic_has_spoken(upstreams: Upstreams, callers: Callers) -> None:
    upstream = upstreams([ASK, "The Thames."])
    asked: list[float] = []

    def advise(state: Any) -> tuple[str, str]:
        time.sleep(0.1)
        asked.append(time.monotonic())
        return ADVICE

    caller = callers("sync", upstream, advise)
    at = {event.type: time.monotonic() for event in caller.client.responses.create(**BODY, stream=True)}
    assert at["response.created"] < asked[0] < at["response.completed"]


TURNS = {
    "hidden first": [CRITIC, FIND],
    "hidden last": [FIND, CRITIC],
    "after a text": [message("Both."), CRITIC, FIND],
    "between": [FIND, CRITIC, PAY],
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_a_hidden_call_leaves_no_gap(upstreams: Upstreams, callers: Callers, way: str, turn: list[Any]) -> None:
    upstream = upstreams(script(items([reasoning("1"), *turn])))
    caller = callers(way, upstream, [ADVICE])
    answer = caller.ask("events")
    assert [item.to_dict() for item in answer.output] == [reasoning("1"), *[one for one in turn if one is not CRITIC]]
    assert len(caller.critic.seen) == 1


@pytest.mark.parametrize("turn", [[PAY, FIND], [FIND, PAY], [PAY, message("Paying.")], [PAY, FIND, message("x")]])
def test_held_items_keep_their_place(upstreams: Upstreams, callers: Callers, way: str, turn: list[Any]) -> None:
    upstream = upstreams(script(items(turn), items([message("Fine.", "msg_2")], "resp_y")))
    caller = callers(way, upstream, [ADVICE], protocol="guarded:refund")
    answer = caller.ask("events")
    shown = [item.to_dict() for item in answer.output]
    kept = [one for one in turn if one is not PAY]
    assert shown == (kept if FIND in turn else [*kept, message("Fine.", "msg_2")])


def test_advice_that_is_fresh_lets_the_guarded_call_through_in_its_place(
    upstreams: Upstreams, callers: Callers, way: str
) -> None:
    again = [message("Paying.", "msg_2"), {**PAY, "id": "fc_2", "call_id": "call_2"}, {**FIND, "id": "fc_3"}]
    upstream = upstreams(script(items([PAY]), items(again, "resp_y")))
    caller = callers(way, upstream, [ADVICE], protocol="guarded:refund")
    answer = caller.ask("events")
    assert [item.to_dict() for item in answer.output] == again


def test_a_document_is_shown_once_and_whole(upstreams: Upstreams, callers: Callers, way: str) -> None:
    form = {"format": {"type": "json_schema", "name": "r", "schema": {"type": "object"}, "strict": True}}
    first = [reasoning("1"), message('{"a": 1}'), CRITIC]
    second = [message('{"a": 2}', "msg_2"), {**FIND, "id": "fc_9"}]
    for how in ("create", "events"):
        upstream = upstreams(script(items(first), items(second, "resp_y")))
        answer = callers(way, upstream, [ADVICE]).ask(how, text=form)
        assert [item.to_dict() for item in answer.output] == [reasoning("1"), *second]
        assert answer.output_text == '{"a": 2}'
        # What the caller does not see, the model still does.
        assert kinds(upstream.requests[-1].body["input"]) == ["user", "reasoning", "assistant", "call", "result"]


def test_the_ids_of_a_stream_lead_on(upstreams: Upstreams, callers: Callers, way: str) -> None:
    upstream = upstreams([ASK, calls(tool_call("search")), "The Thames."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    events, error = until_it_breaks(caller)
    assert error is None
    assert events[0]["response"]["id"] == events[-1]["response"]["id"]
    call = next(e["item"] for e in events if e["type"] == "response.output_item.done" and "call_id" in e["item"])
    back = {"type": "function_call_output", "call_id": call["call_id"], "output": "found"}
    answer = caller.ask("events", [back], previous_response_id=events[0]["response"]["id"])
    assert answer.output_text == "The Thames."
    assert kinds(upstream.requests[-1].items) == ["user", "assistant", "call", "result", "call", "result"]


# ---------------------------------------------------------------------- servers that do it their own way


def test_streams_in_other_hands(upstreams: Upstreams, callers: Callers, way: str) -> None:
    """No numbers, no names, CRLF, comments, an end without items, a [DONE] behind it."""

    def odd(output: list[Any], ident: str) -> Scripted:
        events = told(output, ident=ident)
        events[-1]["response"]["output"] = []
        for event in events:
            del event["sequence_number"]
        raw = [f": ping\r\ndata:{json.dumps(event)}\r\n\r\n" for event in events]
        return Scripted(raw_chunks=[*raw, "data: [DONE]\r\n\r\n"])

    upstream = upstreams(
        [odd([message("Let me ask."), CRITIC], "resp_x"), odd([message("Yes.", "m2"), FIND], "resp_y")]
    )
    caller = callers(way, upstream, [ADVICE])
    events, error = until_it_breaks(caller)
    assert error is None
    assert_nothing_hidden(*events[:-1], events[-1]["response"])
    assert len(caller.critic.seen) == 1
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "message", "function_call"]
    assert all("sequence_number" not in event for event in events)
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]


def test_a_server_that_tells_whole_items_only(upstreams: Upstreams, callers: Callers, way: str) -> None:
    first = [e for e in told([message("Hm."), CRITIC]) if e["type"].endswith((".created", "item.done", ".completed"))]
    second = [e for e in told([FIND], ident="resp_y") if e["type"].endswith((".created", "item.done", ".completed"))]
    caller = callers(way, upstreams([Scripted(raw_chunks=first), Scripted(raw_chunks=second)]), [ADVICE])
    events, error = until_it_breaks(caller)
    assert error is None
    assert_nothing_hidden(*events[:-1], events[-1]["response"])
    assert types(events) == ["created", "output_item.done", "output_item.done", "completed"]
    assert [event["output_index"] for event in events[1:3]] == [0, 1]
    assert len(caller.critic.seen) == 1


def test_events_that_belong_to_no_item_are_numbered_too(upstreams: Upstreams, callers: Callers, way: str) -> None:
    first, second = told([message("Hm."), CRITIC]), told([message("Yes.", "m2")], ident="resp_y")
    first.insert(2, {"type": "response.keepalive", "sequence_number": 99})
    caller = callers(way, upstreams([Scripted(raw_chunks=first), Scripted(raw_chunks=second)]), [ADVICE])
    events, _ = until_it_breaks(caller)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert types(events).count("keepalive") == 1


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize("opening", [[], [items([CRITIC])]], ids=["at once", "after a consultation"])
def test_an_error_event_ends_the_stream(upstreams: Upstreams, callers: Callers, way: str, opening: list[Any]) -> None:
    begun = told([message("The Thames.")], ident="resp_y")[:5]
    error = {"type": "error", "code": "server_error", "message": "it broke", "param": None, "sequence_number": 5}
    upstream = upstreams(script(*opening, Scripted(raw_chunks=[*begun, error])))
    events, raised = until_it_breaks(callers(way, upstream, [ADVICE]))
    assert raised is None  # the client hands this kind over as an event
    assert (events[-1]["type"], events[-1]["message"]) == ("error", "it broke")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert_nothing_hidden(*events)


@pytest.mark.parametrize("opening", [[], [items([CRITIC])]], ids=["at once", "after a consultation"])
def test_a_failed_response_ends_the_stream(
    upstreams: Upstreams, callers: Callers, way: str, opening: list[Any]
) -> None:
    failed = told([message("The Tha"), CRITIC], status="failed", ident="resp_y")
    failed[-1]["response"]["error"] = {"code": "server_error", "message": "it broke"}
    upstream = upstreams(script(*opening, Scripted(raw_chunks=failed), "The Thames."))
    caller = callers(way, upstream, [ADVICE])
    events, raised = until_it_breaks(caller)
    assert raised is None
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "it broke"
    assert events[-1]["response"]["id"] == events[0]["response"]["id"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert_nothing_hidden(*events, events[-1]["response"])
    # The next attempt starts where this one failed: the critic is not asked for the same again.
    assert caller.ask("events").output_text == "The Thames."
    assert len(caller.critic.seen) == len(opening)


@pytest.mark.parametrize("how", ["connection", "end"])
@pytest.mark.parametrize("opening", [[], [BARE_ASK]], ids=["before a consultation", "after one"])
def test_a_stream_that_dies_can_be_tried_again(
    upstreams: Upstreams, callers: Callers, way: str, opening: list[Any], how: str
) -> None:
    dying = Scripted("The Thames.", die_after=5)
    if how == "end":  # the body ends as bodies should, but the last events are missing
        dying = Scripted(raw_chunks=told([message("The Thames.")])[:5])
    upstream = upstreams([*opening, dying, "The Thames."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    events, raised = until_it_breaks(caller)
    assert (raised is not None) == (how == "connection")
    assert "completed" not in types(events)
    assert types(events)[-1] == "output_text.delta"
    assert_nothing_hidden(*events)
    again = caller.ask("events")
    assert again.output_text == "The Thames."
    assert len(caller.critic.seen) == len(opening)


def test_a_stream_that_dies_inside_a_hidden_call_shows_nothing_of_it(
    upstreams: Upstreams, callers: Callers, way: str
) -> None:
    events = told([message("Hm."), CRITIC])
    cut = next(n for n, event in enumerate(events) if "arguments" in event["type"]) + 1
    upstream = upstreams([Scripted(raw_chunks=events, die_after=cut), ASK, "The Thames."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    seen, raised = until_it_breaks(caller)
    assert raised is not None
    assert_nothing_hidden(*seen)
    assert caller.critic.seen == []
    assert caller.ask("events").output_text == "Let me ask.The Thames."


def test_a_refusal_after_a_consultation_arrives_as_an_error(upstreams: Upstreams, callers: Callers, way: str) -> None:
    upstream = upstreams([BARE_ASK, failure(503, "overloaded"), "The Thames."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    events, raised = until_it_breaks(caller)
    assert types(events) == ["created", "in_progress"]
    assert raised is not None
    assert "overloaded" in str(raised)
    assert caller.ask("events").output_text == "The Thames."
    assert len(caller.critic.seen) == 1


def test_an_incomplete_stream_is_shown_as_one(upstreams: Upstreams, callers: Callers, way: str) -> None:
    cut = function_call("search", "s", '{"query": "Lon', status="incomplete")
    upstream = upstreams(script(items([CRITIC]), items([cut], "resp_y", status="incomplete")))
    caller = callers(way, upstream, [ADVICE])
    answer = caller.ask("events")
    assert (answer.status, answer.output[0].arguments) == ("incomplete", '{"query": "Lon')
    assert answer.usage.total_tokens == 220
    # What was cut off is still a call, and goes back in a form that a strict server accepts.
    caller2 = callers(way, upstreams(["Yes."], strict=True), [])
    history = [{"role": "user", "content": "x"}, answer.output[0].model_dump(), result(answer.output[0])]
    assert caller2.ask("events", history).output_text == "Yes."


@pytest.mark.parametrize(
    "last",
    [{"response": 7}, {}, {"response": {"output": [7]}}, {"response": {"output": 7}}, {"response": {"usage": []}}],
    ids=str,
)
def test_an_end_that_cannot_be_read_is_passed_on(upstreams: Upstreams, callers: Callers, last: Any) -> None:
    begun = told([message("Yes.")])[:-1]
    upstream = upstreams([Scripted(raw_chunks=[*begun, {"type": "response.completed", **last}])])
    caller = callers("sync", upstream, [])
    stream = caller.client.responses.with_streaming_response.create(**BODY, stream=True)
    with stream as raw:
        lines = [json.loads(line.removeprefix("data: ")) for line in raw.iter_lines() if line.startswith("data: ")]
    assert types(lines)[-1] == "completed"
    assert types(lines)[:-1] == types(begun)


def test_who_hangs_up_ends_everything(upstreams: Upstreams, callers: Callers, way: str) -> None:
    upstream = upstreams([BARE_ASK, Scripted("The river is called the Thames. " * 4, gap=0.03), "Fine."])
    caller = callers(way, upstream, [ADVICE])

    async def leave(stream: Any) -> None:
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()

    stream = caller.wait(caller.client.responses.create(**BODY, stream=True))
    if way == "async":
        caller.wait(leave(stream))
    else:
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        stream.close()
    upstream.wait_until(lambda: upstream.requests[1].aborted)
    assert caller.ask("events").output_text == "Fine."


def test_two_streams_at_a_time_do_not_mix(upstreams: Upstreams, callers: Callers, way: str) -> None:
    replies = {
        "left": script(items([message("L1", "l1"), CRITIC], "left"), items([message("L2", "l2")], "left2")),
        "right": script(items([CRITIC, FIND], "right")),
    }
    upstream = upstreams(lambda body: replies["left" if "left" in json.dumps(body["input"]) else "right"](body))
    caller = callers(way, upstream, lambda state: ADVICE)
    create = caller.client.responses.create
    left = caller.wait(create(**{**BODY, "input": "left"}, stream=True))
    right = caller.wait(create(**{**BODY, "input": "right"}, stream=True))
    pairs = caller.wait(_one_by_one(left, right)) if way == "async" else list(itertools.zip_longest(left, right))
    one = [first for first, _ in pairs if first is not None]
    other = [second for _, second in pairs if second is not None]
    assert checked(one).output_text == "L1L2"
    assert [item.name for item in checked(other).output] == ["search"]


async def _one_by_one(left: Any, right: Any) -> list[tuple[Any, Any]]:
    pairs: list[tuple[Any, Any]] = []
    lefts, rights = aiter(left), aiter(right)
    while not pairs or pairs[-1] != (None, None):
        pairs.append((await anext(lefts, None), await anext(rights, None)))
    return pairs
