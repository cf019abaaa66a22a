"""What a proxy costs: requests per second, added latency and CPU of Caddie's and of LiteLLM's, beside no proxy at all.

    python benchmarks/proxy.py [--litellm PATH] [--json PATH]

All rows stand before the same loopback server in one run, in interleaved rounds; ratios and additions are taken within
a round. Caddie runs with protocol `self-call` and a critic it could ask, so every request passes through a session; the
scripted model never asks. LiteLLM runs with one worker, without a database, key check and telemetry.

The load comes from this process alone, over raw asyncio sockets that are kept open: a connection sends the next request
when the last one is answered, so a latency at full load is that of a queue. Everything shares the machine's cores; CPU
seconds per 1000 requests, counted per process, do not depend on who else wanted them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from loopback import Loopback, text
from rich.console import Console
from rich.table import Table

ASK = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You answer questions about cities. " * 20},
        {"role": "user", "content": "Conversation NUMBER: which city is it? " + "Here is a fact about it. " * 40},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Search the passages.",
                "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
            },
        }
    ],
}
LITELLM_CONFIG = """\
model_list:
  - model_name: m
    litellm_params: {{model: openai/m, api_base: "{upstream}", api_key: none}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""
LITELLM_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
DIRECT, LITELLM, CADDIE = "direct", "LiteLLM", "Caddie"
TARGET_STREAMS, TARGET_RATIO = 64, 2.0


class NotStarted(Exception):
    """A server did not come up; says why."""


@dataclass
class Row:
    """Where requests go, and whose CPU time it costs."""

    name: str
    url: str
    pid: int


@dataclass
class Sample:
    """One row in one round: seconds, and CPU seconds of the row's process, the upstream and this one."""

    latencies: list[float]
    firsts: list[float]
    elapsed: float
    cpu: dict[str, float]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.latencies) / self.elapsed

    def quantile(self, percent: int) -> float:
        """Of the latencies, in milliseconds."""
        return 1000 * sorted(self.latencies)[min(len(self.latencies) * percent // 100, len(self.latencies) - 1)]


@dataclass
class Load:
    """Requests for one row, each with a conversation of its own."""

    row: Row
    streaming: bool
    until: float
    latencies: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    sent: int = 0
    last: bytes = b""

    def __post_init__(self) -> None:
        body = json.dumps(ASK | ({"stream": True} if self.streaming else {})).encode()
        self._before, self._after = body.split(b"NUMBER")
        address = urlsplit(self.row.url)
        # process id and time keep conversations apart from those of other loads
        self._tag = f"{os.getpid()}-{time.monotonic_ns()}"
        length = len(body) - len(b"NUMBER") + len(self._tag) + 8
        head = (
            f"POST {address.path}/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer none\r\n"
        )
        self._head = f"{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n".encode()

    def next(self) -> bytes:
        """The next request, ready to be sent."""
        self.sent += 1
        return b"%s%s%s%08d%s" % (self._head, self._before, self._tag.encode(), self.sent, self._after)


class Connection(asyncio.Protocol):
    """Asks again as soon as it is answered, until the time is up."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._got, self._first = bytearray(), 0.0
        self._begun = time.perf_counter()
        self._transport.write(self._load.next())

    def data_received(self, data: bytes) -> None:
        self._got += data
        now = time.perf_counter()
        if not self._first and b"data:" in self._got:
            self._first = now
            self._load.firsts.append(now - self._begun)
        if not self._complete():
            return
        if not self._got.startswith(b"HTTP/1.1 200") or (self._load.streaming and b"[DONE]" not in self._got):
            self.done.set_exception(RuntimeError(f"{self._load.row.name} answered {bytes(self._got[:2000])!r}"))
            self._transport.close()
            return
        self._load.latencies.append(now - self._begun)
        self._load.last = bytes(self._got)
        if now < self._load.until:
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _complete(self) -> bool:
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._got[:end]).lower()
        if b"content-length:" in head:
            return len(self._got) - end - 4 >= int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        return self._got.endswith(b"\r\n0\r\n\r\n")

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"{self._load.row.name} hung up: {error}"))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children so far."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def measure(row: Row, upstream: int, streaming: bool, streams: int, seconds: float) -> Sample:
    """One row under load from so many connections."""
    pids = {"proxy": row.pid, "upstream": upstream}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()} | {"load": time.process_time()}
    started = time.perf_counter()
    load = Load(row, streaming, started + seconds)
    address, loop = urlsplit(row.url), asyncio.get_running_loop()
    connecting = (
        loop.create_connection(lambda: Connection(load), address.hostname, address.port) for _ in range(streams)
    )
    connections = [protocol for _, protocol in await asyncio.gather(*connecting)]
    await asyncio.gather(*(connection.done for connection in connections))
    elapsed = time.perf_counter() - started
    after = {"load": time.process_time()} | {name: cpu_seconds(pid) for name, pid in pids.items()}
    spent = {name: after[name] - before[name] for name in after}
    return Sample(load.latencies, load.firsts, elapsed, spent)


async def check(row: Row, tokens: int) -> None:
    """Warm up, and see that the answer that comes out is the one that the model gave."""
    for streaming in (False, True):
        load = Load(row, streaming, time.perf_counter() + 1.0)
        address, loop = urlsplit(row.url), asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda load=load: Connection(load), address.hostname, address.port)
        await connection.done
        said = answer_of(load.last, streaming)
        assert said == text(tokens), f"{row.name} answered {said!r}"


def answer_of(raw: bytes, streaming: bool) -> str:
    """The text in a whole HTTP response."""
    head, _, body = raw.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        body = b"".join(dechunked(body))
    if not streaming:
        return json.loads(body)["choices"][0]["message"]["content"]
    lines = [line.removeprefix(b"data:").strip() for line in body.splitlines() if line.startswith(b"data:")]
    events = [json.loads(line) for line in lines if line != b"[DONE]"]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def dechunked(body: bytes) -> Iterator[bytes]:
    """The chunks of a chunked body."""
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


@contextmanager
def serving(name: str, command: list[str], ready: str, environ: dict[str, str]) -> Iterator[int]:
    """A server in a process of its own, up once `ready` answers; gives its process id."""
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environ)
        except OSError as error:
            raise NotStarted(f"{name}: {error}") from None
        try:
            until = time.monotonic() + 90
            while not answers(ready):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    last = ([line.strip("│ \n") for line in log if line.strip("│╭╰─╮╯ \n")] or ["no output"])[-1]
                    raise NotStarted(f"{name} did not start: {last}")
                time.sleep(0.1)
            yield process.pid
        finally:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            psutil.wait_procs(children, timeout=10)
            process.wait(timeout=10)


def answers(url: str) -> bool:
    """Whether a GET succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def served(url: str) -> int:
    """Chats that a loopback server has answered so far."""
    with urllib.request.urlopen(f"{url}/models", timeout=5) as answer:
        return json.load(answer)["served"]


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return probing.getsockname()[1]


def start_litellm(stack: ExitStack, program: str, upstream: str) -> Row:
    """LiteLLM's proxy, with one worker."""
    config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "litellm.yaml"
    config.write_text(LITELLM_CONFIG.format(upstream=upstream))
    base = f"http://127.0.0.1:{(port := free_port())}"
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--num_workers", "1", "--telemetry", "False"]
    pid = stack.enter_context(serving(LITELLM, command, f"{base}/health/liveliness", LITELLM_ENV))
    return Row(LITELLM, f"{base}/v1", pid)


def start_caddie(stack: ExitStack, program: str, upstream: str, critic: str, name: str = CADDIE) -> Row:
    """Caddie's proxy."""
    base = f"http://127.0.0.1:{(port := free_port())}"
    command = [program, "proxy", "--upstream", upstream, "--critic", critic, "--port", str(port), "--host", "127.0.0.1"]
    command += [] if critic == "off" else ["--protocol", "self-call"]
    pid = stack.enter_context(serving(name, command, f"{base}/healthz", {}))
    return Row(name, f"{base}/v1", pid)


def summarise(samples: dict[str, list[Sample]], streaming: bool, streams: int) -> list[dict]:
    """One line per row: medians over rounds, additions and ratios against the same round's other rows."""

    def median(values: Iterator[float]) -> float:
        return round(statistics.median(values), 3)

    result = []
    for name, mine in samples.items():
        direct, litellm = samples[DIRECT], samples.get(LITELLM)
        count = sum(len(sample.latencies) for sample in mine)
        cpu = {
            who: round(1000 * sum(sample.cpu[who] for sample in mine) / count, 3)
            for who in ("proxy", "upstream", "load")
        }
        line: dict = {"row": name, "streaming": streaming, "connections": streams, "requests": count}
        line["per_second"] = median(sample.rate for sample in mine)
        line["ratio_to_litellm"] = litellm and median(a.rate / b.rate for a, b in zip(mine, litellm, strict=True))
        for percent in (50, 95):
            line[f"p{percent}_ms"] = median(sample.quantile(percent) for sample in mine)
            line[f"added_p{percent}_ms"] = (
                None
                if name == DIRECT
                else median(a.quantile(percent) - b.quantile(percent) for a, b in zip(mine, direct, strict=True))
            )
        firsts = (1000 * statistics.median(sample.firsts) for sample in mine)
        line["first_chunk_p50_ms"] = median(firsts) if streaming else None
        line["cpu_s_per_1000"] = None if name == DIRECT else cpu["proxy"]
        line["cpu_s_per_1000_upstream"], line["cpu_s_per_1000_load"] = cpu["upstream"], cpu["load"]
        result.append(line)
    return result


async def compare(rows: list[Row], upstream: Row, options: argparse.Namespace) -> list[dict]:
    """All rows under every load, in interleaved rounds."""
    for row in rows:
        await check(row, options.tokens)
    cells = [(streaming, streams) for streaming in (True, False) for streams in options.connections]
    samples: dict = {cell: {row.name: [] for row in rows} for cell in cells}
    for number in range(options.rounds):
        turn = number % len(rows)
        for streaming, streams in cells:
            for row in (*rows[turn:], *rows[:turn]):
                before = served(upstream.url)
                sample = await measure(row, upstream.pid, streaming, streams, options.seconds)
                asked = served(upstream.url) - before
                assert asked == len(sample.latencies), f"{row.name}: {asked} calls for {len(sample.latencies)} answers"
                samples[streaming, streams][row.name].append(sample)
    return [line for cell in cells for line in summarise(samples[cell], *cell)]


COLUMNS = {
    "req/s": "per_second",
    "× LiteLLM": "ratio_to_litellm",
    "p50": "p50_ms",
    "p95": "p95_ms",
    "added p50": "added_p50_ms",
    "added p95": "added_p95_ms",
    "first chunk": "first_chunk_p50_ms",
    "CPU s/1000": "cpu_s_per_1000",
    "upstream's": "cpu_s_per_1000_upstream",
    "load's": "cpu_s_per_1000_load",
}


def show(lines: list[dict], options: argparse.Namespace) -> None:
    """The table, and whether the target is met."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    title = f"Proxies, {options.tokens} tokens an answer, median of {options.rounds} rounds; times in ms"
    table = Table(title=title, caption="CPU seconds per 1000 requests: of the proxy, of the upstream, of the load")
    table.add_column("")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for before, line in zip([None, *lines], lines, strict=False):
        if before is None or (before["streaming"], before["connections"]) != (line["streaming"], line["connections"]):
            kind = "streamed" if line["streaming"] else "whole"
            table.add_section()
            table.add_row(f"[bold]{line['connections']} at a time, {kind}[/bold]")
        cells = (line[name] for name in COLUMNS.values())
        table.add_row(line["row"], *("-" if cell is None else f"{cell:.2f}" for cell in cells))
    console.print(table)
    target = [line for line in lines if line["streaming"] and line["connections"] == TARGET_STREAMS]
    rows = {line["row"]: line for line in target}
    if CADDIE in rows and LITELLM in rows:
        ours, theirs = rows[CADDIE], rows[LITELLM]
        met = ours["ratio_to_litellm"] >= TARGET_RATIO and ours["added_p50_ms"] < theirs["added_p50_ms"]
        console.print(
            f"At {TARGET_STREAMS} streams Caddie serves {ours['ratio_to_litellm']:.2f} × LiteLLM's requests (target "
            f"{TARGET_RATIO:g}) and adds {ours['added_p50_ms']:.1f} ms against {theirs['added_p50_ms']:.1f}: "
            f"{'met' if met else 'NOT met'}."
        )


def start_rows(stack: ExitStack, options: argparse.Namespace, upstream: Row, critic: str) -> list[Row]:
    """Every proxy that can be had; a note says why one cannot."""
    starts = [lambda: start_litellm(stack, options.litellm, upstream.url)] if options.litellm else []
    starts.append(lambda: start_caddie(stack, options.caddie, upstream.url, critic))
    if options.also_off:
        starts.append(lambda: start_caddie(stack, options.caddie, upstream.url, "off", "Caddie, no critic"))
    rows = [upstream]
    if not options.litellm:
        print("no row for LiteLLM: give its executable with --litellm", file=sys.stderr)
    for start in starts:
        try:
            rows.append(start())
        except NotStarted as error:
            print(f"left out: {error}", file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--litellm", help="LiteLLM's executable, in whatever environment it is installed")
    parser.add_argument("--caddie", default=str(Path(sys.executable).with_name("caddie")), help="Caddie's executable")
    parser.add_argument("--also-off", action="store_true", help="one more row: Caddie with --critic off")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=32, help="chunks of a streamed answer")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with ExitStack() as stack:
        server, critic = Loopback(0, tokens=options.tokens), stack.enter_context(Loopback(0))
        url = stack.enter_context(server)
        direct = Row(DIRECT, url, server.pid)
        lines = asyncio.run(compare(start_rows(stack, options, direct, critic), direct, options))
        asked = served(critic)
        assert not asked, f"the critic was asked {asked} times: these figures are not those of the proxy alone"
    show(lines, options)
    if options.json:
        facts = {name: getattr(options, name) for name in ("tokens", "seconds", "rounds")}
        facts |= {"cores": os.cpu_count(), "python": sys.version.split()[0], "rows": lines}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
