"""What all engines share: the protocol, and a model server that is a supervised process."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar

import httpx

from caddie_sdk.errors import MissingExtra, ServeError

Self = TypeVar("Self", bound="SupervisedEngine")

_GUARD = Path(__file__).with_name("_guard.py")
_READY = re.compile(r"caddie-engine-ready (?P<port>\d+)")
ERROR_LINE = re.compile(r"(?:^|\s)(?P<text>(?:\w+\.)*\w*(?:Error|Exception)\b: ?.*)$")
# Compute threads that spin while they wait for one another starve each other on cores that others use too: with
# one of two cores busy, two threads of SmolLM2 gave 1.5 tokens a second when spinning and 34 to 58 when sleeping.
PATIENT = "passive"

_LOG_LINES, _LINE_LENGTH = 400, 4096
_POLL = 0.05


class Engine(Protocol):
    """A model server that can be started and stopped. Also a context manager: starts on entry, stops on exit.

    Attributes:
        name: `llama.cpp`, `transformers` or `vllm`.
        grammar: how its server takes grammars, as `ChatEndpoint(grammar=...)` wants it; None when it takes none.
        model_id: the name the model is served under.
    """

    name: ClassVar[str]
    grammar: ClassVar[str | None]
    model_id: str

    @property
    def url(self) -> str:
        """Base URL for an OpenAI client (`http://127.0.0.1:8001/v1`).

        Raises:
            ServeError: it is not running.
        """

    def start(self) -> str:
        """Start, wait until it is healthy and lists the model, return `url`. Started already: just return it.

        Raises:
            MissingExtra: a package is not installed.
            ServeError: the port is taken, the model cannot be loaded, or it took too long. Nothing is left running.
        """

    def health(self) -> bool:
        """Whether it runs and says that it is well."""

    def failure(self) -> str | None:
        """Why it ended without being stopped, in one line; None while it runs."""

    def stop(self) -> None:
        """Stop and free the port; returns when that is done. Not running: nothing happens."""

    def __enter__(self) -> Engine: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class ServerProcess:
    """A command under a guard (`_guard.py`) that ends it with us; keeps the last lines it wrote, in memory only."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], grace: float) -> None:
        self._owner, self._grace = os.getpid(), grace
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self.port: int | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD), str(grace), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # What it wrote last counts most, so Python programs shall not hold lines back.
            env={"PYTHONUNBUFFERED": "1", **environment, **os.environ},
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="caddie-engine-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        output = self._process.stdout
        assert output is not None
        with output:
            while line := output.readline(_LINE_LENGTH):
                if found := _READY.search(line):
                    self.port = int(found["port"])
                elif line.strip():
                    self._log.append(line.rstrip())

    @property
    def log(self) -> list[str]:
        """The last lines of its output, oldest first."""
        return list(self._log)

    def status(self) -> int | None:
        """Exit status as a shell would tell it, None while it runs."""
        if os.getpid() == self._owner:
            return self._process.poll()
        # A fork of the owner cannot wait for the owner's child, only look whether it is there.
        try:
            os.kill(self._process.pid, 0)
        except OSError:
            return -1
        return None

    def wait(self, seconds: float) -> int | None:
        """Wait for its end, at most so long; the exit status, or None. Its log is complete when it has ended."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(1.0)
        return status

    def end(self) -> None:
        """End it and everything in its process group. A fork of the owner leaves it alone."""
        if os.getpid() != self._owner:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        # A fork of ours may hold the pipe open, so the guard is told as well.
        self._process.terminate()
        if self.wait(self._grace + 5.0) is None:
            self._process.kill()
            self._process.wait()


class SupervisedEngine(ABC):
    """Base of the engines: starts a server process, watches it come up, and ends it without leftovers.

    A kind of server gives `command`, `check` and, where it must, `environment` and `diagnose`. Its process takes
    the port from the command line; with `reports_port` it may be told 0 and prints `caddie-engine-ready PORT` when
    it listens.
    """

    name: ClassVar[str]
    grammar: ClassVar[str | None] = None
    reports_port: ClassVar[bool] = True
    grace: ClassVar[float] = 5.0

    def __init__(self, *, model_id: str, host: str, port: int, start_timeout: float) -> None:
        if not model_id:
            raise ServeError("the model needs a name to be served under; model_id is empty")
        if not 0 <= port <= 65535:
            raise ServeError(f"port {port} is not a port; choose 0 (any free one) to 65535")
        self.model_id, self.host, self.port = model_id, host, port
        self.start_timeout = start_timeout
        self._process: ServerProcess | None = None
        self._url: str | None = None
        self._lock = threading.RLock()

    # ---------------------------------------------------------------- what a kind of server gives

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """The command line of the server process."""

    @abstractmethod
    def check(self) -> None:
        """Raise MissingExtra when a package is absent."""

    def environment(self) -> dict[str, str]:
        """Environment variables of the process, where the user's own environment does not set them."""
        return {}

    def diagnose(self, log: Sequence[str]) -> str:
        """The line of its output that says why it ended: the last that names an error, or the last one."""
        found = next((match for match in map(ERROR_LINE.search, reversed(log)) if match), None)
        return found["text"] if found else (log[-1].strip() if log else "it printed nothing")

    # ---------------------------------------------------------------- the protocol

    @property
    def url(self) -> str:
        """See `Engine.url`."""
        if self._url is None:
            raise ServeError(f"the {self.name} engine is not running; start it first")
        return self._url

    @property
    def log(self) -> list[str]:
        """The last lines the server wrote; empty when it never ran."""
        return self._process.log if self._process else []

    def start(self) -> str:
        """See `Engine.start`."""
        with self._lock:
            # One that only is too busy to answer is left alone.
            if self._url and self._process and (self.health() or self._process.wait(0.5) is None):
                return self._url
            self.stop()
            self.check()
            require_free(self.host, self.port)
            port = self.port or (0 if self.reports_port else free_port(self.host))
            self._process = ServerProcess(self.command(port), self.environment(), self.grace)
            try:
                self._url = self._await_ready(self._process, port)
            except BaseException:
                self.stop()
                raise
            return self._url

    def health(self) -> bool:
        """See `Engine.health`."""
        return self._url is not None and self.failure() is None and _get(self._url, "/health") is not None

    def failure(self) -> str | None:
        """See `Engine.failure`."""
        process = self._process
        status = process.status() if process else None
        if process is None or status is None:
            return None
        process.wait(1.0)
        return f"the {self.name} engine ended with {_told(status)}: {_shortened(self.diagnose(process.log))}"

    def stop(self) -> None:
        """See `Engine.stop`."""
        with self._lock:
            process, self._url = self._process, None
            if process is not None:
                process.end()
                self._process = None

    def __enter__(self: Self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---------------------------------------------------------------- inside

    def _await_ready(self, process: ServerProcess, port: int) -> str:
        deadline = time.monotonic() + self.start_timeout
        while time.monotonic() < deadline:
            if process.wait(_POLL) is not None:
                raise ServeError(f"{self.model_id} could not be served: {self.failure()}")
            known = process.port if self.reports_port else port
            if known:
                url = f"http://{_in_url(client_host(self.host))}:{known}/v1"
                if _get(url, "/health") is not None:
                    self._check_listed(url)
                    return url
        last = process.log[-1] if process.log else "nothing"
        raise ServeError(
            f"{self.model_id}: the {self.name} engine was not ready within {self.start_timeout:g} s; "
            f"allow it longer, or see what it wrote last: {_shortened(last)}"
        )

    def _check_listed(self, url: str) -> None:
        """On a port that we did not bind ourselves, somebody else's server could be the one that answers."""
        answer = _get(url, "/v1/models")
        try:
            listed = [str(entry["id"]) for entry in answer.json()["data"]] if answer is not None else []
        except (ValueError, KeyError, TypeError):
            listed = []
        if self.model_id not in listed:
            raise ServeError(
                f"the server at {url} lists {', '.join(listed) or 'no model'} and not {self.model_id}; another "
                "program may have taken the port, so choose another"
            )


def _get(url: str, path: str) -> httpx.Response | None:
    """An answer with status 200, or None."""
    try:
        # Proxies of the environment are for the outside world, not for this machine.
        answer = httpx.get(url.removesuffix("/v1") + path, timeout=5.0, trust_env=False)
    except httpx.HTTPError:
        return None
    return answer if answer.status_code == 200 else None


def _told(status: int) -> str:
    if status == 128 + 9:
        return "signal 9 (out of memory?)"
    return f"signal {status - 128}" if status > 128 else f"status {status}"


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:400]}..."


