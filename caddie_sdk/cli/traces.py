"""`caddie traces`: what a `TraceSink` wrote, shown, and cut into training prefixes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
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
    from caddie_sdk.tracing import prefix_lines

    chosen = _steps(steps)
    if out.is_file() and source.is_file() and out.samefile(source):
        raise ConfigError(f"--out {out} is the file to read; name another one")
    counts = {"trajectories": 0, "prefixes": 0}

    def lines() -> Iterator[dict[str, Any]]:
        for number, trace in _traces(source):
            counts["trajectories"] += 1
            for line in prefix_lines(trace, chosen, only_consulted=only_consulted, where=(str(source), number)):
                counts["prefixes"] += 1
                yield line
        if not counts["prefixes"]:
            raise ConfigError(f"{source}: no prefix was chosen; widen --steps or leave --only-consulted out")

    _write(out, lines())
    tell(f"{counts['prefixes']} prefixes of {counts['trajectories']} trajectories in {out}")


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


def _write(out: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write all lines or leave what was there; like the traces they come from, only their owner may read them."""
    from caddie_sdk.errors import ConfigError

    # Nothing may take the place of a device, a pipe, or `/dev/stdout`, which is a link.
    stream = out.is_relative_to("/dev") or (out.exists() and not out.is_file())
    target = out if stream else Path(os.path.realpath(out))
    fresh = out if stream else target.with_name(f"{target.name}.new")
    try:
        if not stream:
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
        with open(
            os.open(fresh, os.O_WRONLY | os.O_CREAT | (0 if stream else os.O_EXCL), 0o600),
            "w",
            encoding="utf-8",
            errors="replace",
        ) as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if not stream:
            os.replace(fresh, target)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        if not stream:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)


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


def _print(console: Any, trace: Any, limit: int | None) -> None:
    from caddie_sdk.trajectory import read_trajectory

    session = trace.load()
    facts = [trace.way, trace.model, trace.critic and f"critic {trace.critic}", trace.ended]
    _line(console, f"\n{trace.id[:12]}", ", ".join(fact for fact in facts if fact), "bold", None)
    for event in read_trajectory(session.history.path(), session.consultations):
        _event(console, event, limit)
    reason = f"ended by {session.reason or 'nothing yet'}, {session.step} steps, {session.uses} consultations"
    agent, critic = session.usage, session.critic_usage
    both = (("agent", agent), ("critic", critic))
    spent = [f"{who} {usage.prompt_tokens} + {usage.completion_tokens} tokens" for who, usage in both]
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
