"""The proxy as a server: what passes, what is refused, what is counted, and how it ends."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from kit import ASK, TOOLS, Serving, ask, calls, critic, look, offered, proxy_app, roles, work
from kit import Caller as Application
from openai import OpenAI
from upstream import Scripted, Upstream, failure

from caddie_sdk import Budget
from caddie_sdk.shells.proxy import Limits

Upstreams = Callable[..., Upstream]
Serve = Callable[..., Serving]
KEY = "sk-the-callers-own-key"
ADVICE = "Analysis: as seen\nAdvices for next steps: look first"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts proxies: `serve(upstream, critic, **settings of wrap)`."""
    with contextlib.ExitStack() as stack:

        def start(upstream: Any, judge: Any = None, **settings: Any) -> Serving:
            url = upstream if isinstance(upstream, str) else upstream.url
            return stack.enter_context(Serving(proxy_app(url, judge or critic(), **settings)))

        yield start


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=10, headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


def post(http: httpx.Client, proxy: Serving, body: Any = None, headers: dict[str, str] | None = None) -> httpx.Response:
    wanted = {"messages": ASK, "tools": TOOLS, **(body or {})}
    return http.post(f"{proxy.url}/chat/completions", json=wanted, headers=headers)


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("headers", "field"),
    [({"X-Caddie": "off"}, None), ({}, {"enabled": False}), ({"X-Caddie": "on"}, {"enabled": "no"})],
)
def test_a_request_may_do_without(
    http: httpx.Client, serve: Serve, upstreams: Upstreams, headers: Any, field: Any
) -> None:
    upstream = upstreams(["Done."], strict=True)
    answer = post(http, serve(upstream), {"caddie": field} if field else {}, headers)
    assert answer.json()["choices"][0]["message"]["content"] == "Done."
    assert upstream.chats[0] == {"messages": ASK, "tools": TOOLS}
    assert not any(name.startswith("x-caddie") for name in upstream.requests[0].headers)


def test_earlier_advice_stays_in_view_of_a_request_that_does_without(
    http: httpx.Client, serve: Serve, upstreams: Upstreams
) -> None:
    upstream = upstreams([calls(ask()), "Done.", "Bye."], strict=True)
    proxy = serve(upstream)
    post(http, proxy)
    more = [*ASK, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]
    post(http, proxy, {"messages": more}, {"X-Caddie": "off"})
    assert roles(upstream.chats[2]) == "suCAau"
    assert offered(upstream.chats[2]) == ["look", "refund"]


def test_a_request_may_choose_its_protocol_and_see_the_advice(
    http: httpx.Client, serve: Serve, upstreams: Upstreams
) -> None:
    upstream = upstreams(["Done.", "Done."], strict=True)
    proxy = serve(upstream, critic("Look first."))
    told = post(http, proxy, headers={"X-Caddie-Protocol": "fixed:0", "X-Caddie-Advice": "1"}).json()["caddie"]
    assert told["consultations"][0]["advice"] == "Look first."
    assert told["consultations"][0]["trigger"] == "fixed"
    assert roles(upstream.chats[0]) == "suCA"


@pytest.mark.parametrize(("asked", "wanted"), [(1, 1), (0, 0), (9, 2)])
def test_a_request_may_lower_the_limit_and_not_raise_it(
    http: httpx.Client, serve: Serve, upstreams: Upstreams, asked: int, wanted: int
) -> None:
    upstream = upstreams(lambda body: calls(ask()) if "call_critic" in offered(body) else "Done.", strict=True)
    judge = critic()
    post(http, serve(upstream, judge, budget=Budget(max_uses=2)), headers={"X-Caddie-Max-Uses": str(asked)})
    assert len(judge.seen) == wanted


@pytest.mark.parametrize(
    "headers",
    [{"X-Caddie": "perhaps"}, {"X-Caddie-Protocol": "now"}, {"X-Caddie-Max-Uses": "-1"}, {"X-Caddie-Advice": "2"}],
)
def test_a_bad_header_is_refused_in_one_line(
    http: httpx.Client, serve: Serve, upstreams: Upstreams, headers: Any
) -> None:
    refused(post(http, serve(upstreams([])), headers=headers))


@pytest.mark.parametrize("field", [[], "off", {"nope": 1}, {"max_uses": True}, {"max_uses": None}, {"protocol": 5}])
def test_a_bad_field_is_refused_in_one_line(http: httpx.Client, serve: Serve, upstreams: Upstreams, field: Any) -> None:
    refused(post(http, serve(upstreams([])), {"caddie": field}))


