"""The retrieval server and `caddie retrieve`: real servers, asked by our own client and by plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from caddie_sdk.cli.retrieve import RetrieveChoices, _open, default_cache
from caddie_sdk.errors import ConfigError
from caddie_tools import CorpusSearch, Hit, Passage, RetrievalService, load_corpus
from caddie_tools.corpus import corpus_fingerprint
from caddie_tools.retrieval_server import RetrievalLimits, create_app

CADDIE = Path(sys.executable).with_name("caddie")
DOCS = Path(__file__).parents[2] / "docs" / "tools.md"

PASSAGES = [
    Passage("0", "Greave", "Greave is an island. Its lighthouse was built by Piet Corran."),
    Passage("1", 'The "Old" Mill', "A mill on the river Tarn.\nIt ground barley until 1911."),
    Passage("b", "", "A lighthouse without a title, and without a keeper."),
    Passage("3", "Pál Gábor", "Hungarian film director, 1932–1987 🎬. Born in Budapest."),
    Passage("4", "Tarn", "The Tarn is a river known for its trout."),
]
QUERIES = ["Who built the lighthouse of Greave?", "river trout", "pal gabor", "barley \ud83d mill", "zzz"]


def write(path: Path, passages: list[Passage]) -> Path:
    path.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in passages), "utf-8")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", PASSAGES)


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable[..., str]]:
    """Serves searches in this process: `serving(search, **arguments of create_app)` gives the URL."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(search: CorpusSearch, **settings: Any) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(search, **settings), log_level="critical"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def small(serving: Callable[..., str]) -> str:
    """A server over the small corpus with low limits."""
    limits = RetrievalLimits(max_body=10_000, max_queries=3, max_top_k=4, total=20)
    return serving(CorpusSearch(PASSAGES), limits=limits, top_k=2)


# --- the same hits as a local search -----------------------------------------------------------------


def assert_same(url: str, local: CorpusSearch, queries: list[str], top_k: int) -> list[list[Hit]]:
    expected = [local.search(query, top_k) for query in queries]

    async def twin() -> list[list[Hit]]:
        async with RetrievalService(url) as service:
            return list(await asyncio.gather(*(service.asearch(query, top_k) for query in queries)))

    with RetrievalService(url) as service, RetrievalService(url, return_scores=False) as bare:
        assert service.search_many(queries, top_k) == expected  # passages, order, and scores to the last bit
        assert asyncio.run(twin()) == expected
        without = [[Hit(hit.passage, 0.0) for hit in hits] for hits in expected]
        assert bare.search_many(queries, top_k) == without
    return expected


def test_words_in_a_small_corpus(serving: Callable[..., str], corpus: Path, tmp_path: Path) -> None:
    url = serving(CorpusSearch(corpus, cache_dir=tmp_path))
    found = assert_same(url, CorpusSearch(corpus), QUERIES, 3)
    assert [[hit.passage.id for hit in hits] for hits in found] == [["0", "b"], ["4", "1"], ["3"], ["1"], []]
    assert found[3][0].passage == PASSAGES[1]  # quotes in the title and two lines of text come back as they were
    assert_same(url, CorpusSearch(corpus), QUERIES, 50)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dense", "fused"])
def test_meaning_in_a_small_corpus(serving, corpus: Path, tmp_path: Path, minilm: str, mode: Any) -> None:
    CorpusSearch(corpus, mode=mode, cache_dir=tmp_path, model=minilm)
    url = serving(CorpusSearch(corpus, mode=mode, cache_dir=tmp_path, model=minilm))
    found = assert_same(url, CorpusSearch(corpus, mode=mode, model=minilm), [*QUERIES, "a fish in flowing water"], 2)
    assert all(len(hits) == 2 for hits in found)
    assert found[-1][0].passage.id == "4"


def questions(shared_data: Path, number: int) -> list[str]:
    (path,) = (shared_data / "2wikimultihopqa").glob("*.json*")
    text = path.read_text("utf-8")
    records = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    return [record["question"] for record in records[:number]]


