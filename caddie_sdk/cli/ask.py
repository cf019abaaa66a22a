"""`caddie ask`: questions over passages, one record each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from caddie_evals.questions import Question, load_musique, load_passages
from caddie_evals.records import RecordFile, read_records
from caddie_evals.search_qa import record, search_tool
from caddie_sdk.cli.choices import Cast, Choices, cast
from caddie_sdk.cli.live import Live
from caddie_sdk.errors import ConfigError, EndpointError

errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def load_questions(
    question: str | None, *, passages: Path | None, musique: Path | None, id: str | None, limit: int | None
) -> list[Question]:
    """The questions the options ask for. Bad lines are told on stderr; the others still run.

    Raises:
        ConfigError: the options do not fit together, or nothing usable is left.
    """
    if (question is None) == (musique is None):
        raise ConfigError('give either a question with --passages FILE, or --musique FILE; see "caddie ask --help"')
    if musique is None:
        if passages is None:
            raise ConfigError("a question needs --passages FILE, the passages to search")
        found = load_passages(passages)
        _tell(found.problems)
        if not found.passages:
            raise ConfigError(f"{passages}: no usable passage")
        return [Question(id="question", question=question or "", passages=tuple(found.passages))]
    loaded = load_musique(musique)
    _tell(loaded.problems)
    chosen = [item for item in loaded.questions if id is None or item.id == id]
    if not chosen:
        raise ConfigError(f"{musique}: no usable question" + (f" with id {id!r}" if id else ""))
    return chosen[:limit]


def _tell(problems: Sequence[Exception]) -> None:
    for problem in problems:
        errors.print(f"skipped: {problem}")


def ask_questions(
    questions: Sequence[Question], choices: Choices, *, json_out: Path | None, resume: bool = False
) -> list[dict[str, Any]]:
    """Work through the questions, show what happens, and return the records."""
    done = {item["id"] for item in read_records(json_out)} if json_out and resume else set()
    todo = [question for question in questions if question.id not in done]
    live = Live(Console(highlight=False, soft_wrap=True), total=len(todo))
    with ExitStack() as stack:
        people = cast(choices, stack)
        out = stack.enter_context(RecordFile(json_out, resume=resume)) if json_out else None
        records = asyncio.run(_work(todo, people, live, out))
    live.summary(records)
    return records


async def _work(
    questions: Sequence[Question], people: Cast, live: Live, out: RecordFile | None
) -> list[dict[str, Any]]:
    records = []
    for question in questions:
        live.question(question)
        made = await _episode(question, people, live)
        if out is not None:
            out.append(made)
        live.finished(made)
        records.append(made)
    return records


async def _episode(question: Question, people: Cast, live: Live) -> dict[str, Any]:
    """One question to its end. A server that fails ends this question, with the reason in its record."""
    agent = people.agent([search_tool(question)])
    outcome: dict[str, Any] = {}
    started = time.monotonic()
    try:
        stream: Any = agent.astream({"messages": question.question}, stream_mode=["custom", "values"])
        async for mode, chunk in stream:
            if mode == "custom":
                live.event(chunk)
            else:
                outcome = chunk
    except EndpointError as error:
        outcome = {**outcome, "error": str(error)}
    return record(question, outcome, time.monotonic() - started)
