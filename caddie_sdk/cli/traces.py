"""`caddie traces`: what a `TraceSink` wrote, shown, and cut into training prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

traces_app = typer.Typer(help="Show recorded trajectories, or cut them into training prefixes.", no_args_is_help=True)

Source = Annotated[Path, typer.Argument(metavar="IN.jsonl", help="A file that a TraceSink wrote.")]


@traces_app.command()
def export(
    source: Source,
    out: Annotated[Path, typer.Option("--out", help="File for the prefixes; it is written anew.")],
    steps: Annotated[
        str | None, typer.Option(help="Only prefixes of so many steps: MIN-MAX, or one number. By default all.")
    ] = None,
    only_consulted: Annotated[
        bool, typer.Option("--only-consulted", help="Only where a consultation took place.")
    ] = False,
) -> None:
    """Cut each trajectory at the start of its steps: one line per prefix, from which a trainer branches."""
    from caddie_sdk.cli.terminal import tell
    from caddie_sdk.errors import ConfigError
    from caddie_sdk.records import RecordFile

    chosen = _steps(steps)
    if out.exists() and out.samefile(source):
        raise ConfigError(f"--out {out} is the file to read; name another one")
    trajectories = lines = 0
    traces = list(_traces(source))  # a bad line must not leave half an export behind
    with RecordFile(out) as file:
        for number, trace in traces:
            trajectories += 1
            for line in prefix_lines(trace, chosen, only_consulted=only_consulted, where=(str(source), number)):
                file.append(line)
                lines += 1
    tell(f"{lines} prefixes of {trajectories} trajectories in {out}")
    if not lines:
        raise ConfigError(f"no prefix of {source} was chosen; widen --steps or leave --only-consulted out")


@traces_app.command()
def show(
    source: Source,
    id: Annotated[str | None, typer.Option("--id", help="Only the trajectory whose id begins so, in full.")] = None,
) -> None:
    """Print what happened in each trajectory."""
    from rich.console import Console

    from caddie_sdk.errors import ConfigError

    console = Console(highlight=False, soft_wrap=True)
    found = 0
    for _, trace in _traces(source):
        if id is None or trace.id.startswith(id):
            found += 1
            _print(console, trace, limit=200 if id is None else None)
    if not found:
        raise ConfigError(f"{source}: no trajectory with an id that begins with {id!r}")


def _traces(source: Path) -> Iterator[tuple[int, Any]]:
    from caddie_sdk.cli.terminal import tell
    from caddie_sdk.errors import ConfigError
    from caddie_sdk.tracing import read_traces

    empty = True
    for numbered in read_traces(source, note=tell):
        empty = False
        yield numbered
    if empty:
        raise ConfigError(f"{source}: no trajectory in it")


def _steps(text: str | None) -> range | None:
    """The step counts that `MIN-MAX` or one number names."""
    from caddie_sdk.errors import ConfigError

    if text is None:
        return None
    first, _, last = text.partition("-")
    numbers = [part.strip() for part in (first, last or first)]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in numbers):
        raise ConfigError(f"--steps takes MIN-MAX or one number, such as 1-10, not {text!r}")
    if int(numbers[0]) > int(numbers[1]):
        raise ConfigError(f"--steps {text}: the first number is the larger one")
    return range(int(numbers[0]), int(numbers[1]) + 1)


def prefix_lines(
    trace: Any, steps: range | None = None, *, only_consulted: bool = False, where: tuple[str, int] = ("", 0)
) -> Iterable[dict[str, Any]]:
    """The export's lines for one trace.

    Args:
        trace: a `caddie_sdk.tracing.Trace`.
        steps: wanted lengths; None takes all.
        only_consulted: only where a consultation took place.
        where: file and line of the trace, for errors.

    Raises:
        DataError: the recorded trajectory does not follow from the session's rules.
    """
    from caddie_sdk.errors import DataError, SessionError
    from caddie_sdk.tracing import prefixes

    recorded = trace.load()
    outcome = {
        "answer": recorded.answer,
        "reason": recorded.reason,
        "steps": recorded.step,
        "consultations": recorded.uses,
    }
    try:
        for prefix in prefixes(recorded):
            if (steps is None or prefix.k in steps) and (prefix.consulted or not only_consulted):
                yield {
                    "version": 1,
                    "id": trace.id,
                    "k": prefix.k,
                    "seed": recorded.config.seed,
                    "consulted": prefix.consulted,
                    "model": trace.model,
                    "critic": trace.critic,
                    "pack": trace.pack,
                    "metadata": dict(trace.metadata),
                    "session": prefix.session.dump(),
                    "events": [event.dump() for event in prefix.events()],
                    "outcome": outcome,
                }
    except SessionError as error:
        raise DataError(*where, "session", str(error)) from error


def _print(console: Any, trace: Any, limit: int | None) -> None:
    from caddie_sdk.trajectory import read_trajectory

    session = trace.load()
    facts = [trace.way, trace.model, trace.critic and f"critic {trace.critic}", trace.ended]
    _line(console, f"\n{trace.id[:12]}", ", ".join(fact for fact in facts if fact), "bold", None)
    for event in read_trajectory(session.history.path(), session.consultations):
        _event(console, event, limit)
    reason = f"ended by {session.reason or 'nothing yet'}, {session.step} steps, {session.uses} consultations"
    agent, critic = session.usage, session.critic_usage
    spent = (f"{who} {u.prompt_tokens} + {u.completion_tokens} tokens" for who, u in (("agent", agent), ("critic", critic)))
    _line(console, "  end     ", "; ".join([reason, *spent]), "dim", None)


_STYLES: Mapping[str, tuple[str, str]] = {
    "task": ("  task    ", "bold"),
    "user": ("  user    ", "bold"),
    "answer": ("  answer  ", "bold magenta"),
    "note": ("  note    ", "yellow"),
}


def _event(console: Any, event: Any, limit: int | None) -> None:
    if event.kind == "advice":
        _line(console, "  advice  ", event.text if event.ok else "none", "green" if event.ok else "yellow", limit)
        return
    if event.kind in _STYLES:
        _line(console, _STYLES[event.kind][0], event.text, _STYLES[event.kind][1], limit)
        return
    if event.text:
        _line(console, "  think   ", event.text, "", limit)
    for action in event.actions:
        _line(console, "  act     ", f"{action.name} {action.arguments}", "cyan", limit)
    for observation in event.observations:
        _line(console, "  observe ", observation, "dim", limit)


def _line(console: Any, head: str, text: str, style: str, limit: int | None) -> None:
    from rich.text import Text

    from caddie_sdk.cli.terminal import plain

    flat = plain(text)
    if limit is not None and len(flat) > limit:
        flat = flat[: limit - 1] + "…"
    console.print(Text.assemble((f"{head} ", "dim"), (flat, style)))
