"""`ChatEndpoint` against a real server that misbehaves: retries, deadlines, cancellation, errors (SPEC §10)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from rough_server import MODELS, Answer, Request, Server, chat, rough_server

from caddie_sdk import CallModel, ChatEndpoint, Usage
from caddie_sdk.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    EndpointUnavailable,
)
from caddie_sdk.model import ChatModel

KEY = "sk-very-secret-key"
ASK = CallModel([{"role": "user", "content": "hi"}])
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}

Complete = Callable[..., Any]


def _sync(endpoint: ChatEndpoint, call: CallModel = ASK) -> Any:
    return endpoint.complete(call)


def _async(endpoint: ChatEndpoint, call: CallModel = ASK) -> Any:
    return asyncio.run(endpoint.acomplete(call))


@pytest.fixture(params=[_sync, _async], ids=["sync", "async"])
def complete(request: pytest.FixtureRequest) -> Complete:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caddie_sdk.endpoint._BACKOFF", 0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def failure(complete: Complete, endpoint: ChatEndpoint, kind: type[EndpointError]) -> str:
    """The text of the error, which must be of exactly this kind, name the URL and hide the key."""
    with pytest.raises(EndpointError) as caught:
        complete(endpoint)
    assert type(caught.value) is kind, repr(caught.value)
    text = str(caught.value)
    assert endpoint.base_url in text
    assert caught.value.url == endpoint.base_url
    assert KEY not in text
    return text


# ------------------------------------------------------------------ a call that works


def test_reply(complete: Complete) -> None:
    with rough_server() as server:
        reply = complete(ChatEndpoint(server.url, "small", api_key=KEY))
    assert reply.message == {"role": "assistant", "content": "hello"}
    assert (reply.usage, reply.model, reply.truncated) == (Usage(5, 2, 3, 1), "small", False)
    (request,) = server.requests
    assert request.path == "/v1/chat/completions"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.body == {"model": "small", "messages": [{"role": "user", "content": "hi"}]}


def test_is_a_chat_model() -> None:
    assert isinstance(ChatEndpoint("http://127.0.0.1:1", "m"), ChatModel)


def test_request_fields() -> None:
    params = {"temperature": 0.5, "seed": 3, "extra_body": {"top_k": 5}}
    with rough_server() as server:
        endpoint = ChatEndpoint(server.url, "small", params=params)
        endpoint.complete(CallModel(ASK.messages, [TOOL]))
        endpoint.complete(CallModel(ASK.messages, [TOOL], "required"))
        endpoint.complete(CallModel(ASK.messages, [], "none"))
        asyncio.run(endpoint.chat(ASK.messages, params={"temperature": 0, "max_tokens": 7}))
    first, second, third, fourth = (request.body for request in server.chats)
    assert first == {
        "model": "small", "messages": ASK.messages, "temperature": 0.5, "seed": 3, "top_k": 5, "tools": [TOOL]
    }  # fmt: skip
    assert second["tool_choice"] == "required"
    assert "tools" not in third
    assert "tool_choice" not in third
    assert (fourth["temperature"], fourth["seed"], fourth["max_tokens"]) == (0, 3, 7)
    assert endpoint.params == params


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1//"])
def test_base_url_with_and_without_v1(suffix: str) -> None:
    with rough_server() as server:
        endpoint = ChatEndpoint(server.url + suffix)
        assert endpoint.check() == "small"
        endpoint.complete(ASK)
    assert [request.path for request in server.requests] == ["/v1/models", "/v1/chat/completions"]


@pytest.mark.parametrize(
    ("suffix", "path"), [("/api", "/api/v1"), ("/api/v3", "/api/v3"), ("/openai/v1", "/openai/v1")]
)
def test_base_url_below_a_path(suffix: str, path: str) -> None:
    with rough_server() as server:
        ChatEndpoint(server.url + suffix, "small").complete(ASK)
    assert server.requests[0].path == f"{path}/chat/completions"


# ------------------------------------------------------------------ odd answers that can be used


@pytest.mark.parametrize(
    ("change", "content"),
    [
        ({"message": {"role": "assistant", "content": None}}, ""),
        ({"message": {"role": "assistant"}}, ""),
        ({"message": {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None}}, "x"),
        ({"message": {"role": "assistant", "content": "x", "tool_calls": []}}, "x"),
        ({"message": {"role": "assistant", "content": [{"type": "text", "text": "x"}]}}, "x"),
        ({"message": {"role": "assistant", "content": "x", "unknown": {"a": 1}}, "finish_reason": None}, "x"),
        ({"message": {"role": "assistant", "content": "\ud83d\ude00 é"}}, "😀 é"),
    ],
    ids=repr,
)
def test_odd_messages(change: Any, content: str, complete: Complete) -> None:
    with rough_server(Answer(chat(**change))) as server:
        reply = complete(ChatEndpoint(server.url, "small"))
    assert reply.message["content"] == content
    assert "tool_calls" not in reply.message
    assert len(server.chats) == 1


@pytest.mark.parametrize(
    "usage",
    [None, {}, {"prompt_tokens": None}, {"prompt_tokens": "5"}, {"prompt_tokens": -1, "prompt_tokens_details": None}],
    ids=repr,
)
def test_missing_usage_counts_as_a_call(usage: Any, complete: Complete) -> None:
    with rough_server(Answer({**chat(), "usage": usage})) as server:
        assert complete(ChatEndpoint(server.url, "small")).usage == Usage(calls=1)


def test_tool_calls_and_reasoning_are_read(complete: Complete) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "search", "arguments": '{"query":"a"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    with rough_server(Answer(chat(message=message, finish_reason="length"))) as server:
        reply = complete(ChatEndpoint(server.url, "small"))
    assert reply.message == {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"}
    assert reply.truncated is True


def test_missing_model_name_in_the_answer(complete: Complete) -> None:
    body = chat()
    del body["model"]
    with rough_server(Answer(body)) as server:
        assert complete(ChatEndpoint(server.url, "small")).model == ""


# ------------------------------------------------------------------ answers that cannot be used


@pytest.mark.parametrize(
    "answer",
    [
        Answer(b"<html>hello</html>", content_type="text/html"),
        Answer(b"<html>hello</html>"),
        Answer(b""),
        Answer(b"{not json"),
        Answer(b'{"choices": \xff}'),
        Answer([1, 2]),
        Answer("text"),
        Answer(None),
        Answer(b"null"),
        Answer({}),
        Answer({"choices": []}),
        Answer({"choices": None}),
        Answer({"choices": [None]}),
        Answer({"choices": [{}]}),
        Answer({"choices": [{"message": None}]}),
        Answer({"choices": [{"message": {"content": "no role"}}]}),
        Answer({"choices": [{"message": {"role": "assistant", "content": 5}}]}),
        Answer({"choices": [{"message": {"role": "assistant", "tool_calls": [{"id": "x"}]}}]}),
        Answer({**chat(), "usage": "many"}),
        Answer({**chat(), "usage": [1]}),
        Answer({"error": {"message": "told as a success"}}),
    ],
    ids=lambda answer: repr(answer.body)[:40],
)
def test_answer_that_is_no_completion(answer: Answer, complete: Complete) -> None:
    with rough_server(answer) as server:
        text = failure(complete, ChatEndpoint(server.url, "small", api_key=KEY, attempts=2), EndpointUnavailable)
    # Nonsense may come from a proxy that is starting up, so it is tried again, and no more often than anything else.
    assert len(server.chats) == 2
    assert "OpenAI-compatible" in text or "cannot be read" in text or "check that the server runs" in text


# ------------------------------------------------------------------ retries


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 529])
def test_transient_failures_are_tried_again(status: int, complete: Complete) -> None:
    bad = Answer({"error": {"message": "later"}}, status)
    with rough_server([bad, bad, Answer()]) as server:
        assert complete(ChatEndpoint(server.url, "small")).message["content"] == "hello"
        assert len(server.chats) == 3
    assert [request.body for request in server.chats] == [server.chats[0].body] * 3


@pytest.mark.parametrize("attempts", [1, 2, 4])
@pytest.mark.parametrize("status", [429, 500])
def test_attempts_are_counted(status: int, attempts: int, complete: Complete) -> None:
    with rough_server(Answer({"error": {"message": f"shelf {KEY} is broken"}}, status)) as server:
        text = failure(complete, ChatEndpoint(server.url, "small", api_key=KEY, attempts=attempts), EndpointUnavailable)
    assert len(server.chats) == attempts
    assert str(status) in text
    assert "shelf *** is broken" in text


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (400, "refused the request (400): Error code: 400 - no such field"),
        (401, "refused the API key (401); check the key"),
        (403, "refused the API key (403); check the key"),
        (404, "does not know the model 'small' or the path; check both"),
        (405, "refused the request (405)"),
        (413, "refused the request (413)"),
        (422, "refused the request (422)"),
    ],
)
def test_refusals_are_not_tried_again(status: int, says: str, complete: Complete) -> None:
    with rough_server(Answer({"error": {"message": f"no such field, {KEY}"}}, status)) as server:
        text = failure(complete, ChatEndpoint(server.url, "small", api_key=KEY, attempts=5), EndpointRefused)
    assert says in text
    assert len(server.chats) == 1


def test_refusal_with_a_body_that_is_no_json(complete: Complete) -> None:
    with rough_server(Answer(b"<h1>No</h1>", 400, content_type="text/html")) as server:
        text = failure(complete, ChatEndpoint(server.url, "small", api_key=KEY), EndpointRefused)
    assert "<h1>No</h1>" in text


def test_long_error_text_is_cut(complete: Complete) -> None:
    with rough_server(Answer({"error": {"message": "word " * 5000}}, 400)) as server:
        assert len(failure(complete, ChatEndpoint(server.url, "small"), EndpointRefused)) < 500


def test_connection_refused_is_tried_again(complete: Complete) -> None:
    """The server comes up while we wait for it."""
    port = free_port()
    endpoint = ChatEndpoint(f"http://127.0.0.1:{port}", "small", attempts=200, timeout=10)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, endpoint)
        time.sleep(0.3)
        assert not waiting.done()
        with rough_server(port=port):
            assert waiting.result(10).message["content"] == "hello"


def test_connection_refused_to_the_end(complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    connect = asyncio.BaseEventLoop.create_connection

    async def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        tried.append(1)
        return await connect(self, *args, **kwargs)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", counted)
    endpoint = ChatEndpoint(f"http://127.0.0.1:{free_port()}", "small", api_key=KEY, attempts=4)
    text = failure(complete, endpoint, EndpointUnavailable)
    assert "cannot reach" in text
    assert "check that the server runs and that the URL is right" in text
    assert len(tried) == 4


def test_unknown_host(complete: Complete) -> None:
    text = failure(complete, ChatEndpoint("http://nowhere.invalid", "m", attempts=1, timeout=20), EndpointUnavailable)
    assert "cannot reach http://nowhere.invalid/v1" in text


def test_connection_cut_before_the_answer(complete: Complete) -> None:
    with rough_server([Answer(None), Answer(None), Answer()]) as server:
        assert complete(ChatEndpoint(server.url, "small")).message["content"] == "hello"
    assert len(server.chats) == 3


def test_connection_cut_inside_the_answer(complete: Complete) -> None:
    cut = Answer(b'{"choices"', headers={"content-length": "500", "connection": "close"})

    def behave(request: Request) -> Answer:
        return cut if len(server.chats) == 1 else Answer()

    with rough_server(behave) as server:
        started = time.monotonic()
        # The server above keeps the connection open after a short body, so this is a hang until the deadline.
        with pytest.raises(EndpointTimeout):
            complete(ChatEndpoint(server.url, "small", timeout=0.4))
        assert time.monotonic() - started < 2


def test_waits_between_attempts_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with rough_server(Answer({"error": {"message": "broken"}}, 500)) as server, pytest.raises(EndpointUnavailable):
        ChatEndpoint(server.url, "small").complete(ASK)
    first, second, third = (request.at for request in server.chats)
    assert 0.2 <= second - first < 0.8
    assert 0.4 <= third - second < 1.2


# ------------------------------------------------------------------ Retry-After


def _busy(value: str) -> Answer:
    return Answer({"error": {"message": "busy"}}, 429, {"retry-after": value})


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_in_seconds(status: int, complete: Complete) -> None:
    busy = Answer({"error": {"message": "busy"}}, status, {"Retry-After": "1"})
    with rough_server([busy, Answer()]) as server:
        complete(ChatEndpoint(server.url, "small"))
    first, second = server.chats
    assert 1.0 <= second.at - first.at < 2.0


def test_retry_after_as_a_date(complete: Complete) -> None:
    def behave(request: Request) -> Answer:
        until = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        return _busy(until) if len(server.chats) == 1 else Answer()

    with rough_server(behave) as server:
        complete(ChatEndpoint(server.url, "small"))
    first, second = server.chats
    # An HTTP date has whole seconds, so up to one of the two is lost.
    assert 0.8 <= second.at - first.at < 3.0


@pytest.mark.parametrize(
    "value", ["0", "-5", "Wed, 21 Oct 2015 07:28:00 GMT", "soon", "", "Wed, 99 Foo 2015 07:28:00 GMT", "2015-10-21"]
)
def test_retry_after_that_asks_for_nothing_or_cannot_be_read(value: str, complete: Complete) -> None:
    started = time.monotonic()
    with rough_server([_busy(value), Answer()]) as server:
        complete(ChatEndpoint(server.url, "small"))
    assert len(server.chats) == 2
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("value", ["nan", "inf", "1e400"])
def test_retry_after_that_is_no_finite_number(value: str, complete: Complete) -> None:
    with rough_server([_busy(value), Answer()]) as server:
        complete(ChatEndpoint(server.url, "small", timeout=1))
    assert len(server.chats) == 2


def test_retry_after_beyond_the_deadline_tells_what_the_server_said(complete: Complete) -> None:
    """Waiting would only turn '429' into 'no answer'."""
    started = time.monotonic()
    with rough_server(_busy("30")) as server:
        endpoint = ChatEndpoint(server.url, "small", api_key=KEY, timeout=2)
        with pytest.raises(EndpointUnavailable, match="answered 429") as caught:
            complete(endpoint)
    assert caught.value.retry_after == 30
    assert len(server.chats) == 1
    assert time.monotonic() - started < 1.5


# ------------------------------------------------------------------ deadlines


@pytest.mark.parametrize(
    "answer",
    [
        Answer(hang="headers"),
        Answer(hang="body"),
        Answer(drip=0.1),
        Answer(b" " * 1000, drip=0.05),
        Answer(pause=30),
    ],
    ids=["hangs before the headers", "hangs in the body", "drips", "drips blanks", "slow"],
)
def test_deadline(answer: Answer, complete: Complete) -> None:
    with rough_server(answer) as server:
        endpoint = ChatEndpoint(server.url, "small", api_key=KEY, timeout=0.5)
        started = time.monotonic()
        text = failure(complete, endpoint, EndpointTimeout)
        assert 0.4 < time.monotonic() - started < 2
        assert "no answer within 0.5 s" in text
        assert "timeout" in text
        server.wait_until(lambda: server.left == 1)
        server.wait_until(lambda: server.open == 0)
    assert len(server.chats) == 1


def test_server_that_accepts_and_says_nothing(complete: Complete) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = ChatEndpoint(f"http://127.0.0.1:{silent.getsockname()[1]}", "small", timeout=0.4)
        started = time.monotonic()
        failure(complete, endpoint, EndpointTimeout)
        assert time.monotonic() - started < 2


def test_deadline_spans_all_attempts(complete: Complete) -> None:
    with rough_server(Answer({"error": {"message": "broken"}}, 500, pause=0.2)) as server:
        started = time.monotonic()
        with pytest.raises(EndpointError) as caught:
            complete(ChatEndpoint(server.url, "small", attempts=1000, timeout=1))
        assert time.monotonic() - started < 2
    assert isinstance(caught.value, EndpointTimeout | EndpointUnavailable)
    assert 3 <= len(server.chats) <= 5


def test_deadline_of_one_call_may_exceed_the_endpoints_own() -> None:
    with rough_server(Answer(pause=0.6)) as server:
        endpoint = ChatEndpoint(server.url, "small", timeout=0.2)
        assert asyncio.run(endpoint.chat(ASK.messages, timeout=5)).message["content"] == "hello"
        with pytest.raises(EndpointTimeout, match=r"within 0\.2 s"):
            asyncio.run(endpoint.chat(ASK.messages))
        with pytest.raises(EndpointTimeout, match=r"within 0\.1 s"):
            asyncio.run(endpoint.chat(ASK.messages, timeout=0.1))


def test_endpoint_is_usable_after_a_timeout(complete: Complete) -> None:
    with rough_server([Answer(hang="headers"), Answer()]) as server:
        endpoint = ChatEndpoint(server.url, "small", timeout=0.3)
        with pytest.raises(EndpointTimeout):
            complete(endpoint)
        assert complete(endpoint).message["content"] == "hello"


# ------------------------------------------------------------------ cancellation


def test_cancellation_closes_the_connection() -> None:
    async def cancelled(endpoint: ChatEndpoint, server: Server) -> None:
        task = asyncio.create_task(endpoint.acomplete(ASK))
        while not server.chats:
            await asyncio.sleep(0.01)
        assert server.open == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The loop stays up: it is the cancellation that closes, not the end of the program.
        await asyncio.to_thread(server.wait_until, lambda: server.left == 1)
        assert server.open == 0

    with rough_server(Answer(hang="headers")) as server:
        asyncio.run(cancelled(ChatEndpoint(server.url, "small"), server))
    assert len(server.chats) == 1


def test_cancellation_between_attempts() -> None:
    async def cancelled(endpoint: ChatEndpoint, server: Server) -> None:
        task = asyncio.create_task(endpoint.acomplete(ASK))
        while not server.chats:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.5)

    with rough_server(_busy("0.4")) as server:
        asyncio.run(cancelled(ChatEndpoint(server.url, "small", attempts=50), server))
    assert len(server.chats) == 1


def test_interrupt_of_a_blocking_call_closes_the_connection() -> None:
    """Ctrl-C in a blocking call."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with rough_server(Answer(hang="headers")) as server:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            with pytest.raises(KeyboardInterrupt):
                ChatEndpoint(server.url, "small", timeout=20).complete(ASK)
            server.wait_until(lambda: server.left == 1)
            server.wait_until(lambda: server.open == 0)
    finally:
        signal.signal(signal.SIGUSR1, before)