# -------------------------------------------------------------------- ports, threads, packages


def require_free(host: str, port: int) -> None:
    """Make sure that a server can listen there; port 0 asks about the host alone.

    Raises:
        ServeError: something listens there, the host is not this machine's, or the port is reserved.
    """
    family, address = _address(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a connection that is still being torn down is no reason to refuse.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except PermissionError:
            raise ServeError(f"port {port} is reserved for the system; choose one above 1023") from None
        except OSError as error:
            elsewhere = error.errno == errno.EADDRNOTAVAIL
            remedy = "give an address of this machine" if elsewhere else "choose another port, or 0 for any free one"
            problem = (error.strerror or str(error)).lower()
            raise ServeError(f"cannot listen on {host}:{port}: {problem}; {remedy}") from None


def free_port(host: str) -> int:
    """A port nobody listens on at the moment."""
    family, address = _address(host, 0)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


def _address(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ServeError(f"{host!r} is not a host name or address that can be found") from None
    return found[0][0], found[0][4]


def client_host(host: str) -> str:
    """Where a client on this machine finds a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def default_threads(asked: int | None) -> int:
    """What was asked for, or `CADDIE_THREADS`, or two, or as many cores as this process may use if fewer.

    Raises:
        ServeError: the number is not positive.
    """
    told = os.environ.get("CADDIE_THREADS", "").strip()
    value = asked if asked is not None else (int(told) if told.isdecimal() else (None if not told else 0))
    if value is None:
        return min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if value < 1:
        raise ServeError(f"the number of compute threads must be at least 1, not {told if asked is None else asked}")
    return value


def require(feature: str, extra: str, *packages: str) -> None:
    """Raise MissingExtra unless all these packages can be found. Imports none of them."""
    if any(find_spec(package) is None for package in packages):
        raise MissingExtra(feature, extra)