def test_words_in_the_real_corpus(serving: Callable[..., str], shared_data: Path) -> None:
    path = shared_data / "corpus" / "2wiki_corpus_hipporag.jsonl"
    url = serving(CorpusSearch(path))
    assert httpx.get(f"{url}/healthz").json()["passages"] == 6119
    found = assert_same(url, CorpusSearch(path), questions(shared_data, 40), 5)
    assert [len(hits) for hits in found] == [5] * 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_meaning_in_real_passages(serving: Callable[..., str], shared_data: Path, tmp_path: Path, minilm: str) -> None:
    whole = shared_data / "corpus" / "2wiki_corpus_hipporag.jsonl"
    path, tmp_path = tmp_path / "part.jsonl", tmp_path / "cache"
    # All 6,119 passages take three minutes to embed on two cores.
    path.write_text("".join(whole.read_text("utf-8").splitlines(keepends=True)[:400]), "utf-8")
    local = CorpusSearch(path, mode="dense", model=minilm, cache_dir=tmp_path)
    for mode in ("dense", "fused"):
        url = serving(CorpusSearch(path, mode=mode, model=minilm, cache_dir=tmp_path))
        if mode == "fused":
            local = CorpusSearch(path, mode=mode, model=minilm, cache_dir=tmp_path)
        found = assert_same(url, local, questions(shared_data, 20), 5)
        assert [len(hits) for hits in found] == [5] * 20
    assert sorted(folder.name.partition("-")[0] for folder in tmp_path.iterdir()) == ["bm25", "dense"]


# --- the wire ----------------------------------------------------------------------------------------


def test_the_shape_is_search_r1s(small: str) -> None:
    document = {"id": "4", "contents": '"Tarn"\nThe Tarn is a river known for its trout.'}
    (hit,) = CorpusSearch(PASSAGES).search("trout", 1)
    asked = {"queries": ["trout", "zzz"], "topk": 1, "return_scores": True}
    answer = httpx.post(f"{small}/retrieve", json=asked)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"result": [[{"document": document, "score": hit.score}], []]}
    bare = httpx.post(f"{small}/retrieve", json={**asked, "return_scores": False})
    assert bare.json() == {"result": [[document], []]}


def test_what_a_request_leaves_out(small: str) -> None:
    for asked in ({"queries": ["river lighthouse"]}, {"queries": ["river lighthouse"], "topk": None, "model": "x"}):
        (documents,) = httpx.post(f"{small}/retrieve", json=asked).json()["result"]
        assert len(documents) == 2  # the server's own top_k, of four that match
        assert all(set(document) == {"id", "contents"} for document in documents)
    assert httpx.post(f"{small}/retrieve", json={"queries": []}).json() == {"result": []}


def test_healthz_tells_what_is_searched(small: str) -> None:
    told = httpx.get(f"{small}/healthz").json()
    assert told == {"status": "ok", "passages": 5, "mode": "bm25", "content_hash": corpus_fingerprint(PASSAGES)}


