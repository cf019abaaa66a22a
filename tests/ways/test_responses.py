"""The Responses API through wrapped clients and the proxy: consultations, histories of every kind, faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel
from responding import (
    ADVICE,
    ASK,
    HOWS,
    REFUND,
    SEARCH,
    WAYS,
    Caller,
    assert_nothing_hidden,
    checked,
    function_call,
    items,
    kinds,
    message,
    reasoning,
    result,
    script,
)
from upstream import Scripted, Upstream, failure

from caddie_sdk import Budget
from caddie_sdk.critique import Critique
from caddie_sdk.relay.ledger import MemoryLedger
from caddie_sdk.shells.wrap import wrap
from caddie_sdk.testing import ScriptedCritic, calls, tool_call

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own parsing
Upstreams = Callable[..., Upstream]
Callers = Callable[..., Caller]
BARE_ASK = calls(tool_call("call_critic"))
SEARCHES = calls(tool_call("search", {"query": "x"}))
MIXED = calls(tool_call("search", {"query": "x"}), tool_call("call_critic"), text="Both.")


@pytest.fixture
def callers() -> Iterator[Callers]:
    """Makes `Caller(...)`s; all of them are closed with the test."""
    with ExitStack() as stack:

        def make(*given: Any, **settings: Any) -> Caller:
            caller = Caller(*given, **settings)
            stack.callback(caller.close)
            return caller

        yield make


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=HOWS)
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["create", "stream"])
def whole_or_stream(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def sent(upstream: Upstream, number: int = -1) -> list[Any]:
    """The items of a request as they came in."""
    given = upstream.requests[number].body["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def offered(upstream: Upstream, number: int = -1) -> list[str]:
    return [tool["name"] for tool in upstream.requests[number].body.get("tools") or ()]


def advice_in(sent_items: list[Any]) -> list[bool]:
    """For each result among the items, whether it is advice."""
    return ["zanzibar" in str(item["output"]) for item in sent_items if item.get("type") == "function_call_output"]


# ---------------------------------------------------------------------- one request


def test_a_consultation_is_invisible_but_told(upstreams: Upstreams, callers: Callers, way: str, how: str) -> None:
    upstream = upstreams([ASK, "The Thames."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    answer = caller.ask(how)
    assert [item.type for item in answer.output] == ["message", "message"]
    assert answer.output_text == "Let me ask.The Thames."
    assert (answer.usage.input_tokens, answer.usage.total_tokens) == (200, 220)
    assert answer.usage.input_tokens_details.cached_tokens == 80
    assert [tool.name for tool in answer.tools] == ["search", "refund"]
    told = answer.to_dict()["caddie"]
    assert [(one["control"], one["status"]) for one in told["consultations"]] == [("call_critic", "ok")]
    assert (told["remaining"], told["agent_calls"]) == (2, 2)
    assert offered(upstream, 0) == offered(upstream, 1) == ["search", "refund", "call_critic"]
    assert kinds(sent(upstream)) == ["user", "assistant", "call", "result"]
    assert advice_in(sent(upstream)) == [True]
    assert len(caller.critic.seen) == 1
    upstream.raise_if_unused()


def test_two_critics_asked_at_once(upstreams: Upstreams) -> None:
    both = calls(tool_call("call_critic"), tool_call("request_feedback"), tool_call("search"))
    for stream in (False, True):
        upstream = upstreams([both, "Yes."], strict=True)
        critic, feedback = ScriptedCritic([ADVICE]), ScriptedCritic([("Own view.", "zanzibar again")])
        client = wrap(OpenAI(base_url=upstream.url, api_key="none"), critic, feedback=feedback)
        create = client.responses.create
        if stream:
            first: Any = checked(list(create(model="m", input="Which?", tools=[SEARCH], stream=True)))  # type: ignore[list-item]
        else:
            first = create(model="m", input="Which?", tools=[SEARCH])  # type: ignore[list-item]
        assert [item.type for item in first.output] == ["function_call"]
        create(model="m", input=[result(first.output[0])], previous_response_id=first.id)  # type: ignore[list-item]
        assert advice_in(upstream.requests[-1].items) == [True, True, False]
        assert (len(critic.seen), len(feedback.seen)) == (1, 1)


def test_without_a_consultation_the_answer_is_the_upstreams_own(
    upstreams: Upstreams, callers: Callers, way: str, how: str
) -> None:
    upstream = upstreams([SEARCHES, SEARCHES])
    caller = callers(way, upstream, [])
    answer = caller.ask(how).to_dict()
    bare = OpenAI(base_url=upstream.url, api_key="none").responses.create(
        model="m", input="Which river?", tools=[SEARCH, REFUND]
    )
    ours, theirs = json.dumps(answer), json.dumps(bare.to_dict())
    for text in (answer["id"], answer["output"][0]["id"], answer["output"][0]["call_id"]):
        ours = ours.replace(text, "X")
    for text in (bare.id, bare.output[0].id, bare.output[0].call_id):
        theirs = theirs.replace(text, "X")
    ours = ours.replace(', "parsed_arguments": null', "")
    assert json.loads(ours) == json.loads(theirs)
    assert "caddie" not in answer


@pytest.mark.parametrize("by", ["history", "id"])
def test_a_mixed_turn_shows_the_callers_call_and_puts_the_pair_back(
    upstreams: Upstreams, callers: Callers, way: str, how: str, by: str
) -> None:
    upstream = upstreams([MIXED, "The Thames."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    first = caller.ask(how)
    assert [item.type for item in first.output] == ["message", "function_call"]
    assert first.output[1].name == "search"
    if by == "id":
        second = caller.ask(how, [result(first.output[1])], previous_response_id=first.id)
        assert second.previous_response_id == first.id
    else:
        second = caller.ask(how, [{"role": "user", "content": "Which river?"}, *dumped(first), result(first.output[1])])
    assert second.output_text == "The Thames."
    whole = upstream.requests[-1].items
    assert kinds(whole) == ["user", "assistant", "call", "call", "result", "result"]
    assert advice_in(whole) == [False, True]
    assert len(caller.critic.seen) == 1
    assert upstream.refused == []


def test_a_guarded_call_is_held_and_shown_when_it_comes_again(
    upstreams: Upstreams, callers: Callers, way: str, how: str
) -> None:
    refund = calls(tool_call("search", {"query": "x"}), tool_call("refund", {"order": "W1"}), text="Refunding.")
    alone = calls(tool_call("refund", {"order": "W1"}))
    upstream = upstreams([alone, alone, "Done.", refund], strict=True)
    caller = callers(way, upstream, [ADVICE, ADVICE], protocol="guarded:refund")
    first = caller.ask(how)
    assert [(item.type, item.name) for item in first.output] == [("function_call", "refund")]
    assert kinds(sent(upstream)) == ["user", "call", "result", "call", "result"]
    assert advice_in(sent(upstream)) == [False, True]
    done = caller.ask(how, [result(first.output[0], "paid")], previous_response_id=first.id)
    assert done.output_text == "Done."
    assert len(caller.critic.seen) == 1
    # Beside another call, only the guarded one waits.
    beside = caller.ask(how, "And W2?", previous_response_id=done.id)
    assert [getattr(item, "name", item.type) for item in beside.output] == ["message", "search"]
    assert len(caller.critic.seen) == 2


def test_a_forced_consultation_comes_before_the_model(
    upstreams: Upstreams, callers: Callers, way: str, how: str
) -> None:
    upstream = upstreams([SEARCHES, "The Thames."], strict=True)
    caller = callers(way, upstream, [ADVICE], protocol="fixed:1")
    first = caller.ask(how)
    assert offered(upstream) == ["search", "refund"]
    assert caller.critic.seen == []
    second = caller.ask(how, [result(first.output[0])], previous_response_id=first.id)
    assert second.output_text == "The Thames."
    assert kinds(upstream.requests[-1].items) == ["user", "call", "result", "call", "result"]
    assert advice_in(upstream.requests[-1].items) == [False, True]
    assert [one["trigger"] for one in second.to_dict()["caddie"]["consultations"]] == ["fixed"]


def test_the_tool_is_withdrawn_at_the_budget(upstreams: Upstreams, callers: Callers, way: str, how: str) -> None:
    upstream = upstreams([ASK, BARE_ASK, "The Thames."], strict=True)
    caller = callers(way, upstream, [ADVICE], budget=Budget(max_uses=1))
    answer = caller.ask(how)
    assert answer.output_text == "Let me ask.The Thames."
    assert ["call_critic" in offered(upstream, n) for n in range(3)] == [True, False, False]
    assert answer.to_dict()["caddie"]["remaining"] == 0
    # An id keeps the count, and so does a history.
    upstream2 = upstreams([ASK, "One.", "Two."], strict=True)
    caller = callers(way, upstream2, [ADVICE], budget=Budget(session_max_uses=1))
    first = caller.ask(how)
    caller.ask(how, "Next?", previous_response_id=first.id)
    assert "call_critic" not in offered(upstream2)


def test_an_agent_that_only_asks_comes_to_an_end(upstreams: Upstreams, callers: Callers, way: str, how: str) -> None:
    upstream = upstreams(lambda body: "Enough." if "Next?" in json.dumps(body["input"]) else BARE_ASK, strict=True)
    caller = callers(way, upstream, lambda state: ADVICE)
    answer = caller.ask(how)
    assert [item.type for item in answer.output] == []
    assert answer.status == "completed"
    assert len(caller.critic.seen) == 3
    assert len(upstream.requests) < 10
    # The conversation can go on, whoever keeps it, and even where no session follows.
    assert caller.ask(how, "Next?", previous_response_id=answer.id).output_text == "Enough."
    history = [{"role": "user", "content": text} for text in ("Which river?", "Next?")]
    assert caller.ask(how, history).output_text == "Enough."
    unfollowed = {"model": "m", "input": "Next?", "previous_response_id": answer.id, "background": True}
    caller.wait(caller.client.responses.create(**unfollowed))
    assert upstream.refused == []


@pytest.mark.parametrize(
    "fault", [RuntimeError("boom"), Critique(status="timeout", detail="slow"), ("Analysis.", " ")], ids=str
)
def test_a_critic_that_fails_stops_nobody(upstreams: Upstreams, callers: Callers, way: str, fault: Any) -> None:
    for how in HOWS:
        upstream = upstreams([BARE_ASK, "The Thames."], strict=True)
        answer = callers(way, upstream, [fault]).ask(how)
        assert answer.output_text == "The Thames."
        assert answer.to_dict()["caddie"]["consultations"][0]["status"] in ("failed", "timeout", "malformed")
        assert "none this time" in sent(upstream)[-1]["output"]


def test_on_error_raise_ends_the_request(upstreams: Upstreams, callers: Callers, way: str, how: str) -> None:
    upstream = upstreams([ASK])
    caller = callers(way, upstream, [RuntimeError("boom")], on_error="raise")
    with pytest.raises(openai.APIError, match="the consultation failed") as caught:
        caller.ask(how)
    if how in ("create", "parse"):
        assert isinstance(caught.value, openai.APIStatusError)
        assert caught.value.status_code == 424
    forced = callers(way, upstreams([]), [RuntimeError("boom")], on_error="raise", protocol="fixed:0")
    with pytest.raises(openai.APIStatusError) as early:
        forced.ask(how)
    assert early.value.status_code == 424


@pytest.mark.parametrize("choice", ["none", "required", "auto", {"type": "function", "name": "search"}], ids=str)
def test_the_choice_of_tools_is_the_callers(upstreams: Upstreams, callers: Callers, way: str, choice: Any) -> None:
    upstream = upstreams(["No.", "No."])
    caller = callers(way, upstream, [])
    for how in ("create", "events"):
        caller.ask(how, tool_choice=choice)
        assert ("call_critic" in offered(upstream)) == (choice in ("required", "auto"))
        assert upstream.requests[-1].body["tool_choice"] == choice


def test_instructions_and_other_fields_go_on_as_they_are(upstreams: Upstreams, callers: Callers, way: str) -> None:
    upstream = upstreams([ASK, "Yes."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    body = {
        "instructions": "Be brief.", "temperature": 0.5, "metadata": {"a": "b"}, "user": "u",
        "parallel_tool_calls": False, "max_output_tokens": 99, "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
    }  # fmt: skip
    caller.ask("create", "Which?", **body)
    for request in upstream.requests:
        assert {name: request.body[name] for name in body} == body
    assert caller.critic.seen[0].system == "Be brief."
    assert kinds(sent(upstream)) == ["user", "assistant", "call", "result"]


def test_the_extension_field_is_read_and_kept_from_the_upstream(
    upstreams: Upstreams, callers: Callers, way: str
) -> None:
    upstream = upstreams(["No.", ASK, "Yes."])
    caller = callers(way, upstream, [ADVICE])
    off = caller.ask("create", extra_body={"caddie": {"enabled": False}})
    assert offered(upstream) == ["search", "refund"]
    on = caller.ask("create", extra_body={"caddie": {"advice": True, "max_uses": 1}})
    assert on.to_dict()["caddie"]["consultations"][0]["advice"] == ADVICE[1]
    assert all("caddie" not in request.body for request in upstream.requests)
    assert "caddie" not in off.to_dict()
    with pytest.raises(openai.BadRequestError, match="caddie option 'speed' is not known"):
        caller.ask("create", extra_body={"caddie": {"speed": 1}})


# ---------------------------------------------------------------------- histories of the caller's own


def dumped(response: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in response.output]


FORMS: dict[str, Callable[[Any], list[Any]]] = {
    "objects": lambda response: list(response.output),
    "model_dump": lambda response: [item.model_dump() for item in response.output],
    "exclude_unset": lambda response: [item.model_dump(exclude_unset=True) for item in response.output],
    "without ids": lambda response: [
        {key: value for key, value in item.items() if key not in ("id", "status")} for item in dumped(response)
    ],
    "easy messages": lambda response: [{"role": "assistant", "content": response.output_text}],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_history_in_any_form_gets_its_consultation_back(
    upstreams: Upstreams, callers: Callers, way: str, form: str
) -> None:
    for how in ("create", "events"):
        upstream = upstreams([ASK, "The Thames.", "Yes."], strict=True)
        caller = callers(way, upstream, [ADVICE])
        history: list[Any] = [{"role": "user", "content": "Which river?"}]
        history += FORMS[form](caller.ask(how, history))
        history.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sure?"}]})
        caller.ask(how, history)
        assert kinds(sent(upstream)) == ["user", "assistant", "call", "result", "assistant", "user"]
        assert advice_in(sent(upstream)) == [True]
        assert sent(upstream)[-1] == history[-1]


def test_a_long_history_with_calls_and_consultations(upstreams: Upstreams, callers: Callers, way: str) -> None:
    replies = [SEARCHES, MIXED, ASK, SEARCHES, "One.", MIXED, "Two."]
    for how in HOWS:
        upstream = upstreams(replies, strict=True)
        caller = callers(way, upstream, lambda state: ADVICE)
        history: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Which?"}]
        for _ in range(2):
            while True:
                answer = caller.ask(how, history)
                made = [item for item in answer.output if item.type == "function_call"]
                history += [*dumped(answer), *map(result, made)]
                if not made:
                    break
            history.append({"role": "user", "content": "Next?"})
        upstream.raise_if_unused()
        assert upstream.refused == []
        assert advice_in(sent(upstream)) == [False, False, True, True, False, False, True]
        assert kinds(sent(upstream))[:2] == ["developer", "user"]
        assert [len(state.events) for state in caller.critic.seen] == sorted(
            len(state.events) for state in caller.critic.seen
        )
        assert len(caller.critic.seen) == 3


def test_an_edited_history_gets_nothing_put_back(upstreams: Upstreams, callers: Callers, way: str) -> None:
    upstream = upstreams([ASK, "The Thames.", "Yes."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    first = caller.ask("create", "Which river?")
    edited = [{"role": "user", "content": "Which lake?"}, *dumped(first), {"role": "user", "content": "Sure?"}]
    caller.ask("create", edited)
    assert kinds(sent(upstream)) == ["user", "assistant", "assistant", "user"]


@pytest.mark.parametrize("store", [True, False, None])
@pytest.mark.parametrize("encrypted", [True, False])
def test_reasoning_before_a_hidden_call_goes_back_only_to_those_who_know_it(
    upstreams: Upstreams, callers: Callers, way: str, store: bool | None, encrypted: bool
) -> None:
    thought = reasoning("1", **({"encrypted_content": "ZZZ"} if encrypted else {"encrypted_content": None}))
    for how in ("create", "events"):
        upstream = upstreams(script(
            items([thought, function_call("call_critic", "1")]), items([reasoning("2"), message("Yes.")], "resp_y")
        ))  # fmt: skip
        caller = callers(way, upstream, [ADVICE])
        answer = caller.ask(how, store=store)
        back = [item for item in sent(upstream) if item.get("type") in ("reasoning", "function_call")]
        assert [item["type"] for item in back] == ["reasoning"] * (store is not False or encrypted) + ["function_call"]
        assert [item.get("encrypted_content") for item in back[:-1]] == ["ZZZ" if encrypted else None] * (len(back) - 1)
        # Ids pair a thought with its call, where the server keeps items; where it does not, it knows no id.
        assert [item.get("id") for item in back if store is False] in ([], [None], [None, None])
        assert [item.get("id") for item in back if store is not False] in ([], ["rs_1", "fc_1"])
        assert all(value is not None for item in back for value in item.values())
        assert [item.type for item in answer.output] == ["reasoning", "reasoning", "message"]


# ---------------------------------------------------------------------- histories that the server keeps


def test_several_turns_by_id(upstreams: Upstreams, callers: Callers, way: str, whole_or_stream: str) -> None:
    upstream = upstreams([ASK, "One.", MIXED, "Two.", ASK, SEARCHES, "Three."], strict=True)
    caller = callers(way, upstream, lambda state: ADVICE)
    first = caller.ask(whole_or_stream)
    second = caller.ask(whole_or_stream, "Two?", previous_response_id=first.id)
    third = caller.ask(whole_or_stream, [result(second.output[-1])], previous_response_id=second.id)
    fourth = caller.ask(whole_or_stream, "Three?", previous_response_id=third.id)
    fifth = caller.ask(whole_or_stream, [result(fourth.output[-1])], previous_response_id=fourth.id)
    assert fifth.output_text == "Three."
    assert [answer.previous_response_id for answer in (second, third, fourth, fifth)] == [
        answer.id for answer in (first, second, third, fourth)
    ]
    assert len({answer.id for answer in (first, second, third, fourth, fifth)}) == 5
    assert advice_in(upstream.requests[-1].items) == [True, False, True, True, False]
    assert len(caller.critic.seen) == 3
    # The critic reads all of it, though each request told only what was new.
    assert [state.events[0].text for state in caller.critic.seen] == ["Which river?"] * 3
    assert upstream.refused == []


def test_two_branches_of_one_response(upstreams: Upstreams, callers: Callers, way: str, whole_or_stream: str) -> None:
    upstream = upstreams([ASK, SEARCHES, "Left.", MIXED, "Right.", "Left again."], strict=True)
    caller = callers(way, upstream, lambda state: ADVICE)
    root = caller.ask(whole_or_stream)
    found = [result(root.output[-1])]
    left = caller.ask(whole_or_stream, found, previous_response_id=root.id)
    right = caller.ask(whole_or_stream, found, previous_response_id=root.id)
    done = caller.ask(whole_or_stream, [result(right.output[-1])], previous_response_id=right.id)
    caller.ask(whole_or_stream, "And?", previous_response_id=left.id)
    assert (left.output_text, done.output_text) == ("Left.", "Right.")
    assert "Right." not in json.dumps(upstream.requests[-1].items)
    assert advice_in(upstream.requests[-1].items) == [True, False]
    assert upstream.refused == []


def test_without_store_nothing_is_kept_under_an_id(
    upstreams: Upstreams, callers: Callers, way: str, whole_or_stream: str
) -> None:
    upstream = upstreams([ASK, "One.", MIXED, "Two."], strict=True)
    caller = callers(way, upstream, lambda state: ADVICE)
    first = caller.ask(whole_or_stream, store=False)
    assert all("previous_response_id" not in request.body for request in upstream.requests)
    with pytest.raises(openai.BadRequestError, match="not found"):
        caller.ask(whole_or_stream, "Two?", previous_response_id=first.id, store=False)
    history = [{"role": "user", "content": "Which river?"}, *dumped(first), {"role": "user", "content": "Two?"}]
    second = caller.ask(whole_or_stream, history, store=False)
    caller.ask(whole_or_stream, [*history, *dumped(second), result(second.output[-1])], store=False)
    assert advice_in(sent(upstream)) == [True, False, True]
    for request in upstream.requests:
        assert all("id" not in item for item in request.body["input"] if item.get("type") == "function_call_output")


def test_instructions_and_developer_messages_of_a_later_turn_arrive(
    upstreams: Upstreams, callers: Callers, way: str
) -> None:
    upstream = upstreams([ASK, "One.", "Two."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    first = caller.ask("create", instructions="Be brief.")
    late: list[Any] = [{"role": "developer", "content": "Now be long."}, {"role": "user", "content": "Two?"}]
    caller.ask("create", late, previous_response_id=first.id, instructions="Be kind.")
    assert sent(upstream) == late
    assert upstream.requests[-1].body["instructions"] == "Be kind."


def test_made_up_examples_do_not_end_the_trajectory(upstreams: Upstreams, callers: Callers, way: str) -> None:
    upstream = upstreams(["One.", ASK, "Two."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    shots = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3?"},
    ]
    first = caller.ask("create", shots)
    caller.ask("create", "Sure?", previous_response_id=first.id)
    assert [event.text for event in caller.critic.seen[0].events if event.kind in ("task", "user")] == [
        "2+2?",
        "3+3?",
        "Sure?",
    ]


class Forgetful(MemoryLedger):
    """A ledger that can be told to know nothing any more."""

    def forget(self) -> None:
        for key in list(self._entries):
            self.drop(key)


def test_a_forgotten_response_goes_on_as_the_server_knows_it(upstreams: Upstreams, callers: Callers, way: str) -> None:
    upstream = upstreams([ASK, "One.", "Two.", SEARCHES, "Three."], strict=True)
    ledger = Forgetful()
    caller = callers(way, upstream, [ADVICE], ledger=ledger)
    first = caller.ask("create")
    ledger.forget()
    second = caller.ask("create", "Two?", previous_response_id=first.id)
    assert kinds(upstream.requests[-1].items) == ["user", "assistant", "call", "result", "assistant", "user"]
    third = caller.ask("create", "Three?", previous_response_id=second.id)
    ledger.forget()
    fourth = caller.ask("create", [result(third.output[0])], previous_response_id=third.id)
    assert fourth.output_text == "Three."
    assert offered(upstream) == ["search", "refund"]  # a result without its call is no trajectory: passed as it is
    assert upstream.refused == []


def test_a_forgotten_turn_of_a_history_is_sent_as_the_caller_sees_it(
    upstreams: Upstreams, callers: Callers, way: str
) -> None:
    upstream = upstreams([MIXED, "One."], strict=True)
    ledger = Forgetful()
    caller = callers(way, upstream, [ADVICE], ledger=ledger)
    first = caller.ask("create")
    ledger.forget()
    # Another process altogether: what the first one holds in memory is gone as well.
    caller = callers(way, upstream, [], ledger=ledger)
    history = [{"role": "user", "content": "Which river?"}, *dumped(first), result(first.output[-1])]
    assert caller.ask("create", history).output_text == "One."
    assert [{k: v for k, v in item.items() if v is not None} for item in sent(upstream)] == history


def test_a_restart_with_a_ledger_file(
    upstreams: Upstreams, callers: Callers, way: str, whole_or_stream: str, tmp_path: Path
) -> None:
    upstream = upstreams([MIXED, ASK, "One.", MIXED, "Two.", "Three."], strict=True)
    path = tmp_path / "ledger.db"
    first = callers(way, upstream, [ADVICE], ledger=path).ask(whole_or_stream)
    second = callers(way, upstream, [ADVICE], ledger=path).ask(
        whole_or_stream, [result(first.output[-1])], previous_response_id=first.id
    )
    third = callers(way, upstream, [ADVICE], ledger=path).ask(whole_or_stream, "Two?", previous_response_id=second.id)
    callers(way, upstream, [], ledger=path).ask(
        whole_or_stream, [result(third.output[-1])], previous_response_id=third.id
    )
    assert advice_in(upstream.requests[-1].items) == [False, True, True, False, True]
    history = [{"role": "user", "content": "Which river?"}, *dumped(first), result(first.output[-1])]
    callers(way, upstream, [], ledger=path).ask(whole_or_stream, history)
    assert advice_in(sent(upstream)) == [False, True]


def test_callers_with_other_keys_share_nothing(upstreams: Upstreams, callers: Callers, way: str) -> None:
    upstream = upstreams([ASK, "One.", "Two."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    first = caller.ask("create", "Which river?")
    stranger = {"Authorization": "Bearer other"}
    history = [{"role": "user", "content": "Which river?"}, *dumped(first), {"role": "user", "content": "Two?"}]
    caller.ask("create", history, extra_headers=stranger)
    assert kinds(sent(upstream)) == ["user", "assistant", "assistant", "user"]


# ---------------------------------------------------------------------- what no session can follow


@pytest.mark.parametrize(
    "extra",
    [
        {"conversation": "conv_1"},
        {"background": True},
        {"prompt": {"id": "pmpt_1"}},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": [{"role": "user", "content": "x"}, {"type": "mcp_approval_response", "approval_request_id": "a",
                                                      "approve": True}]},
        {"input": [{"type": "function_call_output", "call_id": "nowhere", "output": "x"}]},
        {"input": [{"type": "tool_search_output", "call_id": "c", "tools": []}]},
        {"tools": [{"type": "function", "name": "call_critic", "parameters": {}}]},
        {"text": "loud", "background": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_followed_passes_as_it_is(
    upstreams: Upstreams, callers: Callers, way: str, extra: dict[str, Any]
) -> None:
    upstream = upstreams(lambda body: "Fine.")
    caller = callers(way, upstream, [])
    body = {"model": "m", "input": "Which?", **extra}
    url = str(caller.client.base_url) + "responses"
    if way == "proxy":
        got = httpx.post(url, json=body)
        assert got.status_code == 200
    else:
        caller.wait(caller.client.post("/responses", body=body, cast_to=httpx.Response))
    assert upstream.requests[-1].body == body


def test_an_unfollowed_request_continues_the_response_that_the_server_knows(
    upstreams: Upstreams, callers: Callers, way: str
) -> None:
    """A stream tells an id before more responses follow, and a hidden call may be open: both are mended."""
    upstream = upstreams([ASK, "One.", "Two.", MIXED, "Three."], strict=True)
    caller = callers(way, upstream, lambda state: ADVICE)
    first = caller.ask("events")
    caller.ask("create", "Go on.", previous_response_id=first.id, background=True)
    assert kinds(upstream.requests[-1].items) == ["user", "assistant", "call", "result", "assistant", "user"]
    mixed = caller.ask("create", "Again?")
    caller.ask("create", [result(mixed.output[-1])], previous_response_id=mixed.id, background=True)
    assert advice_in(upstream.requests[-1].items) == [True, False]
    assert upstream.refused == []


def test_other_endpoints_pass_untouched(upstreams: Upstreams, callers: Callers, way: str) -> None:
    upstream = upstreams([])
    caller = callers(way, upstream, [])
    body = {"model": "m", "input": "Which?", "tools": [SEARCH]}
    for method, path in [
        ("GET", "/responses/resp_1"),
        ("DELETE", "/responses/resp_1"),
        ("GET", "/responses/resp_1/input_items"),
        ("POST", "/responses/resp_1/cancel"),
        ("POST", "/responses/input_tokens"),
        ("POST", "/responses/compact"),
    ]:
        options: dict[str, Any] = {} if method in ("GET", "DELETE") else {"body": body}
        call = getattr(caller.client, method.lower())
        if method == "GET":
            options = {"options": {"params": {"limit": 2}}}
        got = caller.wait(call(path, cast_to=httpx.Response, **options))
        echo = got.json()
        assert echo["path"] == f"/v1{path}"
        assert echo["method"] == method
        assert echo["body"] == options.get("body")
        assert echo["query"] == ({"limit": ["2"]} if method == "GET" else {})


def test_built_in_tools_and_their_items_pass(upstreams: Upstreams, callers: Callers, way: str) -> None:
    web = {"id": "ws_1", "type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}}
    mcp = {"id": "mcp_1", "type": "mcp_call", "name": "roll", "server_label": "d", "arguments": "{}", "output": "4"}
    tools = [{"type": "web_search"}, {"type": "mcp", "server_label": "d", "server_url": "https://x.test"}, SEARCH]
    for how in ("create", "events"):
        upstream = upstreams(script(
            items([web, function_call("call_critic", "1")]), items([mcp, message("Yes.")], "resp_y"), "Fine."
        ))  # fmt: skip
        caller = callers(way, upstream, [ADVICE])
        answer = caller.ask(how, tools=tools)
        assert [item.type for item in answer.output] == ["web_search_call", "mcp_call", "message"]
        assert upstream.requests[0].body["tools"][:3] == tools
        assert sent(upstream)[1] == web  # with the id and status that the API wants of it
        history = [{"role": "user", "content": "Which river?"}, *dumped(answer), {"role": "user", "content": "Sure?"}]
        caller.ask(how, history, tools=tools)
        assert kinds(sent(upstream)) == [
            "user", "web_search_call", "call", "result", "mcp_call", "assistant", "user"
        ]  # fmt: skip


def test_a_custom_tool_is_the_callers_like_any_other(upstreams: Upstreams, callers: Callers, way: str) -> None:
    patch = {"id": "ctc_1", "type": "custom_tool_call", "call_id": "call_p", "name": "patch", "input": "*** Begin"}
    tools = [{"type": "custom", "name": "patch"}]
    for how in ("create", "events"):
        for by in ("history", "id"):
            upstream = upstreams(script(
                items([patch, function_call("call_critic", "1")]), items([message("Yes.")], "resp_y")
            ))  # fmt: skip
            upstream._kept["resp_x"] = []
            caller = callers(way, upstream, [ADVICE])
            answer = caller.ask(how, tools=tools)
            assert [item.type for item in answer.output] == ["custom_tool_call"]
            output = {"type": "custom_tool_call_output", "call_id": "call_p", "output": "patched"}
            if by == "id":
                caller.ask(how, [output], previous_response_id=answer.id, tools=tools)
                assert kinds(sent(upstream)) == ["custom_tool_call_output", "result"]
            else:
                caller.ask(how, [{"role": "user", "content": "Which river?"}, *dumped(answer), output], tools=tools)
                assert kinds(sent(upstream)) == [
                    "user",
                    "custom_tool_call",
                    "call",
                    "custom_tool_call_output",
                    "result",
                ]
            assert output in sent(upstream)
            assert len(caller.critic.seen) == 1


def test_images_and_files_go_through(upstreams: Upstreams, callers: Callers, way: str) -> None:
    parts: list[Any] = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
        {"type": "input_file", "file_id": "file_1"},
    ]
    upstream = upstreams([SEARCHES, ASK, "A cat."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    history: list[Any] = [{"role": "user", "content": parts}]
    first = caller.ask("create", history)
    back = result(first.output[0], [{"type": "input_image", "image_url": "data:image/png;base64,BBBB"}])
    caller.ask("create", [*history, *dumped(first), back])
    assert sent(upstream)[0] == history[0]
    assert back in sent(upstream)
    assert "call_critic" in offered(upstream)


class River(BaseModel):
    """What the caller wants to read."""

    name: str


def test_parsed_answers_hold_one_document(upstreams: Upstreams, callers: Callers, way: str) -> None:
    thought = {**calls(tool_call("call_critic"), text='{"name": "Rhine"}'), "reasoning_content": "Which one?"}
    upstream = upstreams([thought, '{"name": "Thames"}'] * 2, strict=True)
    caller = callers(way, upstream, lambda state: ADVICE)
    for how in ("parse", "stream"):
        answer = caller.ask(how, text_format=River)
        assert answer.output_parsed == River(name="Thames")
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert upstream.requests[-1].body["text"]["format"]["type"] == "json_schema"


# ---------------------------------------------------------------------- faults of the upstream


def test_refusals_of_the_upstream_arrive_as_they_are(upstreams: Upstreams, callers: Callers, way: str) -> None:
    for how in HOWS:
        upstream = upstreams([failure(429, "slow down", retry_after=1), ASK, failure(400, "no such thing", code="bad")])
        caller = callers(way, upstream, [ADVICE])
        with pytest.raises(openai.RateLimitError, match="slow down") as limited:
            caller.ask(how)
        assert limited.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APIError, match="no such thing"):
            caller.ask(how)


def test_the_critic_is_not_asked_again_when_the_client_tries_again(
    upstreams: Upstreams, callers: Callers, way: str, whole_or_stream: str
) -> None:
    upstream = upstreams([BARE_ASK, failure(500), "The Thames."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    with pytest.raises(openai.APIError):
        caller.ask(whole_or_stream)
    answer = caller.ask(whole_or_stream)
    assert answer.output_text == "The Thames."
    assert len(caller.critic.seen) == 1
    assert advice_in(sent(upstream)) == [True]


def test_a_body_that_breaks_off_keeps_the_advice_for_the_next_attempt(
    upstreams: Upstreams, callers: Callers, way: str
) -> None:
    upstream = upstreams([BARE_ASK, Scripted("The Thames.", die_after=1), "The Thames."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
        caller.ask("create")
    assert caller.ask("create").output_text == "The Thames."
    assert len(caller.critic.seen) == 1


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"output": 7}', b'{"output": [7]}', b'{"output": null}', b"null"])
def test_an_answer_that_is_none_is_passed_on(upstreams: Upstreams, way: str, callers: Callers, body: bytes) -> None:
    upstream = upstreams([Scripted(body=body), BARE_ASK, Scripted(body=body)])
    caller = callers(way, upstream, [ADVICE])
    for _ in range(2):
        got = caller.wait(caller.client.post("/responses", body={"model": "m", "input": "x"}, cast_to=httpx.Response))
        assert got.content == body


@pytest.mark.parametrize(
    "content", [[{"type": "output_text"}], [{"type": "output_text", "text": None}], "text", [7], None]
)
def test_odd_contents_are_nobodys_fault(upstreams: Upstreams, callers: Callers, content: Any) -> None:
    body = {"id": "r", "output": [{"type": "message", "role": "assistant", "content": content}]}
    upstream = upstreams([Scripted(body=body), BARE_ASK, Scripted(body=body)])
    caller = callers("sync", upstream, [ADVICE])
    for _ in range(2):
        got = caller.client.post("/responses", body={"model": "m", "input": "x"}, cast_to=httpx.Response)
        assert got.json()["output"] == body["output"]


def test_a_failed_response_is_passed_on_and_leaves_no_trace(upstreams: Upstreams, callers: Callers, way: str) -> None:
    upstream = upstreams(script(BARE_ASK, items([], "resp_f", status="failed"), "The Thames."), strict=True)
    caller = callers(way, upstream, [ADVICE])
    failed = caller.wait(caller.client.responses.create(model="m", input="Which river?", tools=[SEARCH, REFUND]))
    assert (failed.status, failed.output) == ("failed", [])
    assert caller.ask("create").output_text == "The Thames."
    assert len(caller.critic.seen) == 1


def test_an_incomplete_response_says_so(upstreams: Upstreams, callers: Callers, way: str, whole_or_stream: str) -> None:
    upstream = upstreams(script(BARE_ASK, Scripted("The Th", finish_reason="length")))
    caller = callers(way, upstream, [ADVICE])
    if (
        whole_or_stream == "stream"
    ):  # the client's helper knows of no other end than completion, with or without a critic
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            caller.ask(whole_or_stream)
        return
    answer = caller.ask(whole_or_stream)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text == "The Th"


def test_arguments_that_are_cut_off_are_shown_and_mended_on_the_way_back(
    upstreams: Upstreams, callers: Callers, way: str, whole_or_stream: str
) -> None:
    cut = calls(tool_call("search", '{"query": "Lon'), tool_call("call_critic", '{"a'))
    upstream = upstreams([cut, "Yes.", "No."], strict=True)
    caller = callers(way, upstream, [ADVICE])
    first = caller.ask(whole_or_stream)
    assert first.output[0].arguments == '{"query": "Lon'
    history = [{"role": "user", "content": "Which river?"}, *dumped(first), result(first.output[0], "bad JSON")]
    caller.ask(whole_or_stream, history)
    back = [item["arguments"] for item in sent(upstream) if item.get("type") == "function_call"]
    assert all(isinstance(json.loads(text), dict) for text in back)
    assert "Lon" in back[0]
    assert len(back) == 2


def test_calls_without_ids_and_with_the_same_id_come_apart(upstreams: Upstreams, callers: Callers, way: str) -> None:
    same = Scripted(calls(tool_call("search", id=""), tool_call("search", id="a"), tool_call("call_critic", id="a")),
                    keep_ids=True)  # fmt: skip
    for how in ("create", "events"):
        upstream = upstreams([same, "Yes."])
        caller = callers(way, upstream, [ADVICE])
        first = caller.ask(how)
        ids = [item.call_id for item in first.output]
        assert len(set(ids)) == 2
        assert all(ids)
        caller.ask(how, [{"role": "user", "content": "Which river?"}, *dumped(first), *map(result, first.output)])
        made = [item["call_id"] for item in sent(upstream) if item.get("type") == "function_call"]
        answered = [item["call_id"] for item in sent(upstream) if item.get("type") == "function_call_output"]
        assert made == answered
        assert len(set(made)) == 3


def test_a_server_that_keeps_histories_and_uses_an_id_twice(
    upstreams: Upstreams, callers: Callers, way: str, whole_or_stream: str
) -> None:
    """The caller is given another id, and the server its own."""
    once = Scripted(calls(tool_call("search", id="a")), keep_ids=True)
    mixed = Scripted(calls(tool_call("search", id="a"), tool_call("call_critic", id="a")), keep_ids=True)
    upstream = upstreams([once, mixed, once, "Yes."])
    caller = callers(way, upstream, [ADVICE])
    given: list[Any] = ["Which river?"]
    answer, ids = caller.ask(whole_or_stream), []
    for _ in range(3):
        ids.append(answer.output[0].call_id)
        given = [result(answer.output[0])]
        answer = caller.ask(whole_or_stream, given, previous_response_id=answer.id)
    assert answer.output_text == "Yes."
    assert len(set(ids)) == 3
    answered = [[item["call_id"] for item in sent(upstream, number)] for number in (1, 2, 3)]
    assert answered == [["a"], ["a", "a"], ["a"]]


def test_raw_responses_and_tracing_headers_work(upstreams: Upstreams) -> None:
    upstream = upstreams([ASK, Scripted("Yes.", headers={"x-request-id": "req_7"})])
    client = wrap(OpenAI(base_url=upstream.url, api_key="none"), ScriptedCritic([ADVICE]))
    raw = client.responses.with_raw_response.create(model="m", input="Which?", tools=[SEARCH])
    assert raw.headers["x-request-id"] == "req_7"
    assert_nothing_hidden(json.loads(raw.text))
    assert raw.parse()._request_id == "req_7"
