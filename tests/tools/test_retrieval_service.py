"""The client of a Search-R1 service, against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Any

import pytest

from caddie_sdk.errors import (
    ConfigError,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    EndpointUnavailable,
)
from caddie_sdk.retry import parse_retry_after
from caddie_tools import Hit, Passage, PassageSearch, RetrievalService

ONE = {"result": [[{"document": {"id": "1", "contents": '"Kodak"\nA company.'}, "score": 2.5}]]}
HIT = Hit(Passage("1", "Kodak", "A company."), 2.5)


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Callable[..., list[Hit]]:
    """Search once with a fresh client, in either of its two ways; the tests that use it cover both."""

    def sync(url: str, query: str = "kodak", top_k: int = 3, **options: Any) -> list[Hit]:
        with RetrievalService(url, **{"backoff": 0.01, **options}) as service:
            return service.search(query, top_k)

    def twin(url: str, query: str = "kodak", top_k: int = 3, **options: Any) -> list[Hit]:
        async def run() -> list[Hit]:
            async with RetrievalService(url, **{"backoff": 0.01, **options}) as service:
                return await service.asearch(query, top_k)

        return asyncio.run(run())

    return sync if request.param == "sync" else twin


def _search_r1(passages: list[Passage], reply: Any) -> Callable[[Any], Any]:
    """A Search-R1 service over real passages."""
    search = PassageSearch(passages)

    def answer(request: Any) -> Any:
        result = []
        for query in request.body["queries"]:
            hits = search.search(query, request.body["topk"])
            documents = [{"id": hit.passage.id, "contents": hit.passage.contents} for hit in hits]
            if request.body["return_scores"]:
                result.append([{"document": d, "score": h.score} for d, h in zip(documents, hits, strict=True)])
            else:
                result.append(documents)
        return reply({"result": result})

    return answer


def test_the_service_finds_what_a_local_search_finds(serve, reply, ask, musique) -> None:
    passages = [passage for question in musique[:5] for passage in question.passages]
    server = serve(_search_r1(passages, reply))
    for question in musique[:5]:
        local = PassageSearch(passages).search(question.text, 4)
        assert len(local) == 4
        assert ask(server.url, question.text, 4) == local
        assert ask(server.url, question.text, 4, return_scores=False) == [Hit(h.passage, 0.0) for h in local]


def test_the_request_is_search_r1s(serve, reply, ask) -> None:
    server = serve(lambda request: reply(ONE))
    assert ask(server.url, "  who? ", 7, headers={"x-team": "blue"}) == [HIT]
    (request,) = server.requests
    assert request.path == "/retrieve"
    assert request.body == {"queries": ["who?"], "topk": 7, "return_scores": True}
    assert request.headers["x-team"] == "blue"


@pytest.mark.parametrize(
    ("suffix", "path"),
    [("", "/retrieve"), ("/", "/retrieve"), ("/retrieve", "/retrieve"), ("/v1/", "/v1/retrieve")],
)
def test_the_url_with_or_without_retrieve(serve, reply, ask, suffix: str, path: str) -> None:
    server = serve(lambda request: reply(ONE))
    assert ask(server.url + suffix) == [HIT]
    assert server.requests[0].path == path


async def test_many_queries_travel_in_one_request_and_blank_ones_stay_home(serve, reply) -> None:
    def answer(request: Any) -> Any:
        return reply({"result": [[{"id": query, "contents": query}] for query in request.body["queries"]]})

    server = serve(answer)
    service = RetrievalService(server.url)
    expected = [[Hit(Passage("a", "", "a"), 0.0)], [], [Hit(Passage("b", "", "b"), 0.0)]]
    assert service.search_many(["a", " ", "b"]) == expected
    assert await service.asearch_many(["a", " ", "b"]) == expected
    assert [request.body["queries"] for request in server.requests] == [["a", "b"]] * 2
    await service.aclose()


def test_nothing_to_ask_asks_nobody(serve, reply, ask) -> None:
    server = serve(lambda request: reply(ONE))
    assert ask(server.url, "  ") == ask(server.url, "kodak", 0) == []
    assert server.requests == []


def test_half_a_surrogate_in_the_query_is_replaced(serve, reply, ask) -> None:
    server = serve(lambda request: reply(ONE))
    assert ask(server.url, "kodak \ud83d") == [HIT]
    assert server.requests[0].body["queries"] == ["kodak ?"]


@pytest.mark.parametrize(
    ("document", "passage"),
    [
        ({"id": 7, "contents": '"T"\nx', "url": "u", "vector": [1]}, Passage("7", "T", "x")),
        ({"id": "7", "title": "T", "text": "x"}, Passage("7", "T", "x")),
        ({"id": "7", "text": "x", "title": None}, Passage("7", "", "x")),
    ],
)
def test_unknown_fields_and_other_forms(serve, reply, ask, document: dict, passage: Passage) -> None:
    item = {"document": document, "score": 1, "rank": 0}
    server = serve(lambda request: reply({"result": [[item]], "took": 3}))
    assert ask(server.url) == [Hit(passage, 1.0)]


@pytest.mark.parametrize("item", [{"document": {"contents": '"T"\nx'}, "score": 1.0}, '"T"\nx'])
def test_a_document_without_an_id_gets_a_steady_one(serve, reply, ask, item: Any) -> None:
    other = {"contents": '"T"\ny'}
    server = serve(lambda request: reply({"result": [[item, other, item]]}))
    first, second, third = (hit.passage for hit in ask(server.url))
    assert first == third
    assert (first.title, first.text) == ("T", "x")
    assert len({first.id, second.id, ""}) == 3


def test_more_hits_than_asked_for_are_cut(serve, reply, ask) -> None:
    server = serve(lambda request: reply({"result": [ONE["result"][0] * 5]}))
    assert ask(server.url, top_k=2) == [HIT, HIT]


# --- faults ------------------------------------------------------------------------------------------


def test_429_is_tried_again_after_the_time_asked_for(serve, reply, ask) -> None:
    replies = iter([reply({}, 429, {"Retry-After": "0.3"}), reply(ONE)])
    server = serve(lambda request: next(replies))
    assert ask(server.url) == [HIT]
    first, second = (request.at for request in server.requests)
    assert second - first >= 0.3


def test_a_wait_beyond_max_wait_is_not_waited_for(serve, reply, ask) -> None:
    server = serve(lambda request: reply({}, 429, {"Retry-After": "3600"}))
    with pytest.raises(EndpointUnavailable) as caught:
        ask(server.url)
    assert caught.value.retry_after == 3600
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [500, 503, 429])
def test_three_failures_are_the_end(serve, reply, ask, status: int) -> None:
    server = serve(lambda request: reply({"detail": "index  is loading"}, status))
    with pytest.raises(
        EndpointUnavailable, match=rf"{server.url}/retrieve answered {status}.*index is loading"
    ) as caught:
        ask(server.url)
    assert len(server.requests) == 3
    assert caught.value.url == f"{server.url}/retrieve"


def test_two_failures_are_survived(serve, reply, ask) -> None:
    replies = iter([reply({}, 500), reply(hang_up=True), reply(ONE)])
    server = serve(lambda request: next(replies))
    assert ask(server.url) == [HIT]
    assert len(server.requests) == 3


def test_tries_are_ours_to_set(serve, reply, ask) -> None:
    server = serve(lambda request: reply({}, 500))
    with pytest.raises(EndpointUnavailable):
        ask(server.url, tries=1)
    assert len(server.requests) == 1


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_connection_refused(ask) -> None:
    port = _free_port()
    with pytest.raises(EndpointUnavailable, match=rf"127\.0\.0\.1:{port}.*tried 3 times.*Check that it is running"):
        ask(f"http://127.0.0.1:{port}")


def test_a_connection_that_never_comes_is_no_connection(ask) -> None:
    # A listener whose queue is full drops further connections, as a dead host does.
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        with pytest.raises(EndpointUnavailable, match=r"no connection.*ConnectTimeout.*tried 2 times"):
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.2, tries=2)


def test_a_service_that_comes_up_meanwhile_is_found(serve, reply, ask) -> None:
    port = _free_port()
    later = threading.Timer(0.15, serve, [lambda request: reply(ONE), port])
    later.start()
    assert ask(f"http://127.0.0.1:{port}", tries=50, backoff=0.05, max_wait=0.1) == [HIT]
    later.join()


def test_a_slow_service_is_not_asked_twice(serve, reply, ask) -> None:
    server = serve(lambda request: reply(ONE, delay=5.0))
    started = time.monotonic()
    with pytest.raises(EndpointTimeout, match=rf"{server.url}.*within 0\.2 s.*longer timeout"):
        ask(server.url, timeout=0.2)
    assert time.monotonic() - started < 4
    assert len(server.requests) == 1


@pytest.mark.parametrize(("status", "detail"), [(404, "Not Found"), (422, "field required"), (302, "moved")])
def test_other_statuses_are_refusals_and_final(serve, reply, ask, status: int, detail: str) -> None:
    server = serve(lambda request: reply({"detail": detail}, status))
    with pytest.raises(EndpointRefused, match=rf"{server.url}/retrieve answered {status}.*{detail}.*Check the URL"):
        ask(server.url)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"<html>Welcome</html>", "not JSON.*Welcome"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "list of 1 answers"),
        (b'{"result": null}', "list of 1 answers"),
        (b'{"result": []}', "list of 1 answers"),
        (b'{"result": [[], []]}', "list of 1 answers"),
        (b'{"result": [{}]}', "not a list"),
        (b'{"result": [[3]]}', "a document is int"),
        (b'{"result": [[{"document": null}]]}', "a document is NoneType"),
        (b'{"result": [[{"document": {"id": "1"}}]]}', 'no "contents"'),
        (b'{"result": [[{"document": {"id": "1", "contents": "x"}, "score": "high"}]]}', "'high', not a number"),
    ],
)
def test_garbage_gives_one_clear_error(serve, reply, ask, raw: bytes, problem: str) -> None:
    server = serve(lambda request: reply(raw=raw))
    with pytest.raises(EndpointError, match=problem) as caught:
        ask(server.url)
    assert type(caught.value) is EndpointError
    assert server.url in str(caught.value)
    assert "Search-R1" in str(caught.value)
    assert len(server.requests) == 1


def test_garbled_compression_gives_the_same_error(serve, reply, ask) -> None:
    server = serve(lambda request: reply(raw=b"no gzip", headers={"content-encoding": "gzip"}))
    with pytest.raises(EndpointError, match="cannot be read") as caught:
        ask(server.url)
    assert type(caught.value) is EndpointError


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_a_url_that_cannot_be_is_refused_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        RetrievalService(url)


def test_no_tries_are_refused() -> None:
    with pytest.raises(ConfigError, match="tries"):
        RetrievalService("http://127.0.0.1:1", tries=0)


def test_a_password_in_the_url_is_sent_and_never_shown(serve, reply, ask) -> None:
    server = serve(lambda request: reply({}, 403))
    url = server.url.replace("http://", "http://user:secret@")
    with pytest.raises(EndpointRefused) as caught:
        ask(url)
    assert server.requests[0].headers["authorization"].startswith("Basic ")
    assert "secret" not in str(caught.value) + repr(RetrievalService(url))


# --- sharing -----------------------------------------------------------------------------------------


def test_one_client_serves_one_event_loop_after_another(serve, reply) -> None:
    server = serve(lambda request: reply(ONE))
    service = RetrievalService(server.url)
    for _ in range(3):
        assert asyncio.run(service.asearch("kodak")) == [HIT]
    assert len(service._clients._per_loop) == 1  # those of closed loops are forgotten


def test_one_client_serves_threads(serve, reply) -> None:
    def answer(request: Any) -> Any:
        return reply({"result": [[{"id": query, "contents": query}] for query in request.body["queries"]]})

    with RetrievalService(serve(answer).url) as service, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: service.search(str(i))[0].passage.id, range(40)))
        looped = list(pool.map(lambda i: asyncio.run(service.asearch(str(i)))[0].passage.id, range(16)))
    assert found == [str(i) for i in range(40)]
    assert looped == [str(i) for i in range(16)]


async def test_searches_on_one_loop_run_at_once(serve, reply) -> None:
    server = serve(lambda request: reply(ONE, delay=0.5))
    async with RetrievalService(server.url) as service:
        started = time.monotonic()
        assert await asyncio.gather(*(service.asearch("kodak") for _ in range(10))) == [[HIT]] * 10
        assert time.monotonic() - started < 4  # one after another would take 5 s


async def test_cancelling_closes_the_connection(serve, reply) -> None:
    server = serve(lambda request: reply(ONE, delay=0.5 if len(server.requests) == 1 else 0))
    async with RetrievalService(server.url) as service:
        task = asyncio.create_task(service.asearch("kodak"))
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(server.requests) == 1
        assert await service.asearch("kodak") == [HIT]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("2", 2.0), (" 1.5 ", 1.5), ("0", 0.0), ("-1", None), ("nan", None), ("inf", None), ("soon", None)],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value) == seconds


def test_retry_after_as_a_date() -> None:
    assert parse_retry_after(formatdate(time.time() + 10, usegmt=True)) == pytest.approx(10, abs=2)
    assert parse_retry_after(formatdate(time.time() - 10, usegmt=True)) == 0


def test_bodies_are_json(serve, reply, ask) -> None:
    server = serve(lambda request: reply(raw=json.dumps(ONE).encode("utf-8"), headers={"content-type": "text/plain"}))
    assert ask(server.url) == [HIT]
