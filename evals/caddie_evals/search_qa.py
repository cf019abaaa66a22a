"""Search QA: a question, passages to search, a short answer. What `caddie ask` and `caddie demo` run.

One home for the agent's prompt, its search tool and the record of an episode; the environments of the evals build
on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caddie_evals.metrics import exact_match, token_f1
from caddie_evals.questions import Question
from caddie_sdk.messages import Message, Role
from caddie_sdk.tools import Tool
from caddie_tools import PassageSearch, SearchTool

SYSTEM = (
    "You answer questions by searching a set of passages. A question usually needs several facts that stand in "
    "different passages. Look up one fact at a time, with the names you have found so far, and read the results "
    "before the next search. Answer only with what the passages support, in a few words: a name, a date, a number."
)
"""The agent's system prompt; text formats add the allowed forms."""


def _turn(role: Role, content: str) -> Message:
    return {"role": role, "content": content}


EXAMPLES: tuple[Message, ...] = (
    _turn("user", "In which year did the bridge of the town where Bela Orr lived open?"),
    _turn("assistant", "<reason>First I need the town where Bela Orr lived.</reason>\n<search>Bela Orr town</search>"),
    _turn("user", "Observation:\n[1] Bela Orr: Bela Orr was a painter who lived in Fenwick."),
    _turn(
        "assistant", "<reason>The town is Fenwick. Next I need its bridge.</reason>\n<search>Fenwick bridge</search>"
    ),
    _turn("user", "Observation:\n[1] Fenwick: The bridge of Fenwick opened in 1872."),
    _turn("assistant", "<reason>The bridge of Fenwick opened in 1872.</reason>\n<answer>1872</answer>"),
)
"""A worked example in the `caddie` format, for a very small model; larger ones do not need it."""

TOP_K = 3
MAX_PASSAGE_CHARS = 600


def search_tool(question: Question, *, top_k: int = TOP_K, max_chars: int = MAX_PASSAGE_CHARS) -> Tool:
    """A search tool over the question's own passages (MuSiQue's attached setting)."""
    searcher = SearchTool(PassageSearch(question.passages), top_k=top_k, max_chars_per_passage=max_chars)
    return searcher.as_tool()


def record(question: Question, outcome: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """One finished episode as a JSON record.

    Args:
        question: what was asked.
        outcome: the agent's final state: `answer`, `reason`, `messages`, `consultations`, `usage`, and `error` where
            the agent's own server failed.
        seconds: wall time.
    """
    answer = outcome.get("answer")
    # A server that failed says nothing about the answer.
    scored = bool(question.answers) and not outcome.get("error")
    consultations = [_consultation(item) for item in outcome.get("consultations") or ()]
    return {
        "id": question.id,
        "question": question.question,
        "references": list(question.answers),
        "answer": answer,
        "reason": outcome.get("reason") or "error",
        "error": outcome.get("error"),
        "em": exact_match(answer, question.answers) if scored else None,
        "f1": round(token_f1(answer, question.answers), 4) if scored else None,
        "consultations": consultations,
        "usage": outcome.get("usage") or {},
        "seconds": round(seconds, 3),
        "transcript": list(outcome.get("messages") or ()),
    }


def _consultation(item: Mapping[str, Any]) -> dict[str, Any]:
    critique = item["critique"]
    wanted = ("status", "analysis", "advice", "raw", "detail", "usage", "seconds", "model")
    facts = {name: critique[name] for name in wanted}
    return {"step": item["step"], "control": item["control"], "trigger": item["trigger"], **facts}


def cached_share(usage: Mapping[str, Any]) -> float | None:
    """Share of prompt tokens that the server read from its cache; None when there were none."""
    prompt = usage.get("prompt_tokens") or 0
    return (usage.get("cached_tokens") or 0) / prompt if prompt else None