def test_an_endless_number_is_refused(http: httpx.Client, serve: Serve, upstreams: Upstreams) -> None:
    body = b'{"messages": [{"role": "user", "content": "x"}], "caddie": {"max_uses": 1e999}}'
    refused(http.post(f"{serve(upstreams([])).url}/chat/completions", content=body))


def refused(answer: httpx.Response) -> None:
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]


# ---------------------------------------------------------------------- what passes


@pytest.mark.parametrize("body", [b"", b"{cut", b"[1]", b"\xff\xfe", b'{"messages": 3}'])
def test_a_body_that_is_no_request_is_the_upstreams_business(
    http: httpx.Client, serve: Serve, upstreams: Upstreams, body: bytes
) -> None:
    upstream = upstreams(lambda body: failure(400, "the messages are no list"))
    bare = http.post(f"{upstream.url}/chat/completions", content=body)
    answer = http.post(f"{serve(upstream).url}/chat/completions", content=body)
    assert (answer.status_code, answer.content) == (bare.status_code, bare.content)
    assert upstream.requests[0].body == upstream.requests[1].body


def test_other_paths_pass_untouched(http: httpx.Client, serve: Serve, upstreams: Upstreams) -> None:
    upstream = upstreams([], models=["one", "two"])
    client = OpenAI(base_url=serve(upstream).url, api_key=KEY)
    assert [model.id for model in client.models.list()] == ["one", "two"]
    assert client.embeddings.create(model="m", input=["ab", "c"]).data[0].embedding == [2, 0]
    assert {request.headers["authorization"] for request in upstream.requests} == {f"Bearer {KEY}"}
    client.close()


def test_binary_and_packed_bodies_pass_both_ways(http: httpx.Client, serve: Serve, upstreams: Upstreams) -> None:
    data = bytes(range(256)) * 40
    packed = gzip.compress(data)

    class Packing(Upstream):
        async def _plan(self, request: Any) -> Any:
            return Scripted(body=packed, headers={"content-encoding": "gzip", "content-type": "audio/x"}), None

    with Packing([]) as upstream:
        proxy = serve(upstream.url)
        with http.stream(
            "POST",
            f"{proxy.url}/audio/speech",
            content=packed,
            headers={"content-encoding": "gzip", "accept-encoding": "gzip"},
        ) as answer:
            assert b"".join(answer.iter_raw()) == packed
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.headers["content-length"] == str(len(packed))
        sent = upstream.requests[0]
        assert sent.body == packed.decode("latin-1")
        assert sent.headers["content-encoding"] == "gzip"


def test_packed_chat_answers_are_read(http: httpx.Client, serve: Serve) -> None:
    said = iter([calls(ask("c1")), {"role": "assistant", "content": "Done."}])

    class Packing(Upstream):
        async def _plan(self, request: Any) -> Any:
            reply, events = await super()._plan(request)
            assert "gzip" in request.headers["accept-encoding"]
            packed = gzip.compress(json.dumps(reply.body).encode())
            return Scripted(body=packed, headers={"content-encoding": "gzip"}), events

    with Packing(lambda body: next(said)) as upstream:
        answer = post(http, serve(upstream.url), headers={"accept-encoding": "br, zstd"})
        assert answer.json()["choices"][0]["message"]["content"] == "Done."
        assert "content-encoding" not in answer.headers


def test_a_packed_chat_request_passes_as_it_is(http: httpx.Client, serve: Serve, upstreams: Upstreams) -> None:
    upstream, packed = upstreams([]), gzip.compress(json.dumps({"messages": ASK}).encode())
    http.post(f"{serve(upstream).url}/chat/completions", content=packed, headers={"content-encoding": "gzip"})
    assert upstream.requests[0].body == packed.decode("latin-1")
    assert upstream.requests[0].headers["content-encoding"] == "gzip"


def test_who_asks_for_no_packing_gets_none(serve: Serve, upstreams: Upstreams) -> None:
    upstream = upstreams([])
    proxy = serve(upstream)
    raw(proxy, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert upstream.requests[0].headers["accept-encoding"] == "identity"


def test_cookies_stay_apart(http: httpx.Client, serve: Serve) -> None:
    class Baking(Upstream):
        async def _plan(self, request: Any) -> Any:
            return Scripted(body={}, headers={"set-cookie": "a=1; Path=/", "Set-Cookie": "b=2; Path=/"}), None

    with Baking([]) as upstream:
        answer = http.get(f"{serve(upstream.url).root}/x")
        assert answer.headers.get_list("set-cookie") == ["a=1; Path=/", "b=2; Path=/"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files//x",
        "/v1/../admin",
        "//evil.example/x",
        "/v1/a%2Fb",
        "/x?a=1&a=2&b=%20",
        "/v1/chat/completions/",
        "/v1",
        "/é",
    ],
)
def test_odd_paths_pass_as_they_are(serve: Serve, upstreams: Upstreams, path: str) -> None:
    upstream = upstreams([])
    target = path.encode().replace("é".encode(), b"%C3%A9")
    answer = raw(serve(upstream), b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    place, _, query = target.decode().partition("?")
    got = upstream.requests[0]
    assert got.path == {"/v1/../admin": "/admin", "//evil.example/x": "/x"}.get(place, place)
    assert bool(got.query) == bool(query)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "GET"])
