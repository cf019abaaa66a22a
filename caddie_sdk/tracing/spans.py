"""OpenTelemetry spans by the GenAI semantic conventions.

Nothing here imports opentelemetry: an application that traces has imported it to configure its provider, so while it
is not in `sys.modules` every function returns one shared stand-in that does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from caddie_sdk.commands import CallModel
from caddie_sdk.critic import ConsultState
from caddie_sdk.critique import Critique
from caddie_sdk.messages import dump_json
from caddie_sdk.session import Session
from caddie_sdk.tracing.content import input_messages, output_message
from caddie_sdk.tracing.redaction import Redactor
from caddie_sdk.usage import Usage

CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
EVALUATION = "gen_ai.evaluation.result"
ADVICE = "caddie.advice"
"""Name of the evaluation that a critique is; its label is the critique's status."""

_OF_ADVICE = ("caddie.control", "caddie.trigger", "caddie.step", "caddie.remaining")
_CONTENT_ON = {"true", "1", "span_only", "event_only", "span_and_event"}
_RUN = "caddie-run"


class _Settings:
    """What `configure` was told, and the tracer of the provider seen last."""

    def __init__(self) -> None:
        self.content: bool | None = None
        self.redactor = Redactor()
        self.tracer: tuple[Any, Any] = (None, None)


_settings = _Settings()


def configure(*, content: bool | None = None, redactor: Redactor | None = None) -> None:
    """Say what spans may carry, for the whole process.

    Args:
        content: True records messages, arguments, results and advice, redacted; False never does; None leaves it to
            the environment variable `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`, and off without it.
        redactor: what content passes through first; None takes the default one.
    """
    _settings.content = content
    _settings.redactor = redactor or Redactor()


def content_is_on() -> bool:
    """Whether spans may carry content."""
    if _settings.content is not None:
        return _settings.content
    return os.environ.get(CONTENT_VARIABLE, "").strip().lower() in _CONTENT_ON


class Span:
    """A span that is open. This class is also the stand-in while nobody traces: then every method does nothing.

    As a context manager it is current inside the block, takes an exception as its failure, and ends.

    Attributes:
        on: whether anybody records it; guard work that is done for the trace alone with this.
    """

    on = False

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes by their full names; None is left out. Never pass content here."""

    def replied(
        self,
        message: Any = None,
        *,
        usage: Usage | None = None,
        model: str = "",
        truncated: bool = False,
        finish_reasons: Sequence[str] = (),
    ) -> None:
        """What the model answered, on a `chat` span.

        Args:
            message: the assistant message; recorded with content on only.
            usage: tokens spent.
            model: the model's name, as its server tells it.
            truncated: whether the reply was cut at the token limit.
            finish_reasons: as the server gave them; by default derived from the message and `truncated`.
        """

    def returned(self, content: str, *, is_error: bool = False) -> None:
        """What a tool gave, on an `execute_tool` span. The content is recorded with content on only."""

    def advised(self, critique: Critique) -> None:
        """What the critic gave, on the span of a `consultation`. Emits the evaluation event."""

    def finished(self, session: Session) -> None:
        """How the work ended, on the span of `invoke_agent`."""

    def fail(self, error: str | BaseException, detail: str = "") -> None:
        """Mark it as failed. An exception's own words, or `detail`, are recorded with content on only."""

    def current(self) -> AbstractContextManager[None]:
        """Make it the parent of what is opened inside the block, without ending it."""
        return nullcontext()

    @contextmanager
    def ending(self) -> Iterator[Span]:
        """End it after the block, an exception being its failure, without making it current: for generators."""
        try:
            yield self
        except GeneratorExit:
            raise
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.end()

    def end(self) -> None:
        """End it. Whatever comes later does nothing."""

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


OFF = Span()


def invoke_agent(name: str = "caddie", *, conversation: str = "", model: Any = None) -> Span:
    """One turn of an agent, from the user's words to the answer; the other spans lie inside.

    Args:
        name: the agent's name.
        conversation: an id that the turns of one chat share (a thread, a session).
        model: the agent's model, or its name.
    """
    tracer = _tracer()
    if tracer is None:
        return OFF
    return _open(
        tracer,
        f"invoke_agent {name}",
        "INTERNAL",
        {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "caddie",
            "gen_ai.agent.name": name,
            "gen_ai.conversation.id": conversation or None,
            "gen_ai.request.model": model_name(model) or None,
        },
        is_run=True,
    )


