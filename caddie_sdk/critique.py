"""What a critic returns, and the strict parsers of the two wire formats (SPEC §2, §5).

The same parser judges a critique in training (a malformed one is worth -1) and in serving (a malformed one is
not shown to the agent).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from caddie_sdk import gbnf
from caddie_sdk.actions import strip_thinking
from caddie_sdk.errors import ConfigError
from caddie_sdk.usage import Usage

Status = Literal["ok", "malformed", "unavailable", "timeout", "refused", "context_overflow", "over_budget", "failed"]
"""`ok`: well formed. `malformed`: the critic answered in another form. `unavailable`: no server, 5xx or 429 to
the end. `timeout`. `refused`: 4xx. `context_overflow`: the prompt does not fit. `over_budget`: not asked at
all. `failed`: the critic's own code raised."""


@dataclass(frozen=True, slots=True)
class Critique:
    """One answer of a critic, or the reason why there is none.

    Attributes:
        analysis: diagnosis of the trajectory so far ("" in the feedback format, which has one part).
        advice: guidance for the next steps.
        status: `ok` or why the critique cannot be used.
        raw: the text the critic wrote, for the record.
        detail: what went wrong, one line.
        usage: tokens of the critic's call.
        seconds: wall time of the consultation.
        model: the critic's model, as its server names it.
    """

    analysis: str = ""
    advice: str = ""
    status: Status = "ok"
    raw: str = ""
    detail: str = ""
    usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0
    model: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is advice to show to the agent."""
        return self.status == "ok"

    @property
    def text(self) -> str:
        """The critique as the agent reads it."""
        if not self.analysis:
            return self.advice
        return f"{ANALYSIS} {self.analysis}\n{ADVICE} {self.advice}"

    def dump(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Critique:
        """Read back from `dump()`."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**{**known, "usage": Usage.load(data.get("usage") or {})})


ANALYSIS, ADVICE = "Analysis:", "Advices for next steps:"

_HEADER = re.compile(rf"^[ \t]*(?:{ANALYSIS}|{ADVICE})", re.MULTILINE)
_SECTIONS = re.compile(rf"{ANALYSIS}(?P<analysis>.*?)^[ \t]*{ADVICE}(?P<advice>.*)", re.DOTALL | re.MULTILINE)
_FEEDBACK = re.compile(r"<feedback>(?P<advice>(?:(?!</?feedback>).)*)</feedback>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FeedbackFormat:
    """A wire format of critiques.

    Attributes:
        name: as named in a pack's manifest.
        instruction: one line that tells a critic the form.
        grammar: GBNF that admits well-formed critiques and nothing else.
        regex: the same for servers that constrain by regular expression.
    """

    name: str
    instruction: str
    grammar: str
    regex: str

    def parse(self, text: str) -> tuple[str, str] | None:
        """(analysis, advice) of a well-formed critique, None of any other text."""
        if text.rfind("<think>") > text.rfind("</think>"):
            return None  # reasoning that never ended is no critique, whatever came before it
        text = strip_thinking(text)
        if self.name == "feedback":
            match = _FEEDBACK.fullmatch(text)
            advice = match["advice"].strip() if match else ""
            return ("", advice) if advice else None
        match = _SECTIONS.fullmatch(text)
        if match is None or len(_HEADER.findall(text)) != 2:
            return None
        analysis, advice = match["analysis"].strip(), match["advice"].strip()
        return (analysis, advice) if analysis and advice else None

    def render(self, analysis: str, advice: str) -> str:
        """The text that `parse` reads back."""
        if self.name == "feedback":
            return f"<feedback>{advice}</feedback>"
        return f"{ANALYSIS} {analysis}\n{ADVICE} {advice}"


SECTIONS = FeedbackFormat(
    "sections",
    "Write exactly two sections, both non-empty, and nothing else:\n"
    f"{ANALYSIS} <brief diagnosis>\n{ADVICE} <concise guidance>",
    f'root ::= "{ANALYSIS} " {gbnf.line(320)} "\\n{ADVICE} " {gbnf.line(320)}',
    rf"{ANALYSIS} [^<\s][^<\n]{{0,1199}}\n{ADVICE} [^<\s][^<\n]{{0,1199}}",
)
FEEDBACK = FeedbackFormat(
    "feedback",
    "Write one block and nothing else:\n<feedback>constructive feedback</feedback>",
    f'root ::= "<feedback>" {gbnf.line(800)} "</feedback>"',
    r"<feedback>[^<\s][^<\n]{0,1599}</feedback>",
)

FEEDBACK_FORMATS = {form.name: form for form in (SECTIONS, FEEDBACK)}


def feedback_format(name: str) -> FeedbackFormat:
    """The feedback format of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return FEEDBACK_FORMATS[name]
    except KeyError:
        raise ConfigError(f"unknown feedback format {name!r}: choose one of {', '.join(FEEDBACK_FORMATS)}") from None


def parse_critique(text: str, form: FeedbackFormat, **facts: Any) -> Critique:
    """A critic's raw text as a `Critique`: `ok`, or `malformed` with the reason."""
    parts = form.parse(text)
    if parts is None:
        detail = "empty" if not text.strip() else f"not in the {form.name!r} format"
        return Critique(status="malformed", raw=text, detail=detail, **facts)
    return Critique(analysis=parts[0], advice=parts[1], raw=text, **facts)