# ------------------------------------------------------------------ clients, loops, processes


def test_connection_is_kept_between_calls() -> None:
    async def calls(endpoint: ChatEndpoint) -> None:
        for _ in range(5):
            await endpoint.acomplete(ASK)

    with rough_server() as server:
        asyncio.run(calls(ChatEndpoint(server.url, "small")))
        assert server.connections == 1
        blocking = ChatEndpoint(server.url, "small")
        for _ in range(5):
            blocking.complete(ASK)
        assert server.connections == 2


def test_one_client_for_each_loop() -> None:
    barrier = threading.Barrier(2, timeout=10)

    async def work(endpoint: ChatEndpoint) -> Any:
        await endpoint.acomplete(ASK)
        mine = await endpoint._clients.get()
        await asyncio.to_thread(barrier.wait)
        await endpoint.acomplete(ASK)
        assert await endpoint._clients.get() is mine
        await asyncio.to_thread(barrier.wait)
        return mine

    with rough_server() as server, ThreadPoolExecutor(2) as pool:
        endpoint = ChatEndpoint(server.url, "small")
        one, two = pool.map(lambda _: asyncio.run(work(endpoint)), range(2))
        assert one is not two
        assert server.connections == 2
    assert len(server.chats) == 4


def test_clients_of_finished_loops_go() -> None:
    """An application that calls `asyncio.run` for each request must not collect sockets."""
    with rough_server() as server:
        endpoint = ChatEndpoint(server.url, "small")
        for _ in range(10):
            asyncio.run(endpoint.acomplete(ASK))
            # The loop's end closes the connection, not some later collection of garbage.
            server.wait_until(lambda: server.open == 0)
        gc.collect()
        assert len(endpoint._clients) <= 1


