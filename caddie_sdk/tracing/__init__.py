"""What leaves the process about its work: OpenTelemetry spans, and a file of finished trajectories.

Spans follow the GenAI semantic conventions: `invoke_agent`, `chat`, `execute_tool`, and an evaluation event for each
piece of advice. They cost nothing unless the application has configured a tracer provider, and carry no content unless
it is asked for. A `TraceSink` needs no OpenTelemetry and holds content by definition: it is what evals and training
read. Both pass content through one `Redactor`.

A shell opens spans like this:

    with tracing.invoke_agent("shop", conversation=thread_id) as run:
        with tracing.chat(model, call) as span:
            reply = await model.acomplete(call)
            span.replied(reply.message, usage=reply.usage, model=reply.model)
        with tracing.execute_tool("search", call_id, arguments) as span:
            span.returned(await search(...))
        with tracing.consultation(state, critic) as span:
            critique = await critic.acritique(state)
            span.advised(critique)
        run.finished(session)

Where a generator yields between opening and ending (streams), use `span.current()` around each piece of work and
`span.end()` at last: a span that stays current across a `yield` would become the parent of the consumer's own spans.
"""

from __future__ import annotations

from caddie_sdk.tracing.redaction import KEYS, PATTERNS, PHONE, Redactor
from caddie_sdk.tracing.replay import Prefix, prefix_lines, prefixes
from caddie_sdk.tracing.sink import Trace, TraceSink, read_traces
from caddie_sdk.tracing.spans import (
    Span,
    chat,
    configure,
    consultation,
    current_run,
    execute_tool,
    invoke_agent,
    model_name,
)

__all__ = [
    "KEYS",
    "PATTERNS",
    "PHONE",
    "Prefix",
    "Redactor",
    "Span",
    "Trace",
    "TraceSink",
    "chat",
    "configure",
    "consultation",
    "current_run",
    "execute_tool",
    "invoke_agent",
    "model_name",
    "prefix_lines",
    "prefixes",
    "read_traces",
]