def chat(model: Any, call: CallModel | None = None, *, stream: bool = False) -> Span:
    """One call of the agent's model.

    Args:
        model: the model, or its name.
        call: what it is asked; recorded with content on only.
        stream: whether the reply is streamed.
    """
    tracer = _tracer()
    if tracer is None:
        return OFF
    span = _open_chat(tracer, model, {"caddie.role": "agent", "gen_ai.request.stream": stream or None})
    if call is not None and span.on and content_is_on():
        span.set({"gen_ai.input.messages": _redacted(input_messages(call.messages))})
    return span


def consultation(state: ConsultState, critic: Any = None) -> Span:
    """One call of the critic.

    Args:
        state: what it is asked about.
        critic: the critic, or its model's name.
    """
    tracer = _tracer()
    if tracer is None:
        return OFF
    return _open_chat(
        tracer,
        critic,
        {
            "caddie.role": "critic",
            "caddie.control": state.control,
            "caddie.trigger": state.trigger,
            "caddie.step": state.step,
            "caddie.remaining": state.remaining,
            "gen_ai.request.max_tokens": state.max_tokens,
        },
    )


def execute_tool(name: str, call_id: str = "", arguments: Any = None) -> Span:
    """One run of a tool.

    Args:
        name: the tool's name.
        call_id: id of the call.
        arguments: JSON text or plain JSON; recorded with content on only.
    """
    tracer = _tracer()
    if tracer is None:
        return OFF
    span = _open(
        tracer,
        f"execute_tool {name}",
        "INTERNAL",
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": call_id or None,
        },
    )
    if arguments is not None and span.on and content_is_on():
        span.set({"gen_ai.tool.call.arguments": _redacted(arguments)})
    return span


def current_run() -> Span:
    """The innermost open `invoke_agent` span around this code; the stand-in without one."""
    context = sys.modules.get("opentelemetry.context")
    run = context.get_value(_RUN) if context is not None and _tracer() is not None else None
    return run if isinstance(run, Span) else OFF


def model_name(model: Any) -> str:
    """The name of a model, of a critic's model, or "" where it does not tell."""
    for _ in range(3):  # a critic holds a model, which may wrap another library's
        if model is None or isinstance(model, str):
            return model or ""
        named = getattr(model, "model", None) or getattr(model, "model_name", None)
        model = named if named is not model else None
    return ""


# ---------------------------------------------------------------------- with a provider