def test_aclose() -> None:
    async def work(endpoint: ChatEndpoint, server: Server) -> None:
        await endpoint.acomplete(ASK)
        await endpoint.aclose()
        await asyncio.to_thread(server.wait_until, lambda: server.open == 0)
        await endpoint.aclose()
        assert (await endpoint.acomplete(ASK)).message["content"] == "hello"
        await endpoint.aclose()

    with rough_server() as server:
        asyncio.run(work(ChatEndpoint(server.url, "small"), server))


def test_two_hundred_calls_at_once() -> None:
    def echo(request: Request) -> Answer:
        return Answer(chat(request.body["messages"][0]["content"]), pause=0.1)

    async def all_of_them(endpoint: ChatEndpoint) -> list[Any]:
        calls = [CallModel([{"role": "user", "content": f"number {n}"}]) for n in range(200)]
        return await asyncio.gather(*(endpoint.acomplete(call) for call in calls))

    with rough_server(echo) as server:
        replies = asyncio.run(all_of_them(ChatEndpoint(server.url, "small")))
        assert [reply.message["content"] for reply in replies] == [f"number {n}" for n in range(200)]
        blocking = ChatEndpoint(server.url, "small")
        calls = [CallModel([{"role": "user", "content": f"number {n}"}]) for n in range(60)]
        with ThreadPoolExecutor(60) as pool:
            replies = list(pool.map(blocking.complete, calls))
        assert [reply.message["content"] for reply in replies] == [f"number {n}" for n in range(60)]


