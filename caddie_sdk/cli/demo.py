"""`caddie demo`: the whole machinery on five small questions, without a network."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

from caddie_evals.questions import load_musique
from caddie_sdk.cli.ask import ask_questions
from caddie_sdk.cli.choices import Choices

HONESTY = (
    "This demo runs SmolLM2-135M in both roles, agent and critic, on your CPU. A model of that size shows that the "
    "machinery works: searches, consultations, well-formed advice, token counts. It does not show "
    "that advice helps; wrong answers are expected here."
)


def run_demo(*, protocol: str, json_out: Path | None) -> None:
    """Run the demo's questions with the embedded model and print what happens."""
    console = Console(highlight=False)
    console.print(HONESTY, style="italic")
    with as_file(files("caddie_evals") / "data" / "demo_questions.jsonl") as path:
        questions = load_musique(path).questions
    choices = Choices(critic="self", protocol=protocol, max_steps=4, min_searches=1)
    ask_questions(questions, choices, json_out=json_out)