def _tracer() -> Any:
    """The tracer of the application's provider, None when it has configured none."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    find = getattr(trace, "get_tracer_provider", None)  # None as well while another thread imports it
    if find is None:
        return None
    provider = find()
    known, tracer = _settings.tracer
    if provider is not known:
        from caddie_sdk import __version__

        idle = isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider)
        tracer = None if idle else provider.get_tracer("caddie_sdk", __version__)
        _settings.tracer = (provider, tracer)
    return tracer


def _open_chat(tracer: Any, model: Any, more: Mapping[str, Any]) -> _Recording:
    name = model_name(model)
    url = getattr(model, "base_url", None)
    server = urlsplit(url) if isinstance(url, str) else urlsplit("")
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": _provider(model),
        "gen_ai.request.model": name or None,
        "server.address": server.hostname,
        "server.port": server.port,
        **more,
    }
    return _open(tracer, f"chat {name}" if name else "chat", "CLIENT", attributes, unnamed=not name)


def _provider(model: Any) -> str:
    """The conventions want a provider on every span: `openai` is what an OpenAI-compatible server counts as."""
    return "openai" if isinstance(model, str) or getattr(model, "base_url", None) else "custom"


def _open(
    tracer: Any, name: str, kind: str, attributes: Mapping[str, Any], *, is_run: bool = False, unnamed: bool = False
) -> _Recording:
    from opentelemetry.trace import SpanKind

    given = {key: value for key, value in attributes.items() if value is not None}
    return _Recording(tracer.start_span(name, kind=SpanKind[kind], attributes=given), given, is_run, unnamed)


def _redacted(content: Any) -> str:
    """Content as an attribute holds it: text, or JSON text."""
    try:
        safe = _settings.redactor.value(content)
        return safe if isinstance(safe, str) else dump_json(safe)
    except (RecursionError, ValueError, TypeError) as error:
        # Watching must not break the work, and what could not be checked must not get out.
        return f"[not recorded: {type(error).__name__}]"


class _Recording(Span):
    """A span that somebody may record."""

    def __init__(self, span: Any, given: Mapping[str, Any], is_run: bool, unnamed: bool) -> None:
        self._span, self._given, self._is_run, self._unnamed = span, given, is_run, unnamed
        self._around = current_run()
        self._ended = False
        self._here: AbstractContextManager[None] | None = None

    @property
    def on(self) -> bool:  # type: ignore[override]  # constant in the stand-in
        return not self._ended and bool(self._span.is_recording())

    def set(self, attributes: Mapping[str, Any]) -> None:
        if self.on:
            self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})

    def replied(
        self,
        message: Any = None,
        *,
        usage: Usage | None = None,
        model: str = "",
        truncated: bool = False,
        finish_reasons: Sequence[str] = (),
    ) -> None:
        if not self.on:
            return
        if model and self._unnamed:
            self._span.update_name(f"chat {model}")
        self.set({"gen_ai.response.model": model or None, **_tokens(usage)})
        if message is None:
            self.set({"gen_ai.response.finish_reasons": list(finish_reasons) or None})
            return
        told = output_message(message, truncated=truncated, finish_reasons=finish_reasons)
        self.set({"gen_ai.response.finish_reasons": list(finish_reasons) or [told["finish_reason"]]})
        if content_is_on():
            self.set({"gen_ai.output.messages": _redacted([told])})

    def returned(self, content: str, *, is_error: bool = False) -> None:
        if is_error:
            self.fail("tool_error", content)
        if self.on and content_is_on():
            self.set({"gen_ai.tool.call.result": _redacted(content)})

    def advised(self, critique: Critique) -> None:
        if not self.on:
            return
        self.replied({"role": "assistant", "content": critique.raw or critique.text} if critique.ok else None,
                     usage=critique.usage, model=critique.model)  # fmt: skip
        self.set({"caddie.status": critique.status})
        event: dict[str, Any] = {
            "gen_ai.evaluation.name": ADVICE,
            "gen_ai.evaluation.score.label": critique.status,
            "caddie.status": critique.status,
        }
        event |= {name: self._given[name] for name in _OF_ADVICE if name in self._given}
        if not critique.ok:
            self.fail(critique.status, critique.detail)
            event["error.type"] = critique.status
        if content_is_on():
            event["gen_ai.evaluation.explanation"] = _redacted(critique.text if critique.ok else critique.detail)
        # The event belongs to what was judged: the agent's run, where there is one.
        target = self._around if isinstance(self._around, _Recording) and self._around.on else self
        target._emit(event)

    def _emit(self, attributes: Mapping[str, Any]) -> None:
        """As a log event where the application collects those, as the conventions want; else on the span itself."""
        logs: Any = sys.modules.get("opentelemetry._logs")
        provider = logs.get_logger_provider() if logs is not None else None
        if provider is None or type(provider).__name__ in ("ProxyLoggerProvider", "NoOpLoggerProvider"):
            self._span.add_event(EVALUATION, attributes)
            return
        from opentelemetry.trace import set_span_in_context

        where = set_span_in_context(self._span)
        provider.get_logger("caddie_sdk").emit(event_name=EVALUATION, attributes=attributes, context=where)

    def finished(self, session: Session) -> None:
        if not self.on:
            return
        self.set(
            {
                "caddie.reason": session.reason,
                "caddie.steps": session.step,
                "caddie.consultations": session.uses,
                "caddie.protocol": session.config.protocol.spec.partition(":")[0],
            }
        )
        if content_is_on() and session.answer is not None:
            told = output_message({"role": "assistant", "content": session.answer})
            self.set({"gen_ai.output.messages": _redacted([told])})

    def fail(self, error: str | BaseException, detail: str = "") -> None:
        if not self.on:
            return
        from opentelemetry.trace import Status, StatusCode

        if isinstance(error, BaseException):
            kind = type(error)
            error, detail = kind.__qualname__, detail or str(error)
            if kind.__module__ != "builtins":
                error = f"{kind.__module__}.{error}"
        self.set({"error.type": error})
        self._span.set_status(Status(StatusCode.ERROR, _redacted(detail) if detail and content_is_on() else None))

    @contextmanager
    def current(self) -> Iterator[None]:
        from opentelemetry import context, trace

        here = trace.set_span_in_context(self._span)
        token = context.attach(context.set_value(_RUN, self, here) if self._is_run else here)
        try:
            yield
        finally:
            context.detach(token)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._span.end()

    def __enter__(self) -> Span:
        self._here = self.current()
        self._here.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._here is not None:
            self._here.__exit__(None, None, None)
        if error is not None and not isinstance(error, GeneratorExit):
            self.fail(error)
        self.end()


def _tokens(usage: Usage | None) -> dict[str, int]:
    """Token counts, where the server gave any."""
    if usage is None or not (usage.prompt_tokens or usage.completion_tokens):
        return {}
    counts = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    return counts | ({"gen_ai.usage.cache_read.input_tokens": usage.cached_tokens} if usage.cached_tokens else {})
