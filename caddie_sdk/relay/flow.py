"""One request from its first byte to its last, as a generator that says what I/O it needs.

Two runners carry the steps out: a blocking one and an async one (`caddie_sdk/shells/runners.py`); the proxy uses the
async one. What an attempt means, when to consult and what the caller sees is decided here and in the session, once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from caddie_sdk import tracing
from caddie_sdk.commands import Consult, Finish
from caddie_sdk.critic import ConsultState
from caddie_sdk.errors import CaddieError, ConfigError, ConsultationError
from caddie_sdk.intervention import Never
from caddie_sdk.relay import sse
from caddie_sdk.relay.adopt import Terms, Unadopted
from caddie_sdk.relay.chat import ChatRequest
from caddie_sdk.relay.exchange import Exchange
from caddie_sdk.relay.fast import dumps, loads
from caddie_sdk.relay.ledger import Ledger, MemoryLedger, beside
from caddie_sdk.relay.live import LiveSessions
from caddie_sdk.relay.options import Options, read_options
from caddie_sdk.relay.responses import ResponsesRequest, settled
from caddie_sdk.relay.weave import ChatWeaver
from caddie_sdk.relay.weave_responses import ResponsesWeaver
from caddie_sdk.session import Session
from caddie_sdk.tracing import TraceSink

log = logging.getLogger("caddie.relay")

# ---------------------------------------------------------------------- steps, and what comes back for each


@dataclass(frozen=True, slots=True)
class Send:
    """Send this body upstream; comes back: an `Answer`. An earlier answer is closed by it."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """Head of an upstream response."""

    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Read:
    """Read on in the upstream's body; comes back: bytes, None at its end."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the critic; comes back: a `Critique`."""

    state: ConsultState


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the response to the caller."""

    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Emit:
    """Give the caller these bytes."""

    data: bytes


Step = Send | Read | Ask | Start | Emit
Flow = Generator[Step, Any, None]


class Observer(Protocol):
    """Counts what happens; the proxy's metrics are one."""

    def unadopted(self, reason: str) -> None:
        """A request went upstream as it was."""
        ...

    def finished(self, exchange: Exchange) -> None:
        """A request was answered."""
        ...


class _Silent:
    def unadopted(self, reason: str) -> None:
        log.info("passed on without a critic: %s", reason)

    def finished(self, exchange: Exchange) -> None:
        pass