def test_every_method_passes(http: httpx.Client, serve: Serve, upstreams: Upstreams, method: str) -> None:
    upstream = upstreams([])
    proxy = serve(upstream)
    answer = http.request(method, f"{proxy.url}/chat/completions", headers={"x-own": "1"})
    assert answer.status_code == 200
    assert (upstream.requests[0].method, upstream.requests[0].headers["x-own"]) == (method, "1")
    if method == "HEAD":
        assert answer.content == b""
    else:
        assert answer.json()["method"] == method


def raw(proxy: Serving, request: bytes) -> bytes:
    """Bytes over a socket, for what no client would send."""
    host, port = proxy.root.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as line:
        line.sendall(request)
        return b"".join(iter(lambda: line.recv(65536), b""))


def test_a_host_header_leads_nowhere_else(serve: Serve, upstreams: Upstreams) -> None:
    upstream = upstreams([])
    raw(
        serve(upstream),
        b"GET /v1/models HTTP/1.1\r\nHost: evil.example/v1/chat/completions?\r\nConnection: close\r\n\r\n",
    )
    assert upstream.requests[0].path == "/v1/models"
    assert "evil" not in upstream.requests[0].headers["host"]


# ---------------------------------------------------------------------- limits and faults


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_is_refused(
    http: httpx.Client, serve: Serve, upstreams: Upstreams, declared: bool
) -> None:
    upstream = upstreams([])
    proxy = serve(upstream, limits=Limits(max_body=1000))
    body = b"x" * 2000 if declared else iter([b"x" * 600] * 3)
    answer = http.post(f"{proxy.url}/chat/completions", content=body)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "the request body is larger than 1,000 bytes"
    assert not upstream.requests