def refused(answer: httpx.Response, status: int, said: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert "\n" not in answer.text
    assert set(answer.json()) == {"error"}
    assert said in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\xff", "not JSON"),
        (b"[" * 9000, "not JSON"),
        (b'{"queries": ["a"], "topk": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'["a"]', "must be an object"),
        (b"{}", "queries must be a list of strings"),
        (b'{"queries": "trout"}', "queries must be a list of strings"),
        (b'{"queries": ["a", 3]}', "queries must be a list of strings"),
        (b'{"queries": ["a", "b", "c", "d"]}', "queries has 4 entries; at most 3"),
        (b'{"queries": ["a"], "topk": 0}', "topk must be a whole number from 1 to 4"),
        (b'{"queries": ["a"], "topk": -1}', "topk"),
        (b'{"queries": ["a"], "topk": 5}', "topk"),
        (b'{"queries": ["a"], "topk": 1.0}', "topk"),
        (b'{"queries": ["a"], "topk": true}', "topk"),
        (b'{"queries": ["a"], "topk": "3"}', "topk"),
        (b'{"queries": ["a"], "return_scores": "yes"}', "return_scores must be true or false"),
        (b'{"queries": ["a"], "return_scores": 1}', "return_scores"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(small: str, body: bytes, said: str) -> None:
    refused(httpx.post(f"{small}/retrieve", content=body), 400, said)


def test_other_paths_and_methods(small: str) -> None:
    refused(httpx.get(f"{small}/"), 404, "POST /retrieve and GET /healthz")
    refused(httpx.get(f"{small}/retrieve"), 405, "another method")
    assert httpx.get(f"{small}/retrieve").headers["allow"] == "POST"


def test_a_body_over_the_limit_is_refused_whether_or_not_its_length_is_told(small: str) -> None:
    body = json.dumps({"queries": ["x" * 20_000]}).encode()
    fits = json.dumps({"queries": ["x" * 9_900]}).encode()
    assert httpx.post(f"{small}/retrieve", content=fits).status_code == 200
    for _ in range(5):
        refused(httpx.post(f"{small}/retrieve", content=body), 413, "larger than 10,000 bytes")
        refused(httpx.post(f"{small}/retrieve", content=iter([body[:15_000], body[15_000:]])), 413, "larger")


def test_a_refusal_reaches_a_caller_who_sends_much_too_much(small: str) -> None:
    for _ in range(5):
        refused(httpx.post(f"{small}/retrieve", content=b"x" * 8_000_000), 413, "larger than 10,000 bytes")


def test_a_body_told_to_be_too_large_is_refused_before_it_is_sent(small: str) -> None:
    with socket.create_connection(("127.0.0.1", int(small.rpartition(":")[2])), timeout=10) as caller:
        caller.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 10001\r\n\r\n")
        assert caller.recv(10_000).startswith(b"HTTP/1.1 413 ")


def test_settings_that_cannot_be() -> None:
    search = CorpusSearch(PASSAGES)
    for wrong in ({"top_k": 0}, {"top_k": 101}, {"threads": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            create_app(search, **wrong)
    with pytest.raises(ConfigError, match="max_queries must be positive"):
        RetrievalLimits(max_queries=0)


# --- load and time -----------------------------------------------------------------------------------


class Gated(CorpusSearch):
    """A search that waits at a gate, then searches."""

    def __init__(self) -> None:
        super().__init__(PASSAGES)
        self.gate = threading.Event()
        self.started: list[str] = []

    def search(self, query: str, top_k: int = 3) -> list[Hit]:
        self.started.append(query)
        assert self.gate.wait(30)
        return super().search(query, top_k)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def post_aside(url: str, queries: list[str]) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []
    asked = {"queries": queries, "topk": 1}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/retrieve", json=asked, timeout=40)))
    thread.start()
    return thread, answers


def test_the_loop_is_free_and_searches_run_at_once(serving: Callable[..., str]) -> None:
    search = Gated()
    url = serving(search, threads=2)
    asked = [post_aside(url, ["trout"]), post_aside(url, ["barley"])]
    until(lambda: len(search.started) == 2)  # both wait at the gate
    assert httpx.get(f"{url}/healthz", timeout=10).json()["status"] == "ok"
    assert not asked[0][1]
    assert not asked[1][1]
    search.gate.set()
    for thread, _ in asked:
        thread.join(20)
    assert [answers[0].json()["result"][0][0]["id"] for _, answers in asked] == ["4", "1"]


def test_a_search_that_takes_too_long_is_given_up(serving: Callable[..., str]) -> None:
    search = Gated()
    url = serving(search, limits=RetrievalLimits(total=0.3), threads=1)
    answer = httpx.post(f"{url}/retrieve", json={"queries": ["trout", "barley"]}, timeout=20)
    refused(answer, 503, "no answer within 0.3 s: send fewer queries")
    search.gate.set()
    assert httpx.post(f"{url}/retrieve", json={"queries": ["mill"]}).status_code == 200
    assert search.started == ["trout", "mill"]  # the second query of the first request was never begun


def test_a_body_that_does_not_arrive_is_given_up(serving: Callable[..., str]) -> None:
    url = serving(CorpusSearch(PASSAGES), limits=RetrievalLimits(total=0.3))
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as caller:
        caller.sendall(b'POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"queries":')
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come apart
            answer += (got := caller.recv(10_000))
            assert got, answer
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'{"error": "the request body did not arrive within 0.3 s"}' in answer


def test_a_caller_who_hangs_up_is_searched_for_no_longer(serving: Callable[..., str]) -> None:
    search = Gated()
    url = serving(search, threads=1)
    body = json.dumps({"queries": [f"trout {number}" for number in range(200)]}).encode()
    head = f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as caller:
        caller.sendall(head + body)
        until(lambda: len(search.started) == 1)
    for _ in range(2):  # once these are answered, the loop has seen the connection end
        assert httpx.get(f"{url}/healthz").status_code == 200
    search.gate.set()
    assert httpx.post(f"{url}/retrieve", json={"queries": ["mill"]}).status_code == 200
    assert len(search.started) <= 3


class Broken(CorpusSearch):
    def search(self, query: str, top_k: int = 3) -> list[Hit]:
        raise RuntimeError(f"no luck with {query}")


def test_a_search_that_fails_is_one_line_without_contents(serving: Callable[..., str]) -> None:
    url = serving(Broken(PASSAGES))
    answer = httpx.post(f"{url}/retrieve", json={"queries": ["my secret"]})
    refused(answer, 500, "the search failed (RuntimeError)")
    assert "secret" not in answer.text


# --- the command -------------------------------------------------------------------------------------


@dataclass
class Running:
    process: subprocess.Popen[str]
    url: str
    told: list[str] = field(default_factory=list)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End it; its exit status and all of its standard error."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        assert out == ""
        return self.process.returncode, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Runs `caddie retrieve` with these words and a cache of the test's own; kills it at the end."""
    processes: list[subprocess.Popen[str]] = []

    def launch(*words: object, wait: bool = True) -> Running:
        command = [CADDIE, "retrieve", *map(str, words)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "home")}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )
        processes.append(process)
        assert process.stdout is not None
        return Running(process, process.stdout.readline().strip() if wait else "")

    yield launch
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_start_ask_stop(start: Callable[..., Running], corpus: Path, tmp_path: Path, number: int) -> None:
    server = start("--corpus", corpus)
    assert server.url.startswith("http://127.0.0.1:")
    assert server.url.endswith("/retrieve")
    assert_same(server.url, CorpusSearch(corpus), QUERIES, 3)
    health = httpx.get(server.url.replace("/retrieve", "/healthz")).json()
    assert health["content_hash"] == corpus_fingerprint(load_corpus(corpus))
    assert server.stop(number) == (0, f"5 passages of {corpus}, bm25\n")
    assert [path.name.partition("-")[0] for path in (tmp_path / "home/caddie/indexes").iterdir()] == ["bm25"]


def test_options_reach_the_server(start: Callable[..., Running], corpus: Path, tmp_path: Path) -> None:
    words = ("--topk", 1, "--max-topk", 2, "--max-queries", 1, "--max-body-mb", 1, "--threads", 1)
    server = start("--corpus", corpus, "--cache-dir", tmp_path / "mine", *words)
    (documents,) = httpx.post(server.url, json={"queries": ["lighthouse"]}).json()["result"]
    assert len(documents) == 1
    refused(httpx.post(server.url, json={"queries": ["a"], "topk": 3}), 400, "from 1 to 2")
    refused(httpx.post(server.url, json={"queries": ["a", "b"]}), 400, "at most 1")
    refused(httpx.post(server.url, content=b"x" * (2**20 + 1)), 413, "1,048,576 bytes")
    assert server.stop()[0] == 0
    assert len(list((tmp_path / "mine").iterdir())) == 1
    assert not (tmp_path / "home").exists()


def test_a_request_under_way_is_answered_at_the_end(start: Callable[..., Running], corpus: Path) -> None:
    server = start("--corpus", corpus)
    body = json.dumps({"queries": ["trout"], "topk": 1}).encode()
    head = f"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=20) as caller:
        caller.sendall(head.encode())
        assert caller.recv(1000).startswith(b"HTTP/1.1 100 ")  # the server waits for the body
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not accepts(server.url))
        caller.sendall(body)
        answer = b"".join(iter(lambda: caller.recv(10_000), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["result"][0][0]["id"] == "4"
    assert server.process.wait(20) == 0


def accepts(url: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=5):
        return True
    return False


def test_while_the_corpus_is_read_nobody_is_let_in_and_it_can_be_stopped(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    pipe = tmp_path / "corpus.jsonl"
    os.mkfifo(pipe)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start("--corpus", pipe, "--port", port, wait=False)
    with pipe.open("wb"):  # opens when the other end does
        assert not accepts(f"http://127.0.0.1:{port}")
        assert server.stop() == (0, "")


# --- the index cache ---------------------------------------------------------------------------------


def stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Which files there are, and what changes when one is written again."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.stat()
        found[str(path.relative_to(folder))] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return found


def test_a_second_start_reads_the_index(start: Callable[..., Running], corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert start("--corpus", corpus, "--cache-dir", cache).stop()[0] == 0
    before = stamps(cache)
    assert len(before) > 3
    server = start("--corpus", corpus, "--cache-dir", cache)
    assert_same(server.url, CorpusSearch(corpus), QUERIES, 3)
    assert server.stop() == (0, f"5 passages of {corpus}, bm25\n")
    assert stamps(cache) == before


def test_a_second_start_builds_nothing(monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path) -> None:
    from caddie_tools.bm25 import Bm25Index

    built: list[int] = []
    build = Bm25Index.build
    monkeypatch.setattr(Bm25Index, "build", lambda texts: built.append(len(texts)) or build(texts))
    choices = RetrieveChoices(corpus, cache_dir=tmp_path / "cache")
    first, second = _open(choices), _open(choices)
    assert built == [5]
    assert [second.search(query) for query in QUERIES] == [first.search(query) for query in QUERIES]
    write(corpus, PASSAGES[:4])
    assert len(_open(choices)) == 4
    assert built == [5, 4]


@pytest.mark.slow
def test_a_second_start_embeds_nothing_but_queries(
    monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path, minilm: str
) -> None:
    from caddie_tools.dense import DenseSearch

    embedded: list[int] = []
    encode = DenseSearch._encode
    monkeypatch.setattr(
        DenseSearch, "_encode", lambda self, texts, prompt: embedded.append(len(texts)) or encode(self, texts, prompt)
    )
    choices = RetrieveChoices(corpus, mode="fused", cache_dir=tmp_path / "cache", model=minilm)
    first = _open(choices)
    assert embedded == [5, 1]  # the passages, and the query that shows that the model is there
    second = _open(choices)
    assert embedded == [5, 1, 1]
    assert [second.search(query) for query in QUERIES] == [first.search(query) for query in QUERIES]


def test_a_changed_corpus_is_indexed_anew(start: Callable[..., Running], corpus: Path, tmp_path: Path) -> None:
    words = ("--corpus", corpus, "--cache-dir", tmp_path / "cache")
    assert start(*words).stop()[0] == 0
    before = stamps(tmp_path / "cache")
    write(corpus, [*PASSAGES[:4], Passage("4", "Tarn", "The Tarn is a river known for its otters.")])
    server = start(*words)
    with RetrievalService(server.url) as service:
        assert service.search("trout") == []
        assert [hit.passage.id for hit in service.search("otters")] == ["4"]
    assert server.stop()[0] == 0
    after = stamps(tmp_path / "cache")
    assert len(after) == 2 * len(before)
    assert before.items() <= after.items()


def test_a_damaged_index_is_built_again_with_a_note(
    start: Callable[..., Running], corpus: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    words = ("--corpus", corpus, "--cache-dir", cache)
    assert start(*words).stop()[0] == 0
    (damaged,) = cache.glob("*/data.csc.index.npy")
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-10])
    server = start(*words)
    assert_same(server.url, CorpusSearch(corpus), QUERIES, 3)
    code, told = server.stop()
    assert code == 0
    assert len(told.splitlines()) == 2
    assert "is unusable (its files do not match its manifest): building it again" in told
    assert damaged.read_bytes() == good
    assert start(*words).stop() == (0, f"5 passages of {corpus}, bm25\n")


def test_where_indexes_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "caddie" / "indexes"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert default_cache() == tmp_path / "me" / ".cache" / "caddie" / "indexes"


# --- bad input ---------------------------------------------------------------------------------------


def told_in_one_line(words: list[object], said: str) -> None:
    ran = subprocess.run(
        [CADDIE, "retrieve", *map(str, words)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("caddie: ")
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert said in ran.stderr


BAD = {
    "missing": (None, "cannot read the corpus {path}: No such file"),
    "empty": (b"", "the corpus {path} is empty"),
    "blank": (b"\n\n \n", "the corpus {path} is empty"),
    "no json": (b'{"id": "1", "contents": "x"}\n{"id": \n', "{path}, line 2, field '(line)': not JSON"),
    "no contents": (b'{"id": "1"}\n', "{path}, line 1, field 'contents': missing"),
    "twice": (b'{"id": "1", "contents": "x"}\n\n{"id": 1, "contents": "y"}\n', "line 3, field 'id': '1' is already"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_corpus_is_named(tmp_path: Path, case: str) -> None:
    content, said = BAD[case]
    path = tmp_path / "corpus.jsonl"
    if content is not None:
        path.write_bytes(content)
    told_in_one_line(["--corpus", path, "--cache-dir", tmp_path / "cache"], said.format(path=path))


def test_bad_options_are_named(corpus: Path, tmp_path: Path) -> None:
    told_in_one_line(["--corpus", corpus, "--mode", "sparse"], "'sparse': choose one of bm25, dense, fused")
    told_in_one_line(["--corpus", tmp_path], f"cannot read the corpus {tmp_path}")
    told_in_one_line(["--corpus", corpus, "--cache-dir", corpus / "x"], "index cache folder")
    told_in_one_line(["--corpus", corpus, "--cache-dir", tmp_path / "c", "--topk", 101], "between 1 and 100")
    told_in_one_line(["--corpus", corpus, "--host", "203.0.113.7"], "cannot listen on 203.0.113.7:0")
    told_in_one_line(["--corpus", corpus, "--host", "x" * 70], "cannot listen on")


def test_a_port_in_use_is_named_before_the_corpus_is_read(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"
        told_in_one_line(["--corpus", tmp_path / "none.jsonl", "--port", port], said)


@pytest.mark.slow
def test_a_model_that_is_not_there_is_named_at_the_start(corpus: Path, tmp_path: Path, minilm: str) -> None:
    words = ["--corpus", corpus, "--mode", "dense", "--cache-dir", tmp_path / "cache"]
    told_in_one_line([*words, "--model", tmp_path / "none"], "cannot load the embedding model")


@pytest.mark.parametrize("package", ["uvicorn", "starlette"])
def test_a_missing_package_is_named(package: str, corpus: Path) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"sys.argv = ['caddie', 'retrieve', '--corpus', {str(corpus)!r}]\n"
        "from caddie_sdk.cli import main; main()"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert "pip install 'caddie-sdk[proxy]'" in ran.stderr


# --- the page ----------------------------------------------------------------------------------------


def test_the_command_of_the_page_runs_as_written(start: Callable[..., Running], corpus: Path) -> None:
    (line,) = [line for line in DOCS.read_text("utf-8").splitlines() if line.startswith("$ caddie retrieve ")]
    words = line.removeprefix("$ caddie retrieve ").split()
    assert words[:2] == ["--corpus", corpus.name]  # found in the folder the command runs in
    words[words.index("--port") + 1] = "0"
    server = start(*words)
    assert httpx.post(server.url, json={"queries": ["trout"]}).json()["result"][0][0]["id"] == "4"
    assert server.stop()[0] == 0