def test_blocking_call_inside_a_running_loop() -> None:
    async def cell(endpoint: ChatEndpoint) -> Any:
        return endpoint.complete(ASK)

    with rough_server() as server:
        assert asyncio.run(cell(ChatEndpoint(server.url, "small"))).message["content"] == "hello"


def _in_child(work: Callable[[], str]) -> str:
    """What `work` gives in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, work().encode())
        except BaseException as error:  # noqa: BLE001 - the child must end here, whatever happened
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    until = time.monotonic() + 15
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the forked child hangs")
        time.sleep(0.02)
    with os.fdopen(read, "rb") as pipe:
        return pipe.read().decode()


def test_works_after_a_fork() -> None:
    with rough_server() as server:
        endpoint = ChatEndpoint(server.url, "small", timeout=8)
        assert endpoint.complete(ASK).message["content"] == "hello"
        assert _in_child(lambda: str(endpoint.complete(ASK).message["content"])) == "hello"
        grandchild = _in_child(lambda: _in_child(lambda: str(endpoint.complete(ASK).message["content"])))
        assert grandchild == "hello"
        # The parent's own connection was not used by the children.
        assert endpoint.complete(ASK).message["content"] == "hello"
    assert len(server.chats) == 4
    assert server.connections == 3


def test_works_after_a_fork_while_calls_are_under_way() -> None:
    with rough_server(Answer(pause=0.3)) as server, ThreadPoolExecutor(8) as pool:
        endpoint = ChatEndpoint(server.url, "small", timeout=8)
        running = [pool.submit(endpoint.complete, ASK) for _ in range(8)]
        server.wait_until(lambda: len(server.chats) == 8)
        assert _in_child(lambda: str(endpoint.complete(ASK).message["content"])) == "hello"
        assert [future.result(10).message["content"] for future in running] == ["hello"] * 8


# ------------------------------------------------------------------ check()


def _check(endpoint: ChatEndpoint) -> str:
    return endpoint.check(timeout=2)


def _acheck(endpoint: ChatEndpoint) -> str:
    return asyncio.run(endpoint.acheck(timeout=2))


@pytest.fixture(params=[_check, _acheck], ids=["sync", "async"])
def check(request: pytest.FixtureRequest) -> Callable[[ChatEndpoint], str]:
    return request.param  # type: ignore[no-any-return]


def _lists(*names: str, **more: Any) -> Answer:
    return Answer({"object": "list", "data": [{"id": name, "object": "model", **more} for name in names]})


def test_check_takes_the_first_model(check: Any) -> None:
    with rough_server(lambda request: _lists("first", "second")) as server:
        endpoint = ChatEndpoint(server.url)
        assert check(endpoint) == "first"
    assert endpoint.model == "first"


def test_check_finds_the_named_model(check: Any) -> None:
    with rough_server(lambda request: _lists("first", "second")) as server:
        assert check(ChatEndpoint(server.url, "second")) == "second"


def test_check_unknown_model(check: Any) -> None:
    names = [f"model-{n}" for n in range(8)]
    with rough_server(lambda request: _lists(*names)) as server:
        text = failure(check, ChatEndpoint(server.url, "other", api_key=KEY), EndpointRefused)
    assert "does not serve the model 'other'" in text
    assert "it lists: model-0, model-1, model-2, model-3, model-4, ..." in text


@pytest.mark.parametrize("body", [{"object": "list", "data": []}, {"data": None}, {}], ids=repr)
def test_check_no_model(body: Any, check: Any) -> None:
    with rough_server(lambda request: Answer(body)) as server:
        text = failure(check, ChatEndpoint(server.url, api_key=KEY), EndpointRefused)
        assert "lists no model; load one" in text
        # A server that lists nothing may still know the model it is asked for.
        assert check(ChatEndpoint(server.url, "small")) == "small"


def test_check_dead_server(check: Any) -> None:
    endpoint = ChatEndpoint(f"http://127.0.0.1:{free_port()}", api_key=KEY)
    assert "cannot reach" in failure(check, endpoint, EndpointUnavailable)


def test_check_silent_server(check: Any) -> None:
    with rough_server(lambda request: Answer(hang="headers")) as server:
        started = time.monotonic()
        assert "within 2 s" in failure(check, ChatEndpoint(server.url, api_key=KEY), EndpointTimeout)
        assert time.monotonic() - started < 4


def test_check_bad_key(check: Any) -> None:
    with rough_server(lambda request: Answer({"error": {"message": f"bad {KEY}"}}, 401)) as server:
        assert "check the key" in failure(check, ChatEndpoint(server.url, api_key=KEY), EndpointRefused)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        Answer(b"<html></html>", content_type="text/html"),
        Answer(b"{not json"),
        Answer([1]),
        Answer({"data": ["small"]}),
        Answer({"data": [{"name": "small"}]}),
        Answer({"data": {"id": "small"}}),
        Answer({"data": 5}),
        Answer(b"null"),
    ],
    ids=lambda answer: repr(answer.body),
)
def test_check_something_else(answer: Answer, check: Any) -> None:
    with rough_server(lambda request: answer) as server:
        text = failure(check, ChatEndpoint(server.url, api_key=KEY), EndpointUnavailable)
    assert "OpenAI-compatible" in text or "cannot be read" in text


def test_model_is_looked_up_on_the_first_call(complete: Complete) -> None:
    with rough_server() as server:
        endpoint = ChatEndpoint(server.url)
        complete(endpoint)
        complete(endpoint)
    assert [request.path for request in server.requests] == ["/v1/models", *["/v1/chat/completions"] * 2]
    assert server.chats[0].body["model"] == "small"


def test_lookup_of_the_model_keeps_the_deadline(complete: Complete) -> None:
    with rough_server(lambda request: Answer(hang="headers")) as server:
        started = time.monotonic()
        failure(complete, ChatEndpoint(server.url, timeout=0.5), EndpointTimeout)
        assert time.monotonic() - started < 2


# ------------------------------------------------------------------ grammars


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (None, {}),
        ("llama.cpp", {"grammar": "root ::= x"}),
        ("vllm", {"structured_outputs": {"grammar": "root ::= x"}}),
    ],
)
def test_grammar_field(grammar: str | None, expected: Any, complete: Complete) -> None:
    params = {"extra_body": {"top_k": 5}}
    with rough_server() as server:
        endpoint = ChatEndpoint(server.url, "small", grammar=grammar, params=params)
        complete(endpoint, CallModel(ASK.messages, grammar="root ::= x"))
        complete(endpoint, CallModel(ASK.messages, [TOOL], grammar="root ::= x"))
        complete(endpoint, CallModel(ASK.messages))
    with_grammar, with_tools, without = (request.body for request in server.chats)
    base = {"model": "small", "messages": ASK.messages, "top_k": 5}
    assert with_grammar == {**base, **expected}
    # A server parses tool calls by a grammar of its own.
    assert with_tools == {**base, "tools": [TOOL]}
    assert without == base
    assert params == {"extra_body": {"top_k": 5}}


@pytest.mark.parametrize(
    ("owner", "field"),
    [("llamacpp", "grammar"), ("vllm", "structured_outputs"), ("openai", None), (None, None)],
)
def test_grammar_auto(owner: str | None, field: str | None) -> None:
    def behave(request: Request) -> Answer:
        return _lists("small", owned_by=owner) if request.path.endswith("/models") else Answer()

    with rough_server(behave) as server:
        endpoint = ChatEndpoint(server.url, grammar="auto")
        endpoint.check()
        endpoint.complete(CallModel(ASK.messages, grammar="root ::= x"))
    assert set(server.chats[0].body) - {"model", "messages"} == ({field} if field else set())


# ------------------------------------------------------------------ the prompt is too long

OVERFLOWS = {
    "llama.cpp": (400, {"code": 400, "message": "the request exceeds the available context size, try increasing it",
                        "type": "exceed_context_size_error", "n_prompt_tokens": 900, "n_ctx": 512}),
    "llama.cpp, newer": (400, {"code": 400, "message": "request (900 tokens) exceeds the available context size (512 "
                               "tokens), try increasing it", "type": "exceed_context_size_error"}),
    "vLLM": (400, {"message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
                   "in the messages, Please reduce the length of the messages.", "type": "BadRequestError"}),
    "vLLM, prompt": (400, {"message": "The decoder prompt (length 5000) is longer than the maximum model length of "
                           "4096. Make sure that `max_model_len` is no smaller", "type": "BadRequestError"}),
    "vLLM, input": (400, {"message": "You passed 5000 input tokens and requested 16 output tokens. However, the "
                          "model's context length is only 4096 tokens", "type": "BadRequestError"}),
    "OpenAI": (400, {"message": "This model's maximum context length is 8192 tokens. However, your messages resulted "
                     "in 9000 tokens.", "type": "invalid_request_error", "code": "context_length_exceeded"}),
    "OpenAI, newer": (400, {"message": "Your input exceeds the context window of this model. Please adjust your input.",
                            "type": "invalid_request_error", "code": "context_length_exceeded"}),
    "code alone": (400, {"message": "Too much.", "code": "context_length_exceeded"}),
    "SGLang": (400, {"message": "The input (5000 tokens) is longer than the model's context length (4096 tokens)."}),
    "too large": (413, {"message": "The context window of this model is exceeded."}),
    "far down a long text": (400, {"message": "We are sorry. " * 40 + "The maximum context length is 5."}),
}  # fmt: skip


@pytest.mark.parametrize("server_kind", OVERFLOWS)
@pytest.mark.parametrize("shape", ["error object", "bare", "detail"])
def test_context_overflow(server_kind: str, shape: str, complete: Complete) -> None:
    status, error = OVERFLOWS[server_kind]
    body = {"error object": {"error": error}, "bare": {"object": "error", **error}, "detail": {"detail": error}}[shape]
    with rough_server(Answer(body, status)) as server:
        text = failure(complete, ChatEndpoint(server.url, "small", api_key=KEY), ContextOverflow)
    assert "the prompt does not fit the model's context" in text
    assert len(server.chats) == 1


@pytest.mark.parametrize(
    "error",
    [
        {"message": "tools[0].function.parameters is not valid"},
        {"message": "Failed to parse grammar"},
        {"message": "messages must alternate user and assistant"},
    ],
    ids=repr,
)
def test_other_refusals_are_no_overflow(error: Any, complete: Complete) -> None:
    with rough_server(Answer({"error": error}, 400)) as server:
        assert error["message"] in failure(complete, ChatEndpoint(server.url, "small"), EndpointRefused)


# ------------------------------------------------------------------ settings, secrets


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "127.0.0.1",
        "ftp://x",
        "http://",
        "http://:8000",
        "http://x:port",
        "http://x:99999",
        None,
        5,
    ],
)
def test_wrong_url(url: Any) -> None:
    with pytest.raises(ConfigError, match="base_url must look like"):
        ChatEndpoint(url, "small")


@pytest.mark.parametrize("key", ["sk-…", "sk-\x00", "sk-1\nHost: evil", "clé"])
def test_wrong_key(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key") as caught:
        ChatEndpoint("http://127.0.0.1:1", "small", api_key=key)
    assert key not in str(caught.value)


def test_key_with_the_newline_of_its_file(complete: Complete) -> None:
    with rough_server() as server:
        complete(ChatEndpoint(server.url, "small", api_key=f"{KEY}\n"))
    assert server.chats[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("grammar", ["llamacpp", "gbnf", "", True])
def test_wrong_grammar(grammar: Any) -> None:
    with pytest.raises(ConfigError, match=r"grammar must be 'llama\.cpp', 'vllm', 'auto' or None"):
        ChatEndpoint("http://127.0.0.1:1", "small", grammar=grammar)


def test_key_is_not_in_any_text_of_the_endpoint() -> None:
    assert KEY not in repr(ChatEndpoint("http://127.0.0.1:1", "small", api_key=KEY))
    assert KEY not in str(ChatEndpoint("http://127.0.0.1:1", "small", api_key=KEY))


@pytest.mark.parametrize("status", [400, 422, 429, 500])
def test_server_that_echoes_the_headers(status: int, complete: Complete) -> None:
    """Debug pages show the request's headers, the key among them."""

    def echo(request: Request) -> Answer:
        return Answer({"error": {"message": f"bad request: {request.headers}"}}, status)

    with rough_server(echo) as server:
        kind = EndpointUnavailable if status in (429, 500) else EndpointRefused
        text = failure(complete, ChatEndpoint(server.url, "small", api_key=KEY, attempts=1), kind)
    assert "bad request" in text


def test_environment_does_not_leak_in(complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key of its own an endpoint must not send the one of somebody else's account to a local server."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere.invalid/v1")
    with rough_server() as server:
        complete(ChatEndpoint(server.url, "small"))
    sent = str(server.chats[0].headers)
    assert KEY not in sent


def test_models_lists_what_the_server_lists() -> None:
    with rough_server() as server:
        assert asyncio.run(ChatEndpoint(server.url).models()) == MODELS["data"]
