"""The fakes shipped with the SDK, and the check of wire histories."""

from __future__ import annotations

from typing import Any

import pytest

from caddie_sdk.commands import CallModel
from caddie_sdk.critic import ConsultState, Critic
from caddie_sdk.critique import SECTIONS, Critique
from caddie_sdk.model import ChatModel
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, check_wire, tool_call
from caddie_sdk.usage import Usage

CALL = CallModel([{"role": "user", "content": "hi"}], [])
STATE = ConsultState("call_critic", "self-call", 0, ())


async def test_a_scripted_model_says_its_lines_in_order() -> None:
    model = ScriptedModel(
        ["one", {"role": "assistant", "content": "two"}, calls(tool_call("search", {"q": 1}, id="a"))]
    )
    assert isinstance(model, ChatModel)
    assert model.complete(CALL).message == {"role": "assistant", "content": "one"}
    reply = await model.acomplete(CALL)
    assert reply.message["content"] == "two"
    assert reply.usage == Usage(10, 5, 0, 1)
    assert model.complete(CALL).message["tool_calls"] == [tool_call("search", {"q": 1}, id="a")]
    assert model.seen == [CALL] * 3
    with pytest.raises(AssertionError, match="script of 3 entries is used up"):
        model.complete(CALL)


async def test_a_scripted_model_raises_what_it_is_told_and_may_be_a_function() -> None:
    model = ScriptedModel([ValueError("down"), "up"], usage=Usage(1))
    with pytest.raises(ValueError, match="down"):
        await model.acomplete(CALL)
    assert model.complete(CALL).usage == Usage(1)
    echo = ScriptedModel(lambda call: call.messages[-1]["content"].upper())
    assert echo.complete(CALL).message["content"] == "HI"
    assert echo.complete(CALL).message["content"] == "HI"


async def test_a_scripted_critic() -> None:
    ready = Critique(status="timeout")
    critic = ScriptedCritic([("a", "b"), ready, KeyError("x")])
    assert isinstance(critic, Critic)
    first = critic.critique(STATE)
    assert (first.analysis, first.advice, first.ok) == ("a", "b", True)
    assert SECTIONS.parse(first.raw) == ("a", "b"), "its raw text is what a real critic would have written"
    assert await critic.acritique(STATE) is ready
    with pytest.raises(KeyError):
        critic.critique(STATE)
    assert critic.seen == [STATE] * 3
    assert ScriptedCritic(lambda state: (state.control, "b")).critique(STATE).analysis == "call_critic"


def test_tool_call_sends_a_string_as_it_is() -> None:
    assert tool_call("search", "{bad")["function"]["arguments"] == "{bad"
    assert tool_call("search")["function"]["arguments"] == "{}"
    assert calls(tool_call("a"), tool_call("b"), text="t")["content"] == "t"


# ---------------------------------------------------------------- check_wire

USER: dict[str, Any] = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "s"}


def asks(*ids: str, arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    made = [{"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": made, **fields}


def result(id: str, content: Any = "r") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [USER],
        [SYSTEM, USER, asks("a", "b"), result("a"), result("b", "")],
        [USER, {"role": "assistant", "content": "x"}, USER],
        [USER, asks("a", arguments='{"x": 1}', content="text too"), result("a"), asks("b"), result("b"), USER],
        [USER, USER],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    ],
)
def test_check_wire_accepts_good_histories(messages: list[Any]) -> None:
    check_wire(messages)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "robot", "content": "x"}], "unknown role"),
        ([USER, SYSTEM, USER], "system message after the first"),
        ([USER, result("a")], "no call is waiting"),
        ([USER, asks("a"), result("a"), result("a")], "no call is waiting"),
        ([USER, asks("a", "b"), result("b"), result("a")], "out of order"),
        ([USER, asks("a"), result("z")], "out of order"),
        ([USER, asks("a"), result("a", None)], "not text"),
        ([USER, asks("a"), result("a", ["x"])], "not text"),
        ([USER, asks("a"), USER], "'a' has no result"),
        ([USER, asks("a", "b"), result("a"), USER], "'b' has no result"),
        ([USER, asks("a")], "unanswered"),
        ([USER, asks("a", "b"), result("a")], "unanswered"),
        ([USER, {"role": "assistant", "content": "x"}], "assistant's own turn"),
        ([USER, asks("a", "a"), result("a"), result("a")], "used twice"),
        ([USER, asks("a"), result("a"), asks("a"), result("a")], "used twice"),
        ([USER, asks(""), result("")], "empty tool call id"),
        ([USER, asks()], "empty list of tool calls"),
        ([{**USER, "tool_calls": asks("a")["tool_calls"]}, result("a")], "outside an assistant message"),
        ([USER, asks("a", arguments="[1]"), result("a")], "not a JSON object"),
        ([USER, {"role": "assistant", "content": None}, USER], "neither content nor tool calls"),
        ([{"role": "user", "content": ""}], "neither content nor tool calls"),
    ],
)
def test_check_wire_refuses_each_kind_of_bad_history(messages: list[Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check_wire(messages)


def test_check_wire_alternating() -> None:
    with pytest.raises(AssertionError, match="two user messages in a row"):
        check_wire([USER, USER], alternating=True)
    check_wire([USER, {"role": "assistant", "content": "x"}, USER], alternating=True)


def test_check_wire_refuses_arguments_that_do_not_parse() -> None:
    for bad in ("{bad", "[]", '{"x": NaN}'):
        with pytest.raises(AssertionError, match="not a JSON object"):
            check_wire([USER, asks("a", arguments=bad), result("a")])
    with pytest.raises(UnicodeEncodeError):
        check_wire([{"role": "user", "content": "\ud800"}])
    with pytest.raises(ValueError, match="not JSON compliant"):
        check_wire([{"role": "user", "content": "x", "weight": float("nan")}])
