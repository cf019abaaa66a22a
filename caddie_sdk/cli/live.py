"""What the terminal shows while an agent works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from caddie_evals.questions import Question
from caddie_evals.search_qa import cached_share
from caddie_sdk.cli.terminal import plain


class Live:
    """Prints steps, searches, consultations, advice and answers as they happen.

    Everything that models and passages say is printed as plain text: square brackets, emoji codes and control
    characters in it mean nothing.
    """

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.number = console, total, 0

    def question(self, question: Question) -> None:
        """A new question starts."""
        self.number += 1
        self._line(f"\n[{self.number}/{self.total}]", question.question, "bold")

    def event(self, event: Mapping[str, Any]) -> None:
        """An event of the graph's custom stream."""
        match event["event"]:
            case "tools":
                for call in event["calls"]:
                    self._line("  act     ", f"{call['name']} {call['arguments']}", "cyan")
            case "observations":
                for result in event["results"]:
                    self._line("  observe ", _short(result["content"]), "dim")
            case "consultation":
                critique = event["critique"]
                if critique["status"] == "ok":
                    self._line("  advice  ", _short(critique["advice"] or critique["analysis"]), "green")
                else:
                    self._line("  advice  ", f"none: {critique['status']} ({critique['detail']})", "yellow")

    def finished(self, record: Mapping[str, Any]) -> None:
        """A question is done."""
        if record["error"]:
            self._line("  error   ", record["error"], "red")
            return
        gold = f"   (expected {record['references'][0]})" if record["references"] else ""
        self._line("  answer  ", f"{record['answer'] or '(none)'}{gold}", "bold magenta")
        agent, critic = record["usage"]["agent"], record["usage"]["critic"]
        spent = [_tokens("agent", agent), _tokens("critic", critic), f"{record['seconds']:.1f} s"]
        self._line("  cost    ", f"{'; '.join(spent)}; ended by {record['reason']}", "dim")

    def summary(self, records: Sequence[Mapping[str, Any]]) -> None:
        """The table at the end, when there was more than one question."""
        if len(records) < 2:
            return
        table = Table(title=f"{len(records)} questions", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("question", max_width=12, overflow="ellipsis", no_wrap=True)
        table.add_column("answer", max_width=20, overflow="ellipsis", no_wrap=True)
        for column, width in (("EM", 2), ("F1", 4), ("ended by", 9), ("advice", 6), ("cached", 6), ("s", 5)):
            table.add_column(column, justify="right", min_width=width, no_wrap=True)
        for record in records:
            consultations, share = record["consultations"], cached_share(record["usage"].get("critic", {}))
            table.add_row(
                Text(plain(record["id"])),
                Text(plain(record["answer"] or record["error"] or "-")),
                "-" if record["em"] is None else str(int(record["em"])),
                "-" if record["f1"] is None else f"{record['f1']:.2f}",
                record["reason"],
                f"{sum(item['status'] == 'ok' for item in consultations)} of {len(consultations)}",
                "-" if share is None else f"{share:.0%}",
                f"{record['seconds']:.1f}",
            )
        self.console.print(table)

    def _line(self, head: str, text: str, style: str) -> None:
        self.console.print(Text.assemble((f"{head} ", "dim"), (plain(text), style)))


def _short(text: str, limit: int = 200) -> str:
    flat = plain(text)
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _tokens(who: str, usage: Mapping[str, Any]) -> str:
    share = cached_share(usage)
    cached = f", {share:.0%} cached" if share is not None else ""
    return f"{who} {usage['prompt_tokens']} + {usage['completion_tokens']} tokens in {usage['calls']} calls{cached}"
