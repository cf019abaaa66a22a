"""`caddie ask`: questions over passages, one record each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

from rich.console import Console

from caddie_evals.questions import Question, load_musique, load_passages
from caddie_evals.records import RecordFile, keep_records, read_records
from caddie_evals.search_qa import record, search_tool
from caddie_sdk.cli.choices import Cast, Choices, cast
from caddie_sdk.cli.live import Live
from caddie_sdk.cli.terminal import tell
from caddie_sdk.errors import ConfigError, EndpointError
from caddie_sdk.session import Session


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
        if id is not None or limit is not None:
            raise ConfigError("--id and --limit choose among the questions of --musique FILE")
        return [_own_question(question or "", passages)]
    if passages is not None:
        raise ConfigError("the questions of --musique bring their own passages; leave --passages out")
    loaded = load_musique(musique)
    _skipped(loaded.problems)
    chosen = [item for item in loaded.questions if id is None or item.id == id]
    if not chosen:
        raise ConfigError(f"{musique}: no usable question" + (f" with id {id!r}" if id is not None else ""))
    return chosen[:limit]


def _own_question(question: str, file: Path) -> Question:
    if not question.strip():
        raise ConfigError("the question is empty")
    found = load_passages(file)
    _skipped(found.problems)
    if not found.passages:
        raise ConfigError(f"{file}: no usable passage")
    return Question(id="question", question=question, passages=tuple(found.passages))


def _skipped(problems: Sequence[Exception]) -> None:
    for problem in problems:
        tell(f"skipped: {problem}")


def ask_questions(
    questions: Sequence[Question], choices: Choices, *, json_out: Path | None, resume: bool = False
) -> list[dict[str, Any]]:
    """Work through the questions, show what happens, and return the records.

    Raises:
        EndpointError: the agent's server failed; the records say at which questions.
    """
    todo = _unfinished(questions, json_out) if resume else list(questions)
    if not todo:
        tell(f"nothing left to do: {json_out} has the records of all {len(questions)} questions")
        return []
    live = Live(Console(highlight=False, soft_wrap=True), total=len(todo))
    with ExitStack() as stack:
        people = cast(choices, stack)
        if json_out and resume:
            keep_records(json_out, _finished)
        out = stack.enter_context(RecordFile(json_out, resume=resume)) if json_out else None
        records = asyncio.run(_work(todo, people, live, out))
    live.summary(records)
    if failed := [made["error"] for made in records if made["error"]]:
        many = f"{len(failed)} of {len(records)} questions ended with an error, the first with: "
        raise EndpointError((many if len(records) > 1 else "") + failed[0])
    return records


def _finished(made: Mapping[str, Any]) -> bool:
    """Whether a record stands; a question that a dead server ended is asked again."""
    return not made.get("error")


def _unfinished(questions: Sequence[Question], json_out: Path | None) -> list[Question]:
    """The questions without a record."""
    if json_out is None:
        raise ConfigError("--resume needs --json FILE, the records to go on from")
    done = [(made.get("id"), made.get("question")) for made in read_records(json_out) if _finished(made)]
    return [question for question in questions if (question.id, question.question) not in done]


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
    state: dict[str, Any] = {}
    started = time.monotonic()
    try:
        stream: Any = agent.astream(
            {"messages": question.question}, stream_mode=["custom", "values"], output_keys=[*_RESULT, "session"]
        )
        async with aclosing(stream):  # an event that cannot be shown ends the run here, not when the loop is shut down
            async for mode, chunk in stream:
                if mode == "custom":
                    live.event(chunk)
                else:
                    state = chunk
    except EndpointError as error:
        state = _broken_off(state, error)
    return record(question, state, time.monotonic() - started)


_RESULT = ("messages", "answer", "reason", "consultations", "usage")


def _broken_off(state: Mapping[str, Any], error: EndpointError) -> dict[str, Any]:
    """What an episode came to before its server failed."""
    if not state.get("session"):
        return {"error": str(error)}
    session = Session.load(state["session"])
    return {
        "error": str(error),
        "messages": session.transcript(),
        "consultations": session.consultations,
        "usage": {"agent": session.usage.dump(), "critic": session.critic_usage.dump()},
    }
