"""Finished trajectories in a JSONL file, for evals and training. Needs no OpenTelemetry.

A trace is one trajectory: a task, and the work up to its answer. In a chat every turn makes a trace, whose history
holds the turns before it. Traces hold content by definition, since a training prefix is content; secrets are taken
out on the way unless the user decides otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from caddie_sdk.errors import CaddieError, ConfigError, DataError
from caddie_sdk.messages import canonical
from caddie_sdk.records import append_shared
from caddie_sdk.session import Session
from caddie_sdk.tracing.redaction import Redactor
from caddie_sdk.trajectory import read_trajectory

TRACE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Trace:
    """One finished trajectory, with where it comes from.

    Attributes:
        id: unique.
        session: `Session.dump()`.
        way: the way in (`loop`, `graph`, `wrap`, `proxy`, ...).
        model: the agent's model.
        critic: the critic's model, as its server names it; a served critic's name carries its pack's hash.
        pack: the critic pack, where it is known.
        started, ended: ISO 8601, UTC; "" where unknown.
        conversation: an id that the turns of one chat share.
        caddie: version of the SDK that wrote it.
        redacted: whether secrets were taken out.
        metadata: whatever the application adds, plain JSON.
        version: of this format.
    """

    id: str
    session: Mapping[str, Any]
    way: str = ""
    model: str = ""
    critic: str = ""
    pack: str = ""
    started: str = ""
    ended: str = ""
    conversation: str = ""
    caddie: str = ""
    redacted: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)
    version: int = TRACE_VERSION

    def load(self) -> Session:
        """The session as it was when it finished.

        Raises:
            SessionError: it was written by another version.
        """
        return Session.load(self.session)


class TraceSink:
    """An append-only JSONL file of traces.

        sink = TraceSink("traces.jsonl")
        run(session, "Where was Ada born?", model, tools, critics)
        sink.write(session, way="loop", model="qwen3-4b")

    Each trace is on disk when `write` returns. Threads and processes may share a file; one that is killed while it
    writes leaves at most a torn last line, which readers drop and the next writer removes. The file is made with mode
    0600.

    Args:
        path: where it lies; folders are made.
        redactor: what contents pass through; None records them as they are.
        metadata: added to every trace, plain JSON.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        redactor: Redactor | None = Redactor(),  # noqa: B008 - it holds no state
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.redactor, self.metadata = Path(path), redactor, dict(metadata or {})

    def write(
        self,
        session: Session | Mapping[str, Any],
        *,
        way: str = "",
        model: str = "",
        critic: str = "",
        pack: str = "",
        started: float | None = None,
        ended: float | None = None,
        conversation: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Append the latest trajectory of a session; blocks until it is on disk.

        Args:
            session: a session, or its dump.
            way, model, critic, pack, conversation, metadata: see `Trace`. Without `critic`, the model that the
                latest critique names.
            started, ended: seconds since the epoch; `ended` is now by default.

        Returns:
            The trace's id.

        Raises:
            RecordError: the file cannot be written, or `metadata` is no plain JSON.
        """
        from caddie_sdk import __version__

        dump = session.dump() if isinstance(session, Session) else dict(session)
        more = {**self.metadata, **(metadata or {})}
        trace = Trace(
            id=uuid.uuid4().hex,
            session=dump if self.redactor is None else redact_dump(dump, self.redactor),
            way=way,
            model=model,
            critic=critic or _critic_model(dump),
            pack=pack,
            started="" if started is None else _time(started),
            ended=_time(ended),
            conversation=conversation,
            caddie=__version__,
            redacted=self.redactor is not None,
            metadata=more if self.redactor is None else self.redactor.value(more),
        )
        append_shared(self.path, {name: getattr(trace, name) for name in Trace.__dataclass_fields__})
        return trace.id

    async def awrite(self, session: Session | Mapping[str, Any], **facts: Any) -> str:
        """Twin of `write` that does not block the event loop."""
        dump = session.dump() if isinstance(session, Session) else session
        return await asyncio.to_thread(self.write, dump, **facts)


def _time(seconds: float | None) -> str:
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="milliseconds")


def _critic_model(dump: Mapping[str, Any]) -> str:
    names = [record["critique"].get("model") for record in dump.get("consultations", ())]
    return next((name for name in reversed(names) if name), "")


_STRUCTURE = frozenset(
    ("id", "parent", "head", "kind", "role", "type", "tool_call_id", "name", "do", "control", "trigger", "status",
     "phase",
     "controls")
)  # fmt: skip


_NAMES = ("name", "type", "required")


def redact_dump(dump: Mapping[str, Any], redactor: Redactor) -> dict[str, Any]:
    """A session's dump without secrets that still loads and means the same.

    Ids, roles, names and settings stay. Schemas of tools are the developer's words and may well describe an argument
    named `password`: there, only what looks like a secret goes. Places inside a text (`spans`) move with it.
    """
    history, config = dump["history"], dump["config"]
    told = {name: config[name] for name in ("system", "examples") if name in config}
    return {
        **redactor.value(
            {name: value for name, value in dump.items() if name not in ("history", "config")}, keep=_STRUCTURE
        ),
        "config": {
            **config,
            **redactor.value(told, keep=_STRUCTURE),
            "tools": _shapes(config["tools"], redactor),
        },
        "history": {**history, "nodes": [_redact_node(node, redactor) for node in history["nodes"]]},
    }


def _redact_node(node: Mapping[str, Any], redactor: Redactor) -> dict[str, Any]:
    safe: dict[str, Any] = redactor.value(node, keep=_STRUCTURE)
    spans, content = node.get("meta", {}).get("spans"), node["message"].get("content")
    if spans is None or not isinstance(content, str):
        return safe
    text, moved, at = "", [], 0
    for start, end in spans:
        text += redactor.text(content[at:start])
        told = redactor.text(content[start:end])
        moved.append([len(text), len(text) + len(told)])
        text, at = text + told, end
    safe["message"]["content"] = text + redactor.text(content[at:])
    safe["meta"]["spans"] = moved
    return safe


def _shapes(value: Any, redactor: Redactor) -> Any:
    """Plain JSON with what looks like a secret taken out, whatever its keys are called."""
    if isinstance(value, str):
        return redactor.shapes(value)
    if isinstance(value, Mapping):
        return {key: item if key in _NAMES else _shapes(item, redactor) for key, item in value.items()}
    return [_shapes(item, redactor) for item in value] if isinstance(value, list | tuple) else value


def read_traces(
    path: str | os.PathLike[str], *, note: Callable[[str], None] | None = None
) -> Iterator[tuple[int, Trace]]:
    """The traces of a file with their line numbers, in order.

    Args:
        path: a file that a `TraceSink` wrote.
        note: told when a torn last line is dropped.

    Raises:
        ConfigError: the file cannot be read.
        DataError: a line is no trace; names file, line and field.
    """
    where = Path(path)
    try:
        with open(where, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if note is not None:
                        note(f"{where}, line {number}: torn at the end of the file, left out")
                    return
                yield number, _trace(line, str(where), number)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot read {where}: {why}") from error


_TEXTS = ("id", "way", "model", "critic", "pack", "started", "ended", "conversation", "caddie")


def _trace(line: bytes, path: str, number: int) -> Trace:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(path, number, "(line)", "not JSON") from None
    if not isinstance(data, dict):
        raise DataError(path, number, "(line)", "not a JSON object")
    if data.get("version") != TRACE_VERSION:
        raise DataError(path, number, "version", f"not a trace of version {TRACE_VERSION}")
    for name in _TEXTS:
        if not isinstance(data.get(name, ""), str):
            raise DataError(path, number, name, "not a text")
    if not data.get("id"):
        raise DataError(path, number, "id", "missing")
    if not isinstance(data.get("metadata", {}), dict):
        raise DataError(path, number, "metadata", "not an object")
    facts = {name: data[name] for name in Trace.__dataclass_fields__ if name in data}
    trace = Trace(**{**facts, "session": data.get("session") or {}})
    try:
        session = trace.load()
        for message in session.transcript():
            canonical(message)
        read_trajectory(session.history.path(), session.consultations)
    except (CaddieError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = str(error) if isinstance(error, CaddieError) else f"{type(error).__name__} while reading it: {error}"
        raise DataError(path, number, "session", what) from error
    return trace