def test_a_body_that_never_ends_is_given_up(serve: Serve, upstreams: Upstreams) -> None:
    proxy = serve(upstreams([]), limits=Limits(total=0.3))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{"
    assert raw(proxy, head).startswith(b"HTTP/1.1 408")


def test_a_caller_that_leaves_amid_its_body_is_no_fault(
    http: httpx.Client, serve: Serve, upstreams: Upstreams, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = serve(upstreams(["Done."]))
    host, port = proxy.root.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as line:
        line.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.05)
    assert post(http, proxy).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("limits", [Limits(idle=0.2), Limits(total=0.2)])
@pytest.mark.parametrize("stream", [False, True])
def test_an_upstream_that_stalls_is_a_504(
    http: httpx.Client, serve: Serve, upstreams: Upstreams, limits: Limits, stream: bool
) -> None:
    upstream = upstreams([Scripted("late", stall=5)])
    answer = post(http, serve(upstream, limits=limits), {"stream": stream})
    assert answer.status_code == 504
    assert answer.json()["error"]["message"] == "the upstream gave no answer in time"
    upstream.wait_until(lambda: upstream.requests[0].aborted)


def test_a_stream_that_stalls_ends_with_an_error_event(http: httpx.Client, serve: Serve, upstreams: Upstreams) -> None:
    upstream = upstreams([Scripted("0123456789", gap=2)])
    answer = post(http, serve(upstream, limits=Limits(idle=0.3)), {"stream": True})
    *_, last = answer.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the upstream gave no answer in time"


def test_an_upstream_that_is_not_there_is_a_502(http: httpx.Client, serve: Serve) -> None:
    for path in ("chat/completions", "models"):
        proxy = serve("http://127.0.0.1:9")
        answer = http.request("GET" if path == "models" else "POST", f"{proxy.url}/{path}", json={"messages": ASK})
        assert answer.status_code == 502
        assert answer.json()["error"]["type"] == "upstream_error"
        assert "127.0.0.1" not in answer.text


def test_an_answer_that_breaks_off_is_one_that_breaks_off(
    http: httpx.Client, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaking(Upstream):
        async def _plan(self, request: Any) -> Any:
            return Scripted(body=b"x" * 5000, die_after=1), None

    with Breaking([]) as upstream, pytest.raises(httpx.RemoteProtocolError):
        http.get(f"{serve(upstream.url).root}/x")
    assert "Traceback" not in caplog.text


def test_redirects_are_the_callers_business(http: httpx.Client, serve: Serve) -> None:
    class Moving(Upstream):
        async def _plan(self, request: Any) -> Any:
            return Scripted(status=307, body={}, headers={"location": "https://elsewhere.example/"}), None

    with Moving([]) as upstream:
        for path in ("models", "chat/completions"):
            answer = http.post(f"{serve(upstream.url).url}/{path}", json={"messages": ASK})
            assert (answer.status_code, answer.headers["location"]) == (307, "https://elsewhere.example/")


# ---------------------------------------------------------------------- for operators


def counts(http: httpx.Client, proxy: Serving) -> dict[str, float]:
    page = http.get(f"{proxy.root}/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    found = re.findall(r"^(caddie_\S+) (\S+)$", page.text, re.MULTILINE)
    return {name: float(value) for name, value in found if "_bucket" not in name and "_created" not in name}


def test_the_numbers_are_those_of_what_happened(http: httpx.Client, serve: Serve, upstreams: Upstreams) -> None:
    script = [calls(ask()), "Done.", calls(ask()), "Done.", failure(429)]
    proxy = serve(upstreams(script, strict=True), critic("One.", "Two."))
    post(http, proxy)
    post(http, proxy, {"stream": True, "stream_options": {"include_usage": True}})
    assert post(http, proxy).status_code == 429
    http.post(f"{proxy.url}/chat/completions", content=b"{cut")
    http.get(f"{proxy.url}/secret/{KEY}")
    until = time.monotonic() + 5
    while (seen := counts(http, proxy))["caddie_requests_in_flight"]:  # an answer is counted after it has gone out
        assert time.monotonic() < until, seen
        time.sleep(0.01)
    chat = 'path="/v1/chat/completions"'
    assert seen[f'caddie_requests_total{{{chat},status="200"}}'] == 2
    assert seen[f'caddie_requests_total{{{chat},status="429"}}'] == 1
    assert seen['caddie_requests_total{path="other",status="200"}'] == 1
    assert seen["caddie_unadopted_total"] == 1
    assert seen["caddie_requests_in_flight"] == 0
    assert seen['caddie_consultations_total{control="call_critic",status="ok",trigger="self-call"}'] == 2
    assert seen["caddie_consultation_seconds_count"] == 2
    assert seen['caddie_tokens_total{kind="prompt",who="agent"}'] == 400
    assert seen['caddie_tokens_total{kind="completion",who="agent"}'] == 40
    assert seen['caddie_tokens_total{kind="cached",who="agent"}'] == 160
    assert seen[f"caddie_request_seconds_count{{{chat}}}"] == 4


def test_health_is_told_whatever_the_upstream_does(http: httpx.Client, serve: Serve) -> None:
    answer = http.get(f"{serve('http://127.0.0.1:9').root}/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_neither_keys_nor_words_are_told_to_anybody(
    http: httpx.Client, serve: Serve, upstreams: Upstreams, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="caddie")
    upstream = upstreams(
        [calls(ask()), "The answer.", failure(500), Scripted(status=0), Scripted("x", die_after=0), "x"]
    )
    proxy = serve(upstream, critic("The advice."))
    for body in ({}, {"stream": True}, {}, {}, {"messages": [*ASK, {"role": "tool", "content": "stray"}]}):
        with contextlib.suppress(httpx.HTTPError):
            post(http, proxy, body)
    page = http.get(f"{proxy.root}/metrics").text
    assert {request.headers["authorization"] for request in upstream.requests} == {f"Bearer {KEY}"}
    assert "passed on without a critic" in caplog.text
    logged = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("caddie"))
    for secret in (KEY, "Return order", "The answer", "The advice", "stray"):
        assert secret not in logged
        assert secret not in page


# ---------------------------------------------------------------------- the process


@contextlib.contextmanager
def process(*options: str) -> Iterator[tuple[str, subprocess.Popen[str], list[str]]]:
    """`caddie proxy` with these options: its URL, the process, and what it writes to stderr."""
    command = [str(Path(sys.executable).with_name("caddie")), "proxy", *options]
    env = {**os.environ, "NO_COLOR": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        written: list[str] = []
        reading = threading.Thread(target=written.extend, args=(running.stderr,), daemon=True)
        reading.start()
        try:
            yield running.stdout.readline().strip(), running, written
        finally:
            if running.poll() is None:
                running.kill()
            running.wait(10)
            reading.join(10)


def served_critic(upstreams: Upstreams) -> Upstream:
    return upstreams(lambda body: ADVICE, models=["judge"])


def test_the_process_serves_a_whole_task_and_tells_nothing(upstreams: Upstreams, tmp_path: Path) -> None:
    script = [calls(ask("c1"), look(id="a1")), "Done.", calls(look(id="a2"), ask("c2")), "Bye."]
    upstream, judge = upstreams(script, strict=True), served_critic(upstreams)
    options = ["--upstream", upstream.url, "--critic", judge.url, "--ledger", str(tmp_path / "ledger.db")]
    with process(*options) as (url, running, written):
        client = OpenAI(base_url=url, api_key=KEY, max_retries=0)
        history = work(Application(client, "create"), ASK, lambda call: "found")
        history.append({"role": "user", "content": "Thanks."})
        last = work(Application(client, "helper"), history, lambda call: "found")[-1]
        client.close()
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 0
    assert last["content"] == "Bye."
    assert [roles(body) for body in upstream.chats] == ["su", "suMAt", "suMAtau", "suMAtauMtA"]
    assert len(judge.chats) == 2
    told = "".join(written)
    assert KEY not in told
    assert "Return order" not in told
    assert "Traceback" not in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_lets_a_stream_finish_before_it_ends(upstreams: Upstreams, number: signal.Signals) -> None:
    upstream = upstreams([calls(ask()), Scripted("0123456789" * 4, gap=0.1)])
    judge = served_critic(upstreams)
    with process("--upstream", upstream.url, "--critic", judge.url) as (url, running, written):
        client = OpenAI(base_url=url, api_key=KEY, max_retries=0)
        spoken, told = "", False
        for one in client.chat.completions.create(model="m", messages=ASK, stream=True):
            if not told:
                running.send_signal(number)
            told = True
            spoken += (one.choices[0].delta.content or "") if one.choices else ""
        assert spoken == "0123456789" * 4
        client.close()
        assert running.wait(10) == 0
    assert "Traceback" not in "".join(written)
    with pytest.raises(openai.APIConnectionError):
        OpenAI(base_url=url, api_key=KEY, max_retries=0).models.list()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_ends_in_time_with_a_stream_that_does_not(upstreams: Upstreams, number: signal.Signals) -> None:
    upstream = upstreams([Scripted("0123456789" * 100, gap=0.2)])
    with process("--upstream", upstream.url, "--critic", "off", "--drain", "1") as (url, running, written):
        with httpx.stream(
            "POST", f"{url}/chat/completions", json={"messages": ASK, "stream": True}, timeout=10
        ) as answer:
            chunks = answer.iter_bytes()
            next(chunks)
            running.send_signal(number)
            if number == signal.SIGINT:  # a second one is meant in earnest
                time.sleep(0.3)
                running.send_signal(number)
            started = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                for _ in chunks:
                    pass
            assert running.wait(10) == 0
        assert time.monotonic() - started < 6
        upstream.wait_until(lambda: upstream.requests[0].aborted)
    if number == signal.SIGTERM:
        assert "Traceback" not in "".join(written)


def test_without_a_critic_the_process_is_a_plain_proxy(upstreams: Upstreams) -> None:
    upstream = upstreams(["Done."], strict=True)
    with process("--upstream", upstream.url, "--critic", "off") as (url, _, _):
        answer = httpx.post(f"{url}/chat/completions", json={"messages": ASK, "caddie": {}}, headers={"X-Caddie": "on"})
    assert answer.json()["choices"][0]["message"]["content"] == "Done."
    assert upstream.chats == [{"messages": ASK}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--upstream", "not a url", "--critic", "off"], "upstream"),
        (["--upstream", "http://127.0.0.1:9", "--critic", "http://127.0.0.1:9/v1"], "127.0.0.1:9"),
        (["--upstream", "http://127.0.0.1:9", "--critic", "self"], "--critic"),
        (["--upstream", "http://127.0.0.1:9", "--critic", "off", "--protocol", "now"], "protocol"),
        (["--upstream", "http://127.0.0.1:9", "--critic", "off", "--ledger", "/proc/none/x"], "ledger"),
        (["--upstream", "http://127.0.0.1:9", "--critic", "off", "--host", "203.0.113.7"], "cannot listen"),
    ],
)
def test_a_bad_option_is_told_in_one_line(options: list[str], said: str) -> None:
    with process(*options) as (url, running, written):
        assert url == ""
        assert running.wait(20) != 0
    assert said in "".join(written)
    assert "Traceback" not in "".join(written)
