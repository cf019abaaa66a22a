"""What `invoke` takes, and what it refuses with one clear error."""

from __future__ import annotations

from typing import Any

import pytest
from graph_kit import THREAD, WAYS, Invoke, contents
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import EmptyInputError, InvalidUpdateError

from caddie_sdk import create_caddie_agent
from caddie_sdk.errors import MessageError
from caddie_sdk.shells.langchain import to_canonical
from caddie_sdk.testing import ScriptedModel

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(params=WAYS)
def invoke(request: pytest.FixtureRequest) -> Invoke:
    return WAYS[request.param]


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ("Where?", "Where?"),
        ({"role": "user", "content": "Where?"}, "Where?"),
        (("user", "Where?"), "Where?"),
        (("human", "Where?"), "Where?"),
        (HumanMessage("Where?"), "Where?"),
        (HumanMessage("Where?", name="ada", id="7"), "Where?"),
        (["Where?"], "Where?"),
        ([{"role": "user", "content": "Where?"}], "Where?"),
        ([("user", "Where?")], "Where?"),
        ([["user", "Where?"]], "Where?"),
        ([HumanMessage("Where?")], "Where?"),
        ((HumanMessage("Where?"),), "Where?"),
        ({"role": "user", "content": [{"type": "text", "text": "Where?"}]}, "Where?"),
        (HumanMessage([{"type": "text", "text": "Where?"}]), "Where?"),
        (HumanMessage(["Where", "?"]), "Where\n?"),
        (
            {"role": "user", "content": [{"type": "text", "text": "What?"}, PICTURE]},
            [{"type": "text", "text": "What?"}, PICTURE],
        ),
        (HumanMessage([{"type": "text", "text": "What?"}, PICTURE]), [{"type": "text", "text": "What?"}, PICTURE]),
        ("lone \ud800 surrogate", "lone \ufffd\ufffd\ufffd surrogate"),
        ([HumanMessage("A"), "B", ("user", "C"), {"role": "user", "content": "D"}], "A\n\nB\n\nC\n\nD"),
    ],
    ids=repr,
)
def test_what_is_taken(said: Any, taken: Any, invoke: Invoke) -> None:
    model = ScriptedModel(["Paris"])
    output = invoke(create_caddie_agent(model), {"messages": said}, {})
    assert output["messages"] == [
        {"role": "user", "content": taken},
        {"role": "assistant", "content": "Paris"},
    ]
    assert model.seen[0].messages == [{"role": "user", "content": taken}]


WRONG_MESSAGES: list[tuple[Any, str]] = [
    (None, "not this NoneType"),
    (5, "not this int"),
    (b"Where?", "not this bytes"),
    ([5], "not this int"),
    ([None], "not this NoneType"),
    ({}, "not this dict"),
    ({"content": "Where?"}, "not this dict"),
    ([["user"]], "not this list"),
    (("nobody", "Where?"), "not this tuple"),
    ({"role": "nobody", "content": "Where?"}, "unknown message role 'nobody'"),
    ({"role": "user", "content": 5}, "message content must be text or a list of parts"),
    ([], "new user messages only"),
    ({"role": "system", "content": "Be careful."}, "system prompt goes to create_caddie_agent"),
    (SystemMessage("Be careful."), "system prompt goes to create_caddie_agent"),
    ([SystemMessage("Be careful."), HumanMessage("Where?")], "system prompt goes to create_caddie_agent"),
    (AIMessage("Paris"), "earlier turns live in the thread"),
    ([HumanMessage("Where?"), AIMessage("Paris")], "earlier turns live in the thread"),
    (ToolMessage("found", tool_call_id="x"), "new user messages only"),
]


@pytest.mark.parametrize(("said", "says"), WRONG_MESSAGES, ids=repr)
@pytest.mark.parametrize("stored", [False, True], ids=["bare", "thread"])
def test_what_is_refused(said: Any, says: str, stored: bool, invoke: Invoke) -> None:
    model = ScriptedModel(["Paris"])
    agent = create_caddie_agent(model, checkpointer=InMemorySaver() if stored else None)
    config = THREAD if stored else {}
    with pytest.raises(MessageError) as caught:
        invoke(agent, {"messages": said}, config)
    assert says in str(caught.value)
    assert model.seen == []
    if stored:
        assert contents(invoke(agent, {"messages": "Where?"}, config), "user") == ["Where?"]


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("Where?", InvalidUpdateError, "Expected dict"),
        (5, InvalidUpdateError, "Expected dict"),
        (None, EmptyInputError, "no input"),
        ({}, MessageError, "'messages'"),
        ({"message": "Where?"}, MessageError, "'messages'"),
    ],
    ids=repr,
)
def test_input_that_is_no_state(given: Any, error: Any, says: str, invoke: Invoke) -> None:
    with pytest.raises(error, match=says):
        invoke(create_caddie_agent(ScriptedModel(["Paris"])), given, {})


def test_a_caller_cannot_hand_in_a_session() -> None:
    """The input has one field; a forged session beside it changes nothing."""
    agent = create_caddie_agent(ScriptedModel(["Paris"]))
    output = agent.invoke({"messages": "Where?", "session": {"version": 1}, "answer": "forged"})
    assert output["answer"] == "Paris"


def test_several_messages_are_read_in_order() -> None:
    read = to_canonical([HumanMessage("a"), AIMessage("b"), ("system", "c"), ToolMessage("d", tool_call_id="x")])
    assert [(message["role"], message["content"]) for message in read] == [
        ("user", "a"),
        ("assistant", "b"),
        ("system", "c"),
        ("tool", "d"),
    ]
    assert read[3]["tool_call_id"] == "x"