@dataclass
class Relay:
    """What all requests of one wrapped client or proxy share."""

    terms: Terms = field(default_factory=Terms)
    ledger: Ledger = field(default_factory=MemoryLedger)
    observer: Observer = field(default_factory=_Silent)
    live: LiveSessions = field(default_factory=LiveSessions)
    advice: bool = False
    traces: TraceSink | None = None

    def __post_init__(self) -> None:
        # A trace is on disk when `write` returns; requests must not wait for that.
        self._writer = ThreadPoolExecutor(1, "caddie-traces") if self.traces else None

    def close(self) -> None:
        """Finish writing traces."""
        if self._writer is not None:
            self._writer.shutdown()

    def handles(self, method: str, path: str) -> bool:
        """Whether requests to this path are read; all others pass as they are."""
        return method == "POST" and _dialect(path) is not None

    def finished(self, parsed: Any, exchange: Exchange, options: Options) -> None:
        """A request is answered."""
        self.observer.finished(exchange)
        if self._writer is not None and isinstance(exchange.command, Finish):
            dump, model = exchange.session.dump(), str(parsed.body.get("model") or "")
            self._writer.submit(self._trace, dump, model, options.session)
        if options.session:
            self.remember(options.session, exchange)

    def _trace(self, dump: dict[str, Any], model: str, conversation: str) -> None:
        assert self.traces is not None
        try:
            self.traces.write(dump, way="relay", model=model, conversation=conversation)
        except CaddieError as error:
            log.warning("a trace was not written: %s", error)

    def remember(self, name: str, exchange: Exchange) -> None:
        """Keep a conversation under its session name, for advice that is asked for from elsewhere."""
        self.ledger.put(beside(name, "session"), exchange.session.dump())

    def recall(self, name: str) -> Session | None:
        """The conversation last relayed under this session name."""
        key = beside(name, "session")
        found = self.ledger.get([key]).get(key)
        return None if found is None else Session.load(found)

    def flow(self, path: str, headers: Mapping[str, str], body: bytes) -> Flow:
        """The steps of one request to a path that `handles` accepts."""
        try:
            request = loads(body)
            if not isinstance(request, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError):
            self.observer.unadopted("the body is no JSON object")
            return (yield from _pass(body))
        try:
            options = read_options(headers, request)
        except ConfigError as error:
            return (yield from _refuse(400, "invalid_request_error", str(error)))
        plain = {key: value for key, value in request.items() if key != "caddie"}
        if not self.terms.controls:
            return (yield from _pass(dumps(plain) if plain != request else body))
        try:
            parsed = _dialect(path)(plain)
            terms = options.apply(self.terms)
            if not parsed.single:
                terms = replace(terms, protocol=Never())
            exchange = parsed.exchange(terms, self.ledger, _scope(headers), self.live)
        except Unadopted as reason:
            self.observer.unadopted(str(reason))
            if _dialect(path) is ResponsesRequest:
                plain = settled(plain, self.ledger, _scope(headers))
            return (yield from _pass(dumps(plain) if plain != request else body))
        if not parsed.single:
            # Several lines of events: none of them can hold a consultation, and all pass as they are.
            return (yield from _copy((yield from _upstream(parsed, exchange))))
        steps = _streamed if parsed.stream else _whole
        try:
            with exchange.kept_on_failure():
                return (yield from steps(self, parsed, exchange, options))
        except ConsultationError as error:
            # Only where the terms say `raise`; a status that clients do not try again.
            return (yield from _refuse(424, "consultation_failed", str(error)))


WEAVERS: dict[type, Any] = {ChatRequest: ChatWeaver, ResponsesRequest: ResponsesWeaver}
_PATHS: dict[str, Any] = {"/chat/completions": ChatRequest, "/responses": ResponsesRequest}


def _dialect(path: str) -> Any:
    """What reads requests to this path; None for those that pass as they are."""
    return next((dialect for end, dialect in _PATHS.items() if path.endswith(end)), None)


def _scope(headers: Mapping[str, str]) -> str:
    """Callers with different keys share nothing, whatever they say."""
    key = headers.get("authorization") or headers.get("api-key") or headers.get("x-api-key") or ""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def _refuse(status: int, kind: str, message: str) -> Flow:
    """Our own word to the caller, in place of an answer."""
    yield Start(status, {"content-type": "application/json"})
    yield Emit(dumps(openai_error(kind, message)))


def openai_error(kind: str, message: str) -> dict[str, Any]:
    """An error in the form of OpenAI's."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


# ---------------------------------------------------------------------- as it is


def _pass(body: bytes) -> Flow:
    answer: Answer = yield Send(body)
    yield from _copy(answer)


def _copy(answer: Answer) -> Flow:
    """The upstream's answer, unchanged."""
    yield Start(answer.status, answer.headers)
    while (data := (yield Read())) is not None:
        yield Emit(data)


def _read_all() -> Generator[Step, Any, bytes]:
    parts = []
    while (data := (yield Read())) is not None:
        parts.append(data)
    return b"".join(parts)


def _consult(exchange: Exchange) -> Flow:
    """Ask the critic for as long as the session wants it."""
    while isinstance(exchange.command, Consult):
        exchange.critic_replied((yield Ask(exchange.command.state)))


