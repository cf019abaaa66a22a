"""The engines: supervision with a small stand-in for `vllm`, and real models through llama.cpp and transformers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from caddie_critics.checkpoint import write_caddie_json
from caddie_critics.engines import LlamaCppEngine, TransformersEngine, VllmEngine
from caddie_critics.engines.base import client_host, default_threads, free_port, require, require_free
from caddie_critics.engines.vllm_engine import vllm_command
from caddie_critics.packs import load_pack
from caddie_critics.serve import resolve_checkpoint, serve
from caddie_sdk.endpoint import ChatEndpoint
from caddie_sdk.errors import ContextOverflow, EndpointRefused, MissingExtra, ServeError

ENGINES = Path(sys.modules["caddie_critics.engines"].__file__ or "").parent


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return met


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet collected does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def guards() -> set[str]:
    """Guards of engines that this process started."""
    table = subprocess.run(["ps", "-eww", "-o", "ppid=,pid=,args="], capture_output=True, text=True, check=True).stdout
    return {row for row in table.splitlines() if row.split(None, 1)[0] == str(os.getpid()) and str(ENGINES) in row}


@pytest.fixture(scope="module", autouse=True)
def _no_leftovers() -> Iterator[None]:
    before = guards()
    yield
    assert guards() <= before


# -------------------------------------------------------------------- a stand-in for vLLM

FAKE = """\
    import json, os, signal, subprocess, sys, time
    from http.server import BaseHTTPRequestHandler, HTTPServer

    mode, folder = os.environ["FAKE_VLLM"], os.environ["FAKE_VLLM_FOLDER"]
    option = lambda name: sys.argv[sys.argv.index(name) + 1]
    facts = {"argv": sys.argv[1:], "pid": os.getpid(), "offline": os.environ.get("HF_HUB_OFFLINE")}
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        facts["worker"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
    json.dump(facts, open(f"{folder}/new", "w"))
    os.replace(f"{folder}/new", f"{folder}/facts.json")
    print("INFO starting")
    if mode == "dies":
        print("(EngineCore pid=7) ERROR 11-30 12:00:00 [core.py:1] Traceback (most recent call last):")
        print("(EngineCore pid=7) ERROR 11-30 12:00:00 [core.py:1] ValueError: no room for the KV cache")
        sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
    if mode == "silent":
        time.sleep(600)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = "somebody-else" if mode == "other" else option("--served-model-name")
            body = b"" if self.path == "/health" else json.dumps({"data": [{"id": name}]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    HTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever()
"""


class FakeVllm:
    """Puts an executable `vllm` on PATH that serves the two routes an engine looks at, or misbehaves."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        program = folder / "vllm"
        program.write_text(f"#!{sys.executable}\n{textwrap.dedent(FAKE)}")
        program.chmod(0o755)
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("FAKE_VLLM_FOLDER", str(folder))
        self._patch = patch
        self.mode("ok")

    def mode(self, name: str) -> None:
        self._patch.setenv("FAKE_VLLM", name)

    def facts(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.folder / "facts.json").read_text())
        return read

    def engine(self, **settings: Any) -> VllmEngine:
        return VllmEngine(self.folder, model_id="critic@search-1a2b3c4d", **settings)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(tmp_path, monkeypatch)


def test_the_arguments_of_vllm_serve() -> None:
    assert vllm_command("/weights", model_id="critic@search-1a2b3c4d", host="127.0.0.1", port=8001) == [
        *("vllm", "serve", "/weights", "--served-model-name", "critic@search-1a2b3c4d"),
        *("--host", "127.0.0.1", "--port", "8001"),
        *("--generation-config", "vllm", "--load-format", "safetensors"),
    ]
    full = vllm_command(
        "/weights",
        model_id="critic",
        host="0.0.0.0",
        port=9,
        executable="/opt/vllm",
        context=32768,
        slots=64,
        tensor_parallel=4,
        gpu_memory_utilization=0.85,
        chat_template="{{ messages }}",
        extra_args=["--enforce-eager", "--generation-config", "auto"],
    )
    assert full[0] == "/opt/vllm"
    assert full[full.index("safetensors") + 1 :] == [
        *("--max-model-len", "32768", "--max-num-seqs", "64", "--tensor-parallel-size", "4"),
        *("--gpu-memory-utilization", "0.85", "--chat-template", "{{ messages }}"),
        *("--enforce-eager", "--generation-config", "auto"),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_args": ["--port", "1"]}, "--port is set by Caddie"),
        ({"extra_args": ["--served_model_name=x"]}, "--served_model_name is set by Caddie"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, r"share in \(0, 1\], not 1.5"),
        ({"port": 70000}, "port 70000 is not a port"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ServeError, match=message):
        VllmEngine("/weights", model_id="critic", **settings)


def test_an_engine_starts_is_healthy_and_stops(fake: FakeVllm) -> None:
    engine = fake.engine(context=4096)
    assert not engine.health()
    with pytest.raises(ServeError, match="not running"):
        engine.url
    with engine:
        facts, url = fake.facts(), engine.url
        assert engine.start() == url  # started already: the same server
        assert fake.facts()["pid"] == facts["pid"]
        assert engine.health()
        assert engine.failure() is None
        assert ChatEndpoint(url).check() == "critic@search-1a2b3c4d"
        assert facts["argv"][:2] == ["serve", str(fake.folder)]
        assert facts["argv"][-2:] == ["--max-model-len", "4096"]
        assert facts["offline"] == "1"
    assert not alive(facts["pid"])
    assert not engine.health()
    require_free("127.0.0.1", int(url.split(":")[2].removesuffix("/v1")))
    engine.stop()  # a second time: nothing happens
    with engine:
        assert engine.health()


def test_an_early_end_is_one_line_with_its_cause(fake: FakeVllm) -> None:
    fake.mode("dies")
    engine = fake.engine()
    with pytest.raises(ServeError) as caught:
        engine.start()
    assert str(caught.value) == (
        "critic@search-1a2b3c4d could not be served: the vllm engine ended with status 1: "
        "ValueError: no room for the KV cache"
    )
    assert not alive(fake.facts()["pid"])


def test_a_server_that_ignores_sigterm_is_killed_with_its_workers(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmEngine, "grace", 0.3)
    fake.mode("deaf")
    engine = fake.engine()
    engine.start()
    facts = fake.facts()
    assert alive(facts["pid"])
    assert alive(facts["worker"])
    engine.stop()
    assert not alive(facts["pid"])
    assert until(lambda: not alive(facts["worker"]))


def test_workers_do_not_outlive_a_server_that_crashes(fake: FakeVllm) -> None:
    fake.mode("deaf")
    with fake.engine() as engine:
        facts = fake.facts()
        os.kill(facts["pid"], signal.SIGKILL)
        assert until(lambda: engine.failure() is not None)
        assert engine.failure() == "the vllm engine ended with signal 9 (out of memory?): INFO starting"
        assert not engine.health()
        assert until(lambda: not alive(facts["worker"]))
        fake.mode("ok")
        engine.start()  # again, in place of the one that ended
        assert engine.health()


def test_waiting_is_bounded(fake: FakeVllm) -> None:
    fake.mode("silent")
    with pytest.raises(ServeError, match=r"not ready within 1\.5 s; .*: INFO starting$"):
        fake.engine(start_timeout=1.5).start()
    assert not alive(fake.facts()["pid"])


def test_somebody_elses_server_is_not_taken_for_ours(fake: FakeVllm) -> None:
    fake.mode("other")
    with pytest.raises(ServeError, match="lists somebody-else and not critic@search-1a2b3c4d"):
        fake.engine().start()
    assert not alive(fake.facts()["pid"])


def test_a_taken_port_is_refused_before_anything_starts(fake: FakeVllm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError) as caught:
            fake.engine(port=port).start()
    assert str(caught.value).startswith(f"cannot listen on 127.0.0.1:{port}: address already in use; choose another")
    assert not (fake.folder / "facts.json").exists()


PARENT = """\
    import os, sys, time
    from caddie_critics.engines import VllmEngine
    engine = VllmEngine(sys.argv[1], model_id="critic")
    engine.start()
    if sys.argv[2] == "branch":
        if os.fork() == 0:
            time.sleep(30)  # a branch that holds all of our files open
        began = time.monotonic()
        engine.stop()
        sys.exit(time.monotonic() - began > 4)
    if sys.argv[2] == "fork":
        child = os.fork()
        if child == 0:
            seen = engine.failure() is None and engine.health()
            engine.stop()  # the fork's own view; the server is its parent's
            os._exit(0 if seen else 3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.exit(status if engine.health() else 4)
    print("up", flush=True)
    time.sleep(600)
"""


def test_a_server_ends_with_the_process_that_started_it_even_by_sigkill(fake: FakeVllm) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(fake.folder), "sleep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        server = fake.facts()["pid"]
        assert alive(server)
        parent.kill()
    assert until(lambda: not alive(server))


def test_a_fork_uses_the_server_and_cannot_stop_it(fake: FakeVllm) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(fake.folder), "fork"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert until(lambda: not alive(fake.facts()["pid"]))


def test_a_server_is_stopped_while_a_fork_lives_on(fake: FakeVllm) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(fake.folder), "branch"]
    with subprocess.Popen(command, start_new_session=True) as parent:
        try:
            assert parent.wait(20) == 0
            assert not alive(fake.facts()["pid"])
        finally:
            os.killpg(parent.pid, signal.SIGKILL)  # the branch


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("caddie_critics.engines.vllm_engine.vllm_executable", lambda: None)
    with pytest.raises(MissingExtra, match=r"pip install 'caddie-sdk\[vllm\]'"):
        VllmEngine(tmp_path, model_id="critic").start()


# -------------------------------------------------------------------- small parts


def test_compute_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CADDIE_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert default_threads(None) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert default_threads(None) == 1
    assert default_threads(5) == 5
    monkeypatch.setenv("CADDIE_THREADS", "3")
    assert default_threads(None) == 3
    assert default_threads(5) == 5
    for told in ("0", "two", "-1"):
        monkeypatch.setenv("CADDIE_THREADS", told)
        with pytest.raises(ServeError, match=f"at least 1, not {told}"):
            default_threads(None)
    with pytest.raises(ServeError, match="at least 1, not 0"):
        default_threads(0)


def test_ports_and_hosts() -> None:
    require_free("127.0.0.1", free_port("127.0.0.1"))
    with pytest.raises(ServeError, match="'no such host' is not a host name"):
        require_free("no such host", 8001)
    with pytest.raises(ServeError, match=r"cannot listen on 192\.0\.2\.1:0: .*; give an address of this machine$"):
        require_free("192.0.2.1", 0)  # an address kept for documentation: no machine has it
    assert [client_host(host) for host in ("0.0.0.0", "::", "127.0.0.1")] == ["127.0.0.1", "::1", "127.0.0.1"]


def test_a_missing_package_names_its_extra() -> None:
    require("it", "local", "json", "httpx")
    with pytest.raises(MissingExtra, match=r"^it needs .* pip install 'caddie-sdk\[local\]'$"):
        require("it", "local", "json", "no_such_package_anywhere")


@pytest.mark.parametrize("settings", [{"slots": 0}, {"context": 0}])
def test_llamacpp_refuses_an_empty_context(settings: dict[str, Any]) -> None:
    with pytest.raises(ServeError, match="at least 1"):
        LlamaCppEngine("x.gguf", model_id="critic", **settings)


# -------------------------------------------------------------------- SmolLM2 through llama.cpp

WEIGHTS = "SmolLM2@search-1a2b3c4d"


@pytest.fixture(scope="module")
def smol() -> Iterator[LlamaCppEngine]:
    with LlamaCppEngine(resolve_checkpoint("embedded").path, model_id=WEIGHTS, context=1024, slots=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def smol_chat(smol: LlamaCppEngine) -> ChatEndpoint:
    return ChatEndpoint(smol.url, smol.model_id, grammar=smol.grammar, params={"temperature": 0, "max_tokens": 40})


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.slow
def test_llamacpp_lists_the_served_id_and_nothing_else(smol: LlamaCppEngine) -> None:
    listed = httpx.get(f"{smol.url}/models", timeout=30).json()["data"]
    assert [(entry["id"], entry["aliases"]) for entry in listed] == [(WEIGHTS, [WEIGHTS])]
    assert listed[0]["meta"]["n_ctx"] == 1024  # for each slot
    assert smol.health()
    assert smol.log == []  # a healthy start prints no line


@pytest.mark.slow
async def test_llamacpp_chats_under_a_grammar(smol_chat: ChatEndpoint) -> None:
    grammar = 'root ::= "Analysis: " [a-z ]{1,20} "\\n\\nAdvices for next steps: stop"'
    reply = await smol_chat.chat(user("Is water wet?"), grammar=grammar)
    text = str(reply.message["content"])
    assert text.startswith("Analysis: ")
    assert text.endswith("\n\nAdvices for next steps: stop")
    assert reply.usage.completion_tokens > 5
    with pytest.raises(EndpointRefused, match=r"400.*grammar"):
        await smol_chat.chat(user("Is water wet?"), grammar="root :: nonsense")
    await smol_chat.aclose()


@pytest.mark.slow
async def test_llamacpp_reads_a_repeated_prompt_from_its_cache(smol_chat: ChatEndpoint) -> None:
    prompt = user(" ".join(f"Fact {number}: apples are red." for number in range(40)))
    first = await smol_chat.chat(prompt, params={"max_tokens": 2})
    longer = [*prompt, {"role": "assistant", "content": first.message["content"]}, *user("And now?")]
    second = await smol_chat.chat(longer, params={"max_tokens": 2})
    assert first.usage.prompt_tokens > 300
    assert second.usage.cached_tokens >= 0.9 * first.usage.prompt_tokens
    await smol_chat.aclose()


@pytest.mark.slow
async def test_llamacpp_answers_400_when_the_context_is_too_small(
    smol: LlamaCppEngine, smol_chat: ChatEndpoint
) -> None:
    long = user("word " * 1500)
    answer = httpx.post(f"{smol.url}/chat/completions", json={"messages": long}, timeout=60)
    assert answer.status_code == 400
    with pytest.raises(ContextOverflow):
        await smol_chat.chat(long)
    await smol_chat.aclose()


@pytest.mark.slow
def test_llamacpp_samples_plainly_and_tells_nothing_of_others(smol: LlamaCppEngine) -> None:
    root = smol.url.removesuffix("/v1")
    sampling = httpx.get(f"{root}/props", timeout=30).json()["default_generation_settings"]["params"]
    assert [sampling[name] for name in ("temperature", "top_p", "top_k", "min_p")] == [1.0, 1.0, 0, 0.0]
    assert httpx.get(f"{root}/slots", timeout=30).status_code == 501
    answer = httpx.get(f"{smol.url}/models", headers={"Origin": "http://evil.example"}, timeout=30)
    assert answer.headers.get("access-control-allow-origin", "") == ""


@pytest.mark.slow
def test_llamacpp_stops_at_once_with_a_request_under_way() -> None:
    """In this process xllamacpp would wait for the client, and the client for xllamacpp."""
    engine = LlamaCppEngine(resolve_checkpoint("embedded").path, model_id="busy", slots=1)
    url = engine.start()
    ended: list[Exception] = []

    def ask() -> None:
        body = {"messages": user("Count to one million."), "max_tokens": 6000, "ignore_eos": True}
        try:
            httpx.post(f"{url}/chat/completions", json=body, timeout=120)
        except httpx.HTTPError as error:
            ended.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    began = time.monotonic()
    engine.stop()
    assert time.monotonic() - began < 3
    asking.join(10)
    assert len(ended) == 1
    require_free("127.0.0.1", int(url.split(":")[2].removesuffix("/v1")))


@pytest.mark.slow
def test_llamacpp_names_what_is_wrong_with_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    weights = resolve_checkpoint("embedded").path
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(weights.read_bytes()[:20_000_000])
    with pytest.raises(ServeError, match=r"^cut could not be served: .*model is corrupted or incomplete$"):
        LlamaCppEngine(cut, model_id="cut").start()
    with pytest.raises(ServeError, match="Parser Error"):
        LlamaCppEngine(weights, model_id="x", chat_template="{% for").start()
    assert capfd.readouterr() == ("", "")


# -------------------------------------------------------------------- a tiny model through transformers

TINY = f"tiny@feedback-{load_pack('feedback').hash[:8]}"


def make_tiny_model(folder: Path, *, template: bool = True) -> Path:
    """A random two-layer Llama with a byte-level tokenizer: 0.2 MB, 256 tokens of context."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        ["the critic advises"],
        trainers.BpeTrainer(vocab_size=280, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>")
    if template:
        tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Iterator[TransformersEngine]:
    write_caddie_json(tiny_folder, load_pack("feedback"))
    with serve(tiny_folder, engine="transformers", threads=1) as served:
        assert isinstance(served.engine, TransformersEngine)
        assert served.model_id == TINY
        yield served.engine


def ask(engine: TransformersEngine, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    url = engine.url.removesuffix("/v1") + path
    return httpx.post(url, json={"messages": user("hi"), "max_tokens": 8, **body}, timeout=60)


@pytest.mark.slow
async def test_transformers_answers_under_the_served_id(tiny: TransformersEngine) -> None:
    chat = ChatEndpoint(tiny.url, tiny.model_id, grammar=tiny.grammar, params={"max_tokens": 8, "seed": 1})
    assert await chat.acheck() == TINY
    reply = await chat.chat(user("hi"))
    assert reply.model == TINY
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.truncated) == (21, 8, True)
    with pytest.raises(ContextOverflow, match="maximum context length is 256"):
        await chat.chat(user("hi " * 200))
    await chat.aclose()
    assert tiny.health()


@pytest.mark.slow
def test_transformers_samples_as_openai_does(tiny: TransformersEngine) -> None:
    def text(**body: Any) -> str:
        return str(ask(tiny, **body).json()["choices"][0]["message"]["content"])

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=seed) for seed in range(5)}) > 1  # temperature 1 unless told otherwise
    assert len({text(seed=seed, temperature=0) for seed in range(5)}) == 1


@pytest.mark.slow
def test_transformers_fills_the_context_and_no_more(tiny: TransformersEngine) -> None:
    usage = ask(tiny, messages=user("hi " * 70), max_tokens=200, seed=1, logit_bias={"0": -100.0}).json()["usage"]
    assert usage["total_tokens"] == 256


@pytest.mark.slow
def test_transformers_streams(tiny: TransformersEngine) -> None:
    lines = ask(tiny, stream=True, seed=1).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {TINY}
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert ask(tiny, stream=True, messages=user("hi " * 200)).status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "another"}, 404, "the model 'another' is not served here"),
        ({"logprobs": True}, 400, "cannot do logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "cannot do response_format"),
        ({"n": 2}, 400, "cannot do n above 1"),
        ({"messages": []}, 400, "messages must be"),
        ({"messages": [{"content": "hi"}]}, 400, "messages must be"),
        ({"temperature": -1}, 400, "transformers refuses the request"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"messages": user("x" * 17_000_000)}, 413, "larger than"),
    ],
)
def test_transformers_says_no_to_what_it_cannot_do(
    tiny: TransformersEngine, body: dict[str, Any], status: int, message: str
) -> None:
    answer = ask(tiny, **body)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


@pytest.mark.slow
def test_transformers_loads_no_other_model_on_request(tiny: TransformersEngine) -> None:
    for path in ("/load_model", "/reset", "/v1/responses"):
        assert ask(tiny, path).status_code == 404
    root = tiny.url.removesuffix("/v1")
    answer = httpx.post(f"{root}/v1/chat/completions", content=iter([b"{}"]), timeout=30)
    assert answer.status_code == 411  # of unknown length


@pytest.mark.slow
def test_transformers_names_what_is_wrong_with_a_folder(tiny_folder: Path, tmp_path: Path) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ServeError, match="ended with status 1: ValueError: the tokenizer has no chat template"):
        TransformersEngine(tmp_path, model_id="x").start()
    (tmp_path / "model.safetensors").write_bytes(b"no tensors in here")
    with pytest.raises(ServeError, match="SafetensorError"):
        TransformersEngine(tmp_path, model_id="x", chat_template="{{ messages }}").start()
