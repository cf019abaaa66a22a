"""Web search: Tavily's own client against a loopback server that stands in for the paid service."""

from __future__ import annotations

import asyncio
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from caddie_sdk.errors import (
    ConfigError,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    EndpointUnavailable,
    MissingExtra,
)
from caddie_tools import Hit, Passage, TavilySearch

pytest.importorskip("tavily", reason="tavily-python is not installed: pip install 'caddie-sdk[tavily]'")

KEY = "tvly-very-secret"
ANSWER = {
    "query": "kodak",
    "results": [
        {"title": "Kodak", "url": "https://a.example/1", "content": "A company.", "score": 0.9, "raw_content": None},
        {"title": "Film", "url": "https://a.example/2", "content": "A medium.", "score": 0.5, "favicon": "x"},
    ],
    "response_time": 0.4,
}
HITS = [
    Hit(Passage("https://a.example/1", "Kodak", "A company."), 0.9),
    Hit(Passage("https://a.example/2", "Film", "A medium."), 0.5),
]


@pytest.fixture(autouse=True)
def no_key_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAVILY_API_KEY", raising=False)


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest) -> Callable[..., list[Hit]]:
    def sync(url: str, query: str = "kodak", top_k: int | None = None, **options: Any) -> list[Hit]:
        search = TavilySearch(KEY, base_url=url, **{"backoff": 0.01, **options})
        try:
            return search.search(query, top_k)
        finally:
            search.close()

    def twin(url: str, query: str = "kodak", top_k: int | None = None, **options: Any) -> list[Hit]:
        async def run() -> list[Hit]:
            search = TavilySearch(KEY, base_url=url, **{"backoff": 0.01, **options})
            try:
                return await search.asearch(query, top_k)
            finally:
                await search.aclose()

        return asyncio.run(run())

    return sync if request.param == "sync" else twin


def test_a_search(serve, reply, ask) -> None:
    server = serve(lambda request: reply(ANSWER))
    assert ask(server.url, " kodak ", max_results=7, options={"search_depth": "advanced"}) == HITS
    (request,) = server.requests
    assert request.path == "/search"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert (request.body["query"], request.body["max_results"]) == ("kodak", 7)
    assert request.body["search_depth"] == "advanced"


@pytest.mark.parametrize(("top_k", "asked", "hits"), [(1, 1, 1), (None, 5, 2), (50, 20, 2)])
def test_top_k(serve, reply, ask, top_k: int | None, asked: int, hits: int) -> None:
    server = serve(lambda request: reply(ANSWER))
    assert ask(server.url, "kodak", top_k) == HITS[:hits]
    assert server.requests[0].body["max_results"] == asked


def test_nothing_to_ask_asks_nobody(serve, reply, ask) -> None:
    server = serve(lambda request: reply(ANSWER))
    assert ask(server.url, "  ") == ask(server.url, "kodak", 0) == []
    assert server.requests == []


def test_the_key_comes_from_the_environment(serve, reply, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(lambda request: reply(ANSWER))
    monkeypatch.setenv("TAVILY_API_KEY", "tvly-from-env")
    assert TavilySearch(base_url=server.url).search("kodak") == HITS
    assert server.requests[0].headers["authorization"] == "Bearer tvly-from-env"


@pytest.mark.parametrize("key", [None, "", "  "])
def test_no_key_is_said_at_once(key: str | None) -> None:
    with pytest.raises(ConfigError, match="TAVILY_API_KEY"):
        TavilySearch(key)


@pytest.mark.parametrize("count", [0, 21])
def test_max_results_has_bounds(count: int) -> None:
    with pytest.raises(ConfigError, match="1 to 20"):
        TavilySearch(KEY, max_results=count)


def test_a_missing_extra_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tavily", None)
    with pytest.raises(MissingExtra, match=r"pip install 'caddie-sdk\[tavily\]'"):
        TavilySearch(KEY)


def test_failures_are_survived(serve, reply, ask) -> None:
    replies = iter([reply({}, 429), reply({}, 502), reply(ANSWER)])
    server = serve(lambda request: next(replies))
    assert ask(server.url) == HITS
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("status", "kind", "tries", "check"),
    [
        (401, EndpointRefused, 1, "Check TAVILY_API_KEY"),
        (403, EndpointRefused, 1, "plan"),
        (432, EndpointRefused, 1, "plan"),
        (400, EndpointRefused, 1, "query"),
        (404, EndpointRefused, 1, "base_url"),
        (429, EndpointUnavailable, 3, "fewer"),
        (500, EndpointUnavailable, 3, "network"),
    ],
)
def test_statuses_and_no_key_in_any_message(serve, reply, ask, status, kind, tries, check) -> None:
    server = serve(lambda request: reply({"detail": {"error": f"about your key {KEY}"}}, status))
    with pytest.raises(kind, match=check) as caught:
        ask(server.url)
    assert server.url in str(caught.value)
    assert caught.value.url == server.url
    assert len(server.requests) == tries
    assert KEY not in "".join(traceback.format_exception(caught.value))


def test_a_slow_service(serve, reply, ask) -> None:
    server = serve(lambda request: reply(ANSWER, delay=1.0))
    with pytest.raises(EndpointTimeout, match=r"within 0\.2 s"):
        ask(server.url, timeout=0.2)
    assert len(server.requests) == 1


def test_connection_refused(ask) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EndpointUnavailable, match=rf"127\.0\.0\.1:{port} cannot be reached, tried 3 times"):
        ask(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    "raw", [b"<html>", b"[]", b'{"results": 3}', b'{"results": [3]}', b'{"results": [{"url": "u"}]}']
)
def test_garbage_gives_one_clear_error(serve, reply, ask, raw: bytes) -> None:
    server = serve(lambda request: reply(raw=raw))
    with pytest.raises(EndpointError, match="Check base_url") as caught:
        ask(server.url)
    assert type(caught.value) is EndpointError
    assert len(server.requests) == 1


def test_one_object_serves_one_event_loop_after_another(serve, reply) -> None:
    search = TavilySearch(KEY, base_url=serve(lambda request: reply(ANSWER)).url)
    assert [asyncio.run(search.asearch("kodak")) for _ in range(3)] == [HITS] * 3


def test_repr_has_no_key() -> None:
    assert repr(TavilySearch(KEY)) == "TavilySearch(base_url='https://api.tavily.com', max_results=5)"
