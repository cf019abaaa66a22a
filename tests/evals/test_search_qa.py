"""What `caddie ask` asks, searches and records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from caddie_evals.questions import Question
from caddie_evals.search_qa import EXAMPLES, MAX_PASSAGE_CHARS, SYSTEM, TOP_K, cached_share, record, search_tool
from caddie_sdk import Critique, Usage, create_caddie_agent
from caddie_sdk.actions import action_format
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, tool_call
from caddie_tools import Passage

PASSAGES = (
    Passage("0", "Greave", "The lighthouse of Greave was built by Piet Corran."),
    Passage("1", "Long", "Lighthouse keepers write long letters. " + "Z" * 2_000),
    Passage("2", "Tarn", "The Tarn is a river."),
    Passage("3", "Lamp", "A lighthouse has a lamp."),
    Passage("4", "Stair", "A lighthouse has a stair."),
)
QUESTION = Question("q1", "Who built the lighthouse of Greave?", ("Piet Corran", "Corran"), PASSAGES, ("0",), 2)


async def run(question: Question, query: str) -> str:
    found = await search_tool(question).run(query=query)
    assert isinstance(found, str)
    return found


async def test_the_tool_searches_the_questions_own_passages() -> None:
    found = await run(QUESTION, "lighthouse Greave")
    assert found.startswith("[1] Greave: The lighthouse of Greave was built by Piet Corran.")
    assert len(found.splitlines()) == TOP_K
    assert await run(QUESTION, "submarine") == "No passages found for this query."


async def test_a_long_passage_is_cut() -> None:
    found = await run(QUESTION, "keepers letters")
    assert MAX_PASSAGE_CHARS - 50 < found.count("Z") <= MAX_PASSAGE_CHARS


async def test_each_tool_remembers_only_what_it_has_shown_itself() -> None:
    first, second = search_tool(QUESTION), search_tool(QUESTION)
    assert "Piet Corran" in str(await first.run(query="Greave"))
    assert await first.run(query="Greave") == "No new passages found for this query.\nAlready shown: Greave"
    assert "Piet Corran" in str(await second.run(query="Greave"))


def test_the_worked_example_is_in_the_format_it_teaches() -> None:
    """Every assistant turn of it parses: searches, then an answer."""
    form = action_format("caddie")
    turns = [form.parse(turn, {"search": "query"}, "") for turn in EXAMPLES if turn["role"] == "assistant"]
    assert [bool(turn.calls) for turn in turns] == [True, True, False]
    assert turns[-1].answer == "1872"
    assert not any(turn.problem for turn in turns)
    assert SYSTEM not in str(EXAMPLES)


@pytest.fixture
def outcome() -> dict[str, Any]:
    """An episode with one good consultation and one that failed."""
    model = ScriptedModel(
        [
            calls(tool_call("search", {"query": "Greave"})),
            calls(tool_call("call_critic")),
            calls(tool_call("call_critic")),
            "The Piet Corran!",
        ]
    )
    malformed = Critique(status="malformed", raw="nonsense", detail="not in the 'sections' format")
    critic = ScriptedCritic([("It is known.", "Answer now."), malformed])
    agent = create_caddie_agent(model, [search_tool(QUESTION)], critic=critic, system=SYSTEM)
    result: dict[str, Any] = agent.invoke({"messages": QUESTION.question})
    return result


def test_a_record_tells_the_whole_episode_as_plain_json(outcome: dict[str, Any]) -> None:
    made = record(QUESTION, outcome, 1.23456)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert list(made) == [
        "id", "question", "references", "answer", "reason", "error", "em", "f1", "consultations", "usage", "seconds",
        "transcript",
    ]  # fmt: skip
    assert (made["id"], made["question"], made["references"]) == ("q1", QUESTION.question, ["Piet Corran", "Corran"])
    assert (made["answer"], made["reason"], made["error"]) == ("The Piet Corran!", "answer", None)
    assert (made["em"], made["f1"], made["seconds"]) == (True, 1.0, 1.235)
    assert made["transcript"] == outcome["messages"]
    assert [message["role"] for message in made["transcript"]] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "assistant", "tool", "assistant"
    ]  # fmt: skip
    assert made["usage"] == outcome["usage"]
    assert made["usage"]["agent"]["calls"] == 4


def test_a_consultation_is_recorded_whether_it_helped_or_not(outcome: dict[str, Any]) -> None:
    good, bad = record(QUESTION, outcome, 0)["consultations"]
    assert list(good) == [
        "step", "control", "trigger", "status", "analysis", "advice", "raw", "detail", "usage", "seconds", "model"
    ]  # fmt: skip
    assert (good["step"], good["control"], good["trigger"]) == (1, "call_critic", "self-call")
    assert (good["status"], good["analysis"], good["advice"]) == ("ok", "It is known.", "Answer now.")
    assert list(good["usage"]) == list(Usage().dump())
    assert (bad["status"], bad["advice"], bad["raw"]) == ("malformed", "", "nonsense")
    assert bad["detail"] == "not in the 'sections' format"


def test_a_partly_right_answer_scores_in_between() -> None:
    made = record(QUESTION, {"answer": "Piet", "reason": "answer"}, 0)
    assert (made["em"], made["f1"]) == (False, 0.6667)


def test_without_references_nothing_is_scored() -> None:
    made = record(Question("q", "Why?", passages=PASSAGES), {"answer": "So", "reason": "answer"}, 0)
    assert (made["references"], made["em"], made["f1"]) == ([], None, None)


def test_an_episode_that_came_to_nothing_is_a_record_too() -> None:
    made = record(QUESTION, {"error": "cannot reach http://127.0.0.1:1/v1"}, 0)
    assert (made["answer"], made["reason"], made["error"]) == (None, "error", "cannot reach http://127.0.0.1:1/v1")
    assert (made["em"], made["f1"]) == (None, None), "a dead server is not a wrong answer"
    assert (made["consultations"], made["usage"], made["transcript"]) == ([], {}, [])


def test_cached_share() -> None:
    assert cached_share({"prompt_tokens": 200, "cached_tokens": 50}) == 0.25
    assert cached_share({"prompt_tokens": 200}) == 0.0
    assert cached_share({"prompt_tokens": 0, "cached_tokens": 0}) is None
    assert cached_share({}) is None
