"""The scripted upstream itself, proven by the official client."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState
from upstream import USAGE, Scripted, Upstream, chunk, context_overflow, failure

from caddie_sdk.testing import calls, tool_call

Upstreams = Callable[..., Upstream]
ASK: list[Any] = [{"role": "user", "content": "Which city?"}]
SEARCH = calls(
    tool_call("search", {"query": "the tower of the city"}, "a1"), tool_call("open", {"page": 3}), text="Let me look."
)
REPLIES = {
    "text": "The city is Zürich 🏔, and nothing else.",
    "calls": SEARCH,
    "calls only": calls(tool_call("search", {"query": "x"}, "a1")),
    "reasoning": {"content": "Zürich", "reasoning_content": "Mountains, a lake and banks."},
    "reasoning and calls": {**SEARCH, "reasoning_content": "I should look."},
}
TOOLS: list[Any] = [{"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}]


def client(upstream: Upstream, **options: Any) -> OpenAI:
    return OpenAI(base_url=upstream.url, **{"api_key": "none", "max_retries": 0, **options})


def as_said(message: dict[str, Any], reply: Any) -> None:
    """The message is the scripted one, the ids apart that were left to the server."""
    expected = {"content": reply} if isinstance(reply, str) else reply
    assert (message["content"] or "") == expected["content"]
    assert message.get("reasoning_content") == expected.get("reasoning_content")
    found = message.get("tool_calls") or []
    for call, wanted in zip(found, expected.get("tool_calls", ()), strict=True):
        assert {name: call["function"][name] for name in ("name", "arguments")} == wanted["function"]
        assert call["id"] == wanted["id"] or (not wanted["id"] and call["id"].startswith("call_"))


@pytest.mark.parametrize("name", REPLIES)
def test_a_chat_reply_is_the_same_as_json_and_as_a_stream(upstreams: Upstreams, name: str) -> None:
    upstream = upstreams([REPLIES[name]] * 2, strict=True)
    whole = client(upstream).chat.completions.create(model="m", messages=ASK)
    with client(upstream).chat.completions.stream(
        model="m", messages=ASK, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()
    for completion in (whole, streamed):
        as_said(completion.choices[0].message.to_dict(), REPLIES[name])
        assert completion.choices[0].finish_reason == ("tool_calls" if "calls" in name else "stop")
        assert completion.usage.to_dict() == USAGE
    assert kinds.count("chunk") > 4
    assert upstream.requests[1].chunks == kinds.count("chunk") + 1  # and [DONE]
    assert all(request.finished and not request.aborted for request in upstream.requests)
    upstream.raise_if_unused()


def test_chunks_come_as_real_servers_send_them(upstreams: Upstreams) -> None:
    upstream = upstreams([SEARCH, "Paris"])
    chunks = list(client(upstream).chat.completions.create(model="m", messages=ASK, stream=True))
    deltas = [piece.choices[0].delta for piece in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert all(delta.role is None for delta in deltas[1:])
    said = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    begun = [call for call in said if call.id]
    assert [(call.index, call.function.name, call.function.arguments) for call in begun] == [
        (0, "search", ""),
        (1, "open", ""),
    ]
    assert {(call.function.name, call.id) for call in said if call not in begun} == {(None, None)}
    assert [piece.choices[0].finish_reason for piece in chunks if piece.choices[0].finish_reason] == ["tool_calls"]
    assert all(piece.usage is None for piece in chunks)  # nobody asked
    options: Any = {"model": "m", "messages": ASK, "stream": True, "stream_options": {"include_usage": True}}
    *rest, last = client(upstream).chat.completions.create(**options)
    assert (last.choices, last.usage.total_tokens) == ([], 110)
    assert rest[-1].choices[0].finish_reason == "stop"


def test_choices_and_logprobs(upstreams: Upstreams) -> None:
    upstream = upstreams(lambda body: Scripted("Paris it is", more=["Rome", SEARCH]))
    options: Any = {"model": "m", "messages": ASK, "n": 3, "logprobs": True}
    whole = client(upstream).chat.completions.create(**options)
    state = ChatCompletionStreamState()
    order = []
    for piece in client(upstream).chat.completions.create(**options, stream=True):
        order += [choice.index for choice in piece.choices]
        state.handle_chunk(piece)
    assert order[:3] == [0, 1, 2]
    for completion in (whole, state.get_final_completion()):
        for choice, said in zip(completion.choices, ["Paris it is", "Rome", SEARCH], strict=True):
            as_said(choice.message.to_dict(), said)
        tokens = [token.token for token in completion.choices[0].logprobs.content]
        assert tokens == ["Paris", " it i", "s"]
    assert len(client(upstream).chat.completions.create(model="m", messages=ASK).choices) == 1


def test_a_script_is_used_up_in_order(upstreams: Upstreams) -> None:
    upstream = upstreams(["one", "two"])
    ask = client(upstream).chat.completions.create
    assert ask(model="m", messages=ASK).choices[0].message.content == "one"
    with pytest.raises(AssertionError, match="1 of 2"):
        upstream.raise_if_unused()
    assert ask(model="m", messages=ASK).choices[0].message.content == "two"
    upstream.raise_if_unused()


def test_a_script_that_fails_is_told_to_client_and_test() -> None:
    with (
        pytest.raises(AssertionError, match="the script of 0 replies is used up"),
        Upstream([]) as upstream,
        pytest.raises(openai.BadRequestError, match="used up"),
    ):
        client(upstream).chat.completions.create(model="m", messages=ASK)
    with (
        pytest.raises(AssertionError, match="KeyError: 'colour'"),
        Upstream(lambda body: body["colour"]) as upstream,
        pytest.raises(openai.BadRequestError),
    ):
        client(upstream).chat.completions.create(model="m", messages=ASK)


async def test_many_requests_at_once_are_told_apart(upstreams: Upstreams) -> None:
    async def play(body: dict[str, Any]) -> str:
        while upstream.peak < 200:  # all of them are in the works before one is answered
            await asyncio.sleep(0.01)
        return "you said " + body["messages"][0]["content"]

    upstream = upstreams(play)
    limits = httpx.Limits(max_connections=None)
    async with AsyncOpenAI(
        base_url=upstream.url, api_key="none", http_client=httpx.AsyncClient(limits=limits)
    ) as asking:

        async def ask(number: int) -> str:
            messages: list[Any] = [{"role": "user", "content": f"{number}"}]
            if number % 2:
                stream = await asking.chat.completions.create(model="m", messages=messages, stream=True)
                return "".join([piece.choices[0].delta.content or "" async for piece in stream])
            return (await asking.chat.completions.create(model="m", messages=messages)).choices[0].message.content or ""

        answers = await asyncio.gather(*(ask(number) for number in range(200)))
    assert answers == [f"you said {number}" for number in range(200)]
    assert len(upstream.requests) == 200 == upstream.peak


def test_error_answers(upstreams: Upstreams) -> None:
    upstream = upstreams([failure(429, retry_after=0.05), failure(500), context_overflow(), Scripted(status=0)])
    ask = client(upstream).chat.completions.create
    with pytest.raises(openai.RateLimitError) as limited:
        ask(model="m", messages=ASK)
    assert limited.value.response.headers["retry-after"] == "0.05"
    with pytest.raises(openai.InternalServerError):
        ask(model="m", messages=ASK, stream=True)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192") as over:
        ask(model="m", messages=ASK)
    assert over.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIConnectionError):
        ask(model="m", messages=ASK)


def test_a_body_without_what_is_needed(upstreams: Upstreams) -> None:
    upstream = upstreams(["Paris"])
    for path, body in (("chat/completions", {"model": "m"}), ("responses", ["input"]), ("embeddings", None)):
        answer = httpx.post(f"{upstream.url}/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_required_parameter")
    client(upstream).chat.completions.create(model="m", messages=ASK)
    upstream.raise_if_unused()


def test_a_client_that_retries_gets_the_next_reply(upstreams: Upstreams) -> None:
    upstream = upstreams([failure(429, retry_after=0.05), "Paris"])
    answer = client(upstream, max_retries=1).chat.completions.create(model="m", messages=ASK)
    assert answer.choices[0].message.content == "Paris"
    assert len(upstream.chats) == 2


def test_a_key_is_checked(upstreams: Upstreams) -> None:
    upstream = upstreams(["Paris"], key="secret")
    with pytest.raises(openai.AuthenticationError):
        client(upstream).chat.completions.create(model="m", messages=ASK)
    client(upstream, api_key="secret").chat.completions.create(model="m", messages=ASK)


def test_a_stream_that_dies(upstreams: Upstreams) -> None:
    upstream = upstreams([Scripted("A rather long answer", die_after=3), Scripted("Paris", die_after=0)])
    got: list[Any] = []
    stream = client(upstream).chat.completions.create(model="m", messages=ASK, stream=True)
    with pytest.raises(openai.APIConnectionError):
        got.extend(piece.choices[0].delta.content for piece in stream)
    assert got == ["", "A rat", "her l"]
    with pytest.raises(openai.APIConnectionError):
        client(upstream).chat.completions.create(model="m", messages=ASK)
    upstream.wait_until(lambda: not any(request.finished for request in upstream.requests))
    assert not any(request.aborted for request in upstream.requests)  # the server left, not the client


def test_a_stream_that_ends_early_but_cleanly(upstreams: Upstreams) -> None:
    upstream = upstreams([Scripted("Paris", end=False)])
    with httpx.stream(
        "POST", f"{upstream.url}/chat/completions", json={"model": "m", "messages": ASK, "stream": True}
    ) as answer:
        text = answer.read().decode()
    assert "Paris" in text
    assert "[DONE]" not in text


def test_stalls(upstreams: Upstreams) -> None:
    upstream = upstreams([Scripted("Paris", stall=0.2), Scripted("Paris", gap=0.1), Scripted("Paris", stall=60)])
    started = time.monotonic()
    client(upstream).chat.completions.create(model="m", messages=ASK)
    assert time.monotonic() - started >= 0.2
    at = [time.monotonic() for _ in client(upstream).chat.completions.create(model="m", messages=ASK, stream=True)]
    assert all(later - earlier > 0.08 for earlier, later in itertools.pairwise(at))
    assert len(at) == 3
    with pytest.raises(openai.APITimeoutError):
        client(upstream, timeout=0.2).chat.completions.create(model="m", messages=ASK)
    upstream.wait_until(lambda: upstream.requests[2].aborted)


def test_a_client_that_hangs_up_is_noticed(upstreams: Upstreams) -> None:
    upstream = upstreams([Scripted("A rather long answer", gap=0.05)])
    stream = client(upstream).chat.completions.create(model="m", messages=ASK, stream=True)
    next(iter(stream))
    stream.close()
    upstream.wait_until(lambda: upstream.requests[0].aborted)
    assert not upstream.requests[0].finished
    assert upstream.requests[0].chunks < 4


def test_raw_chunks_are_sent_as_they_are(upstreams: Upstreams) -> None:
    call = {"index": 0, "id": "", "type": "function", "function": {"name": "sea", "arguments": ""}}
    rest = {"index": 0, "function": {"name": "rch", "arguments": '{"query"'}}
    raw = [chunk({"tool_calls": [call]}), ": keep-alive\n\n", chunk({"tool_calls": [rest]}), chunk({}, "length")]
    upstream = upstreams([Scripted(raw_chunks=raw), Scripted(raw_chunks=[b"data: {broken\n\n"])])
    got = list(client(upstream).chat.completions.create(model="m", messages=ASK, stream=True))
    said = [piece.choices[0].delta.tool_calls[0] for piece in got[:2]]
    assert [(call.index, call.id, call.function.name) for call in said] == [(0, "", "sea"), (0, None, "rch")]
    assert got[2].choices[0].finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        list(client(upstream).chat.completions.create(model="m", messages=ASK, stream=True))


def test_a_reply_that_is_cut_off(upstreams: Upstreams) -> None:
    cut = Scripted(calls(tool_call("search", '{"query": "the tow', "a1")), finish_reason="length", usage=None)
    upstream = upstreams([cut, cut, Scripted(calls(tool_call("search")), keep_ids=True)])
    whole = client(upstream).chat.completions.create(model="m", messages=ASK)
    state = ChatCompletionStreamState()
    options: Any = {"model": "m", "messages": ASK, "stream": True, "stream_options": {"include_usage": True}}
    for piece in client(upstream).chat.completions.create(**options):
        state.handle_chunk(piece)
    for completion in (whole, state.current_completion_snapshot):
        choice = completion.choices[0]
        assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == (
            "length",
            '{"query": "the tow',
        )
        assert completion.usage is None
    kept = client(upstream).chat.completions.create(model="m", messages=ASK)
    assert kept.choices[0].message.tool_calls[0].id == ""


USED = [
    {"role": "user", "content": "Which city?"},
    calls(tool_call("search", {"query": "x"}, "a1")),
    {"role": "tool", "tool_call_id": "a1", "content": "found"},
]


@pytest.mark.parametrize(
    ("options", "messages", "complaint"),
    [
        ({"strict": True}, USED[:2], "unanswered"),
        ({"strict": True}, [*ASK, {"role": "system", "content": "late"}], "a system message after the first"),
        ({"refuse": ["second-system"]}, [*ASK, {"role": "system", "content": "late"}], "must be at the beginning"),
        ({"refuse": ["user-after-tool"]}, [*USED, *ASK], "Unexpected role 'user' after role 'tool'"),
        ({"refuse": ["alternating"]}, ASK * 2, "must alternate"),
    ],
)
def test_strict_servers_refuse(upstreams: Upstreams, options: Any, messages: Any, complaint: str) -> None:
    upstream = upstreams(["Paris"], **options)
    with pytest.raises(openai.BadRequestError, match=complaint):
        client(upstream).chat.completions.create(model="m", messages=messages)
    client(upstream).chat.completions.create(model="m", messages=USED)
    assert len(upstream.refused) == 1
    upstream.raise_if_unused()


def test_lenient_servers_do_not(upstreams: Upstreams) -> None:
    upstream = upstreams(["Paris"])
    client(upstream).chat.completions.create(model="m", messages=[*USED, *ASK, *ASK])
    assert upstream.refused == []


def output_of(response: Any) -> dict[str, Any]:
    """A response as the chat message that was scripted."""
    items = [item.to_dict() for item in response.output]
    thoughts = [item["content"][0]["text"] for item in items if item["type"] == "reasoning"]
    made = [item for item in items if item["type"] == "function_call"]
    message: dict[str, Any] = {"content": response.output_text}
    message["tool_calls"] = [
        {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}} for item in made
    ]
    return message | ({"reasoning_content": thoughts[0]} if thoughts else {})


@pytest.mark.parametrize("name", REPLIES)
def test_a_response_is_the_same_as_json_and_as_a_stream(upstreams: Upstreams, name: str) -> None:
    upstream = upstreams([REPLIES[name]] * 3)
    create = client(upstream).responses.create
    whole = create(model="m", input="Which city?", tools=TOOLS)
    events = list(create(model="m", input="Which city?", tools=TOOLS, stream=True))
    with client(upstream).responses.stream(model="m", input="Which city?", tools=TOOLS) as stream:
        gathered: dict[int, str] = {}
        for event in stream:
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                gathered[event.output_index] = event.snapshot
        streamed = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert (events[-1].type, events[0].response.output) == ("response.completed", [])
    for response in (whole, events[-1].response, streamed):
        as_said(output_of(response), REPLIES[name])
        assert (response.status, response.usage.total_tokens) == ("completed", 110)
        assert response.usage.input_tokens_details.cached_tokens == 40
    for index, text in gathered.items():
        item = whole.output[index].to_dict()
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    assert gathered


def test_responses_events_open_and_close_in_order(upstreams: Upstreams) -> None:
    upstream = upstreams([SEARCH])
    kinds: list[str] = []
    for event in client(upstream).responses.create(model="m", input="Which city?", stream=True):
        if event.type not in kinds[-1:]:
            kinds.append(event.type)
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    text = ["output_text.delta", "output_text.done"]
    text = ["output_item.added", "content_part.added", *text, "content_part.done", "output_item.done"]
    assert kinds == [f"response.{kind}" for kind in ["created", "in_progress", *text, *call, *call, "completed"]]


def test_a_response_goes_on_from_the_one_before(upstreams: Upstreams) -> None:
    upstream = upstreams([SEARCH, "Paris", "Rome"], strict=True)
    create = client(upstream).responses.create
    first = create(model="m", input="Which city?")
    made = [item for item in first.output if item.type == "function_call"]
    results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "found"} for call in made]
    with pytest.raises(openai.BadRequestError, match="No tool output found for function call call_"):
        create(model="m", input=results[:1], previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="No tool call found for function call output with call_id a1"):
        create(model="m", input=results)
    second = create(model="m", input=results, previous_response_id=first.id, store=False)
    assert (second.output_text, second.previous_response_id) == ("Paris", first.id)
    kinds = [item.get("type", item.get("role")) for item in upstream.requests[-1].items]
    assert kinds == ["user", "message", *["function_call"] * 2, *["function_call_output"] * 2]
    with pytest.raises(openai.BadRequestError, match="not found"):
        create(model="m", input="And now?", previous_response_id=second.id)
    assert upstream.requests[-1].body["previous_response_id"] == second.id


def test_a_response_that_is_cut_off_or_dies(upstreams: Upstreams) -> None:
    cut = Scripted("Par", finish_reason="length")
    upstream = upstreams([cut, cut, Scripted("Paris", die_after=4), failure(429, retry_after=1)])
    create = client(upstream).responses.create
    whole = create(model="m", input="Which city?")
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert list(create(model="m", input="Which city?", stream=True))[-1].type == "response.incomplete"
    got: list[str] = []
    with pytest.raises(openai.APIConnectionError):
        got.extend(event.type for event in create(model="m", input="Which city?", stream=True))
    assert got[-1] == "response.content_part.added"
    with pytest.raises(openai.RateLimitError):
        create(model="m", input="Which city?", stream=True)


def test_other_paths(upstreams: Upstreams) -> None:
    upstream = upstreams([], models=("small", "large"))
    assert [model.id for model in client(upstream).models.list()] == ["small", "large"]
    found = client(upstream).embeddings.create(model="e", input=["four", "longer"], encoding_format="float")
    assert [entry.embedding for entry in found.data] == [[4, 0], [6, 1]]
    echo = httpx.put(f"{upstream.url}/files/7?part=2&part=3", json={"a": 1}).json()
    assert echo == {"method": "PUT", "path": "/v1/files/7", "query": {"part": ["2", "3"]}, "body": {"a": 1}}
    sent = httpx.post(f"{upstream.url}/audio", content=iter([b"ab", b"cd"]), headers={"x-one": "1"}).json()
    assert sent["body"] == "abcd"  # sent in chunks
    assert upstream.requests[-1].headers["x-one"] == "1"
    assert httpx.head(f"{upstream.url}/files/7").status_code == 200