def _chat_span(parsed: Any) -> AbstractContextManager[tracing.Span]:
    """Around one upstream call; a caller's hanging up ends it without a failure."""
    return tracing.chat(str(parsed.body.get("model") or ""), stream=parsed.stream).ending()


def _upstream(parsed: Any, exchange: Exchange) -> Generator[Step, Any, Answer]:
    """Send what the model is to see now. A refusal keeps what the critic has said so far."""
    answer: Answer = yield Send(dumps(parsed.upstream(exchange)))
    if answer.status != 200:
        exchange.abandon()
    return answer


# ---------------------------------------------------------------------- without a stream


def _whole(relay: Relay, parsed: Any, exchange: Exchange, options: Options) -> Flow:
    answers: list[dict[str, Any]] = []
    while True:
        yield from _consult(exchange)
        with _chat_span(parsed) as span:
            answer = yield from _upstream(parsed, exchange)
            if answer.status != 200:
                span.fail(str(answer.status))
                return (yield from _copy(answer))
            body = yield from _read_all()
            try:
                said = loads(body)
                message, raw, usage = parsed.read(said)
            except (ValueError, RecursionError, Unadopted):
                # No answer that could be read: the caller is told what the server said.
                span.fail("unreadable")
                exchange.abandon()
                yield Start(answer.status, answer.headers)
                yield Emit(body)
                return None
            span.replied(message, usage=usage, model=str(said.get("model") or ""))
        answers.append(said)
        exchange.replied(message, raw, usage)
        yield from _consult(exchange)
        if exchange.done:
            break
    composed = parsed.compose(exchange, answers, exchange.report(advice=options.advice or relay.advice))
    relay.finished(parsed, exchange, options)
    unchanged = len(answers) == 1 and composed == said
    yield Start(200, answer.headers)
    yield Emit(body if unchanged else dumps(composed))
    return None


# ---------------------------------------------------------------------- as a stream


def _streamed(relay: Relay, parsed: Any, exchange: Exchange, options: Options) -> Flow:
    weaver, started = WEAVERS[type(parsed)](parsed, exchange), False
    while True:
        yield from _consult(exchange)
        with _chat_span(parsed) as span:
            answer = yield from _upstream(parsed, exchange)
            if answer.status != 200:
                span.fail(str(answer.status))
                return (yield from (_error_event() if started else _copy(answer)))
            if not started and "application/json" in answer.headers.get("content-type", ""):
                exchange.abandon()
                return (yield from _copy(answer))
            if not started:
                yield Start(200, answer.headers)
                started = True
            weaver.begin()
            yield from _weave(weaver)
            if weaver.broke_off():
                span.fail("broke_off")
                exchange.abandon()
                return None
            message, raw, usage = weaver.turn()
            span.replied(message, usage=usage)
        exchange.replied(message, raw, usage)
        try:
            yield from _consult(exchange)
        except ConsultationError as error:
            yield Emit(sse.event(openai_error("consultation_failed", str(error))))
            return None
        if exchange.done:
            break
    relay.finished(parsed, exchange, options)
    yield Emit(weaver.end(exchange.report(advice=options.advice or relay.advice)))
    return None


def _weave(weaver: Any) -> Flow:
    """One upstream stream, until it is over or its bytes end."""
    reader = sse.EventReader()
    data: bytes | None = b""
    while data is not None and weaver.state == "open":
        data = yield Read()
        shown = []
        for event in reader.feed(data) if data is not None else reader.close():
            shown.append(weaver.feed(event))
            if weaver.state != "open":
                break
        if out := b"".join(shown):
            yield Emit(out)


def _error_event() -> Flow:
    """The upstream refused to go on in the middle of the caller's stream."""
    body = yield from _read_all()
    try:
        said = loads(body)
    except ValueError:
        said = None
    if not isinstance(said, dict) or "error" not in said:
        said = {"error": {"message": body.decode("utf-8", "replace")[:2000], "type": "upstream_error"}}
    yield Emit(sse.event(said))
