"""Consultations at several fixed steps, and worked examples before the task."""

from __future__ import annotations

import json

import pytest

from caddie_sdk import Budget, Scheduled, Session, SessionConfig, Tool, Windowed, parse_protocol, run
from caddie_sdk.errors import ConfigError
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, check_wire

SEARCH = Tool(
    "search",
    "Search.",
    {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    lambda query: f"nothing on {query}",
)


def test_several_steps_are_one_protocol_and_one_step_is_a_window() -> None:
    assert parse_protocol("fixed:2,5") == Scheduled((2, 5))
    assert parse_protocol(Scheduled((2, 5)).spec) == Scheduled((2, 5))
    assert parse_protocol("fixed:2") == Windowed(2, 2)


@pytest.mark.parametrize("text", ["fixed:1,", "fixed:,", "fixed:-1,2", "fixed:1,x"])
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="protocol"):
        parse_protocol(text)


def test_consults_at_exactly_these_steps() -> None:
    config = SessionConfig(
        tools=(SEARCH.schema(),), format="caddie", protocol=Scheduled((0, 2)), budget=Budget(max_steps=4)
    )
    session = Session(config)
    searches = [f"<reason>r</reason><search>q{step}</search>" for step in range(4)]
    model = ScriptedModel([*searches, "<reason>r</reason><answer>a</answer>"])
    finish = run(session, "Who?", model, [SEARCH], {"call_critic": ScriptedCritic(lambda state: ("x", "y"))})
    assert finish.answer == "a"
    assert [(record["step"], record["trigger"]) for record in session.consultations] == [(0, "fixed"), (2, "fixed")]


EXAMPLES = (
    {"role": "user", "content": "Which sea?"},
    {"role": "assistant", "content": "<reason>r</reason><answer>the North Sea</answer>"},
)


def test_examples_stand_before_the_task_and_critics_do_not_see_them() -> None:
    config = SessionConfig(tools=(SEARCH.schema(),), system="Be brief.", examples=EXAMPLES, format="caddie")
    session = Session(config)
    model = ScriptedModel(["<reason>r</reason><critic/>", "<reason>r</reason><answer>a</answer>"])
    critic = ScriptedCritic([("x", "y")])
    run(session, "Which river?", model, [SEARCH], {"call_critic": critic})
    sent = model.seen[0].messages
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "user"]
    assert sent[1]["content"] == "Which sea?"
    assert sent[3]["content"] == "Which river?"
    check_wire(sent, alternating=True)
    told = critic.seen[0].events
    assert [event.kind for event in told] == ["task", "proposal"]
    assert told[0].text == "Which river?"
    assert "sea" not in json.dumps(critic.seen[0].dump()["events"])
    assert Session.load(json.loads(json.dumps(session.dump()))) == session


def test_examples_with_tool_calls_are_refused() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    with pytest.raises(ConfigError, match="examples"):
        SessionConfig(examples=({"role": "assistant", "content": "", "tool_calls": [call]},))


def test_a_control_cannot_be_offered_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        SessionConfig(controls=("call_critic", "call_critic"))
