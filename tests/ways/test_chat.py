"""Chat completions through every way in: what the caller sees, and what the model is sent."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import httpx2
import pytest
from kit import (
    ASK,
    EVERY,
    TOOLS,
    USER,
    Start,
    ask,
    calls,
    critic,
    function,
    look,
    offered,
    refund,
    result,
    roles,
    starter,
    work,
)
from openai import AzureOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel
from upstream import USAGE, Scripted, Upstream, chunk

from caddie_sdk import Budget, wrap
from caddie_sdk.errors import ConfigError
from caddie_sdk.testing import tool_call

Upstreams = Callable[..., Upstream]


# ---------------------------------------------------------------------- one turn


def test_without_a_consultation_nothing_is_changed_but_the_tools_offered(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams(["Done."], strict=True)
    turn = start(upstream, critic()).say(ASK, temperature=0.5)
    assert turn.seen == ("Done.", [], "stop")
    assert turn.usage == USAGE
    assert turn.caddie is None
    body = upstream.chats[0]
    assert body["messages"] == ASK
    assert body["temperature"] == 0.5
    assert offered(body) == ["look", "refund", "call_critic"]


def test_a_turn_that_only_asks_is_answered_on_the_way(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask("c1"), text="Let me ask."), calls(look(id="a1"))], strict=True)
    judge = critic("Look first.")
    turn = start(upstream, judge).say(ASK)
    assert turn.seen == ("Let me ask.", [("a1", "look", '{"order": "7"}')], "tool_calls")
    assert [roles(body) for body in upstream.chats] == ["su", "suCA"]
    asked, answered = upstream.chats[1]["messages"][2:]
    assert asked["content"] == "Let me ask."
    assert answered["tool_call_id"] == "c1"
    assert "Look first." in answered["content"]
    assert [event.kind for event in judge.seen[0].events] == ["task", "proposal"]


def test_usage_is_the_sum_and_the_critics_stands_apart(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask()), "Done."], strict=True)
    turn = start(upstream, critic()).say(ASK)
    assert turn.usage == {
        "prompt_tokens": 200,
        "completion_tokens": 20,
        "total_tokens": 220,
        "prompt_tokens_details": {"cached_tokens": 80},
        "completion_tokens_details": {"reasoning_tokens": 6},
    }
    assert turn.caddie is not None
    assert turn.caddie["agent_calls"] == 2
    assert turn.caddie["remaining"] == 2
    (told,) = turn.caddie["consultations"]
    assert (told["control"], told["trigger"], told["status"], told["step"]) == ("call_critic", "self-call", "ok", 0)
    assert "advice" not in told


def test_the_advice_is_told_to_those_who_want_it(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask()), "Done."], strict=True)
    turn = some(upstream, critic("Look first."), advice=True).say(ASK)
    assert turn.caddie is not None
    assert turn.caddie["consultations"][0]["advice"] == "Look first."


def test_texts_before_and_after_a_consultation_are_parted_by_a_blank_line(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask(), text="First."), calls(ask()), "Second."], strict=True)
    turn = some(upstream, critic()).say(ASK)
    assert turn.seen == ("First.\n\nSecond.", [], "stop")
    assert [roles(body) for body in upstream.chats] == ["su", "suCA", "suCACA"]


# ---------------------------------------------------------------------- over several turns


def test_the_pair_of_a_mixed_turn_is_put_back_beside_the_results(start: Start, upstreams: Upstreams) -> None:
    mixed = calls(look("1", "a1"), ask("c1"), look("2", "a2"), text="Both.")
    upstream = upstreams([mixed, "Done.", "More."], strict=True)
    judge = critic("Beware.")
    caller = start(upstream, judge)
    turn = caller.say(ASK)
    assert [call["id"] for call in turn.calls] == ["a1", "a2"]
    assert len(judge.seen) == 1
    history = [*ASK, turn.message, result(turn.calls[0], "one"), result(turn.calls[1], "two")]
    done = caller.say(history)
    assert done.seen == ("Done.", [], "stop")
    assert roles(upstream.chats[1]) == "suMtAt"
    told = upstream.chats[1]["messages"][2:]
    assert [call["id"] for call in told[0]["tool_calls"]] == ["a1", "c1", "a2"]
    assert [message["content"] for message in (told[1], told[3])] == ["one", "two"]
    assert "Beware." in told[2]["content"]
    caller.say([*history, done.message, {"role": "user", "content": "And now?"}])
    assert roles(upstream.chats[2]) == "suMtAtau"
    assert upstream.chats[2]["messages"][2:6] == told


def test_advice_stays_in_view_on_later_turns(start: Start, upstreams: Upstreams) -> None:
    script = [calls(ask("c1")), calls(look(id="a1")), "Done.", calls(ask("c2")), "Bye."]
    upstream = upstreams(script, strict=True)
    caller = start(upstream, critic("Look first.", "Say bye."))
    history = work(caller, ASK, lambda call: "found")
    history.append({"role": "user", "content": "Thanks."})
    last = caller.say(history)
    assert last.content == "Bye."
    assert [roles(body) for body in upstream.chats] == ["su", "suCA", "suCAat", "suCAatau", "suCAatauCA"]
    upstream.raise_if_unused()


def test_a_guarded_call_waits_for_advice(start: Start, upstreams: Upstreams) -> None:
    script = [calls(look(id="a1"), refund(id="r1")), calls(refund(id="r2")), "Done."]
    upstream = upstreams(script, strict=True)
    caller = start(upstream, critic("Do it."), protocol="guarded:refund;self_call=no")
    turn = caller.say(ASK)
    assert [call["id"] for call in turn.calls] == ["a1"]
    history = [*ASK, turn.message, result(turn.calls[0])]
    again = caller.say(history)
    assert [call["id"] for call in again.calls] == ["r2"]
    assert roles(upstream.chats[1]) == "suattCA"
    assert "Not run yet" in upstream.chats[1]["messages"][4]["content"]
    assert "call_critic" not in offered(upstream.chats[0])
    caller.say([*history, again.message, result(again.calls[0], "refunded")])
    assert roles(upstream.chats[2]) == "suattCAat"


def test_a_guarded_call_alone_is_answered_on_the_way(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(refund(id="r1"), text="Refunding."), calls(refund(id="r2"))], strict=True)
    turn = some(upstream, critic(), protocol="guarded:refund").say(ASK)
    assert turn.seen == ("Refunding.", [("r2", "refund", '{"order": "7"}')], "tool_calls")
    assert roles(upstream.chats[1]) == "suatCA"


def test_calls_keep_their_order_when_a_guarded_one_comes_first(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask("c1")), calls(refund(id="r1"), look(id="a1")), "Done."], strict=True)
    caller = some(upstream, critic(), protocol="guarded:refund")
    turn = caller.say(ASK)
    assert [call["id"] for call in turn.calls] == ["r1", "a1"]
    caller.say([*ASK, turn.message, *map(result, turn.calls)])
    assert roles(upstream.chats[2]) == "suCAatt"


def test_a_protocol_consults_before_the_agent_acts(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(look(id="a1")), "Done.", "Bye."], strict=True)
    caller = start(upstream, critic("One.", "Two.", "Three."), protocol="fixed:0,1")
    history = work(caller, ASK, lambda call: "found")
    assert [roles(body) for body in upstream.chats] == ["suCA", "suCAatCA"]
    assert offered(upstream.chats[0]) == ["look", "refund"]
    caller.say([*history, {"role": "user", "content": "Thanks."}])
    assert roles(upstream.chats[2]) == "suCAatCAauCA"


def test_repeats_are_counted_across_requests(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(look()), calls(look()), calls(look()), "Done."], strict=True)
    history = work(some(upstream, critic(), protocol="guarded:;repeats=2;self_call=no"), ASK, lambda call: "nothing")
    assert [roles(body) for body in upstream.chats] == ["su", "suat", "suatatCA", "suatatCAatCA"]
    assert len(history) == 9


# ---------------------------------------------------------------------- limits


def test_the_tool_is_withdrawn_when_the_budget_is_spent(some: Start, upstreams: Upstreams) -> None:
    script = [calls(ask()), calls(ask()), calls(look(id="a1")), "Done.", "Bye."]
    upstream = upstreams(script, strict=True)
    caller = some(upstream, critic(), budget=Budget(max_uses=2))
    history = work(caller, ASK, lambda call: "found")
    offers = ["call_critic" in offered(body) for body in upstream.chats]
    assert offers == [True, True, False, False]
    assert "No consultations are left." in upstream.chats[2]["messages"][-1]["content"]
    caller.say([*history, {"role": "user", "content": "Thanks."}])
    assert "call_critic" in offered(upstream.chats[4])


def test_the_limit_of_a_conversation_outlives_its_turns(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask()), "Done.", "Bye."], strict=True)
    caller = some(upstream, critic(), budget=Budget(session_max_uses=1))
    turn = caller.say(ASK)
    caller.say([*ASK, turn.message, {"role": "user", "content": "Thanks."}])
    assert "call_critic" not in offered(upstream.chats[2])


def test_an_agent_that_calls_only_the_critic_comes_to_an_end(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams(lambda body: calls(ask()), strict=True, refuse=["user-after-tool", "alternating"])
    judge = critic()
    caller = start(upstream, judge)
    turn = caller.say(ASK)
    assert len(judge.seen) == 3
    assert len(upstream.chats) == 7
    assert turn.seen == ("", [], "stop")
    answered = {"role": "assistant", "content": turn.content or "(nothing)"}
    before = len(upstream.chats)
    caller.say([*ASK, answered, {"role": "user", "content": "Well?"}])
    assert len(upstream.chats) > before
    assert not upstream.refused


def test_two_control_tools_have_a_critic_each(some: Start, upstreams: Upstreams) -> None:
    script = [calls(ask("c1"), tool_call("request_feedback", {}, "f1")), "Done."]
    upstream = upstreams(script, strict=True)
    one, two = critic("From the critic."), critic("From the mirror.")
    turn = some(upstream, one, feedback=two).say(ASK)
    assert turn.content == "Done."
    assert offered(upstream.chats[0]) == ["look", "refund", "call_critic", "request_feedback"]
    told = {message["tool_call_id"]: message["content"] for message in upstream.chats[1]["messages"][3:]}
    assert "From the critic." in told["c1"]
    assert "From the mirror." in told["f1"]
    assert turn.caddie is not None
    assert [one["control"] for one in turn.caddie["consultations"]] == ["call_critic", "request_feedback"]


# ---------------------------------------------------------------------- what a request may say


@pytest.mark.parametrize("choice", ["none", {"type": "function", "function": {"name": "look"}}])
def test_a_choice_that_leaves_no_room_offers_no_critic(some: Start, upstreams: Upstreams, choice: Any) -> None:
    upstream = upstreams(["Done."], strict=True)
    some(upstream, critic()).say(ASK, tool_choice=choice)
    assert offered(upstream.chats[0]) == ["look", "refund"]
    assert upstream.chats[0]["tool_choice"] == choice


def test_a_required_call_may_be_one_of_the_critic(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask()), calls(look())], strict=True)
    turn = some(upstream, critic()).say(ASK, tool_choice="required", parallel_tool_calls=False)
    assert len(turn.calls) == 1
    assert [body["tool_choice"] for body in upstream.chats] == ["required"] * 2
    assert [body["parallel_tool_calls"] for body in upstream.chats] == [False] * 2


def test_an_agent_without_tools_may_ask(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask()), "Done."], strict=True)
    assert some(upstream, critic(), budget=Budget(max_uses=1)).say(ASK, tools=None).content == "Done."
    assert offered(upstream.chats[0]) == ["call_critic"]
    assert "tools" not in upstream.chats[1]


def test_several_choices_pass_without_a_critic(start: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask("c1")), "Early.", Scripted("One.", more=["Two."])], strict=True)
    caller = start(upstream, critic("Beware."))
    first = caller.say(ASK)
    history = [*ASK, first.message, {"role": "user", "content": "Which?"}]
    if caller.mode == "create":
        wanted = {"model": "m", "messages": history, "n": 2}
        done = caller.client.chat.completions.create(**wanted)
        done = caller.run(_awaited(done)) if hasattr(caller, "run") else done
        assert [choice.message.content for choice in done.choices] == ["One.", "Two."]
    else:
        turn = caller.say(history, n=2)
        spoken: dict[int, str] = {}
        for one in turn.chunks:
            for choice in one.choices:
                spoken[choice.index] = spoken.get(choice.index, "") + (choice.delta.content or "")
        assert spoken == {0: "One.", 1: "Two."}
        assert turn.usage == USAGE
    assert roles(upstream.chats[2]) == "suCAau"
    assert "call_critic" not in offered(upstream.chats[2])


async def _awaited(done: Any) -> Any:
    return await done


def test_the_text_of_a_hidden_turn_stays_out_of_json(some: Start, upstreams: Upstreams) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    upstream = upstreams([calls(ask("c1"), text="{}"), '{"order": 7}', "{}"], strict=True)
    caller = some(upstream, critic("Beware."))
    turn = caller.say(ASK, response_format=form)
    assert turn.content == '{"order": 7}'
    assert upstream.chats[1]["messages"][2]["content"] == "{}"
    caller.say([*ASK, turn.message, USER], response_format=form)
    assert roles(upstream.chats[2]) == "suCAau"


def test_a_hidden_text_before_calls_stays_out_of_json_too(some: Start, upstreams: Upstreams) -> None:
    form = {"type": "json_object"}
    upstream = upstreams([calls(ask("c1"), text="{}"), calls(look(id="a1")), "{}"], strict=True)
    caller = some(upstream, critic("Beware."))
    turn = caller.say(ASK, response_format=form)
    assert turn.seen[0] == ""
    caller.say([*ASK, turn.message, result(turn.calls[0])], response_format=form)
    assert roles(upstream.chats[2]) == "suCAat"


def test_log_probabilities_cover_the_visible_text(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask(), text="First."), "Second."], strict=True)
    turn = some(upstream, critic()).say(ASK, logprobs=True)
    chosen = turn.chunks or [turn.completion]
    entries = [
        entry
        for one in chosen
        for choice in one.choices
        if choice.logprobs and choice.logprobs.content
        for entry in choice.logprobs.content
    ]
    assert "".join(entry.token for entry in entries) == "First.Second."


def test_unknown_fields_survive_the_round_trip(start: Start, upstreams: Upstreams) -> None:
    signed = {**look(id="a1"), "extra_content": {"google": {"thought_signature": "c2ln"}}}
    hidden = {**ask("c1"), "extra_content": {"google": {"thought_signature": "aGlk"}}}
    reply = {**calls(signed, hidden), "provider_note": "kept"}
    upstream = upstreams([reply, "Done."], strict=True)
    caller = start(upstream, critic())
    turn = caller.say(ASK)
    assert turn.calls[0]["extra_content"] == signed["extra_content"]
    assert turn.message["provider_note"] == "kept"
    user = {**USER, "name": "ada"}
    caller.say([ASK[0], USER, turn.message, result(turn.calls[0])])
    told = upstream.chats[1]["messages"][2]
    assert [call["extra_content"] for call in told["tool_calls"]] == [signed["extra_content"], hidden["extra_content"]]
    assert told["provider_note"] == "kept"
    assert user["name"] == "ada"


def test_the_callers_own_messages_pass_as_they_are(some: Start, upstreams: Upstreams) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    said = [
        {"role": "developer", "content": "Be brief.", "name": "dev"},
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image], "name": "ada"},
        {"role": "assistant", "content": "A picture.", "refusal": None, "x_note": 1},
        {"role": "system", "content": "It is late."},
        {"role": "user", "content": "Really?"},
    ]
    upstream = upstreams([calls(ask("c1")), "Yes."])
    assert some(upstream, critic()).say(said).content == "Yes."
    assert upstream.chats[0]["messages"] == said
    assert upstream.chats[1]["messages"][:5] == said


def test_a_retired_functions_request_passes_as_it_is(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams(["Done."], strict=True)
    functions = [TOOLS[0]["function"]]
    assert some(upstream, critic()).say(ASK, tools=None, functions=functions).content == "Done."
    assert upstream.chats[0]["functions"] == functions
    assert "tools" not in upstream.chats[0]


def test_a_tool_with_the_name_of_ours_is_the_callers(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask("c1"))], strict=True)
    turn = some(upstream, critic()).say(ASK, tools=[function("call_critic")])
    assert [call["id"] for call in turn.calls] == ["c1"]


def test_tools_whose_names_begin_like_ours_are_the_callers(some: Start, upstreams: Upstreams) -> None:
    tools = [function("call"), function("call_critic_now")]
    upstream = upstreams([calls(tool_call("call", {}, "a1"), tool_call("call_critic_now", {}, "a2"))], strict=True)
    turn = some(upstream, critic()).say(ASK, tools=tools)
    assert [call["function"]["name"] for call in turn.calls] == ["call", "call_critic_now"]


def test_reasoning_is_shown_and_told_again(some: Start, upstreams: Upstreams) -> None:
    hidden = {**calls(ask("c1")), "reasoning_content": "I am unsure."}
    upstream = upstreams([hidden, {"content": "Done.", "reasoning_content": "Now I know."}, "Bye."], strict=True)
    caller = some(upstream, critic())
    turn = caller.say(ASK)
    assert turn.message["reasoning_content"] == "I am unsure.\n\nNow I know."
    assert upstream.chats[1]["messages"][2]["reasoning_content"] == "I am unsure."
    bare = {"role": "assistant", "content": "Done."}
    caller.say([*ASK, bare, USER])
    assert roles(upstream.chats[2]) == "suCAau"


def test_custom_tools_pass_without_a_critic(some: Start, upstreams: Upstreams) -> None:
    call = {"id": "x1", "type": "custom", "custom": {"name": "run", "input": "print(1)"}}
    tools = [*TOOLS, {"type": "custom", "custom": {"name": "run"}}]
    chunks = [chunk({"role": "assistant", "tool_calls": [{"index": 0, **call}]}), chunk({}, "tool_calls")]
    body = {
        "choices": [{"index": 0, "message": {"role": "assistant", "tool_calls": [call]}, "finish_reason": "tool_calls"}]
    }
    upstream = upstreams(lambda body_: Scripted(raw_chunks=chunks) if body_.get("stream") else Scripted(body=body))
    caller = some(upstream, critic())
    if caller.mode == "create":
        data = caller.say(ASK, tools=tools).calls[0]
        assert data["custom"] == call["custom"]
    else:
        pieces = [one.choices[0].delta.tool_calls for one in caller.say(ASK, tools=tools, mode="stream").chunks]
        assert pieces[0][0].model_extra["custom"] == call["custom"]
    assert [tool["type"] for tool in upstream.chats[0]["tools"]] == ["function", "function", "custom"]


# ---------------------------------------------------------------------- the client is the client


class Verdict(BaseModel):
    """What an application wants to read."""

    order: int
    refund: bool


@pytest.fixture(params=["sync-create", "proxy-create"])
def plain(request: pytest.FixtureRequest) -> Iterator[Start]:
    with starter(request.param) as made:
        yield made


def test_raw_and_streamed_responses_are_the_clients_own(plain: Start, upstreams: Upstreams) -> None:
    replies = [
        Scripted(reply, headers={"x-request-id": f"r{n}"}) for n, reply in enumerate([calls(ask()), "Done."] * 2)
    ]
    client = plain(upstreams(replies, strict=True), critic()).client
    wanted: Any = {"model": "m", "messages": ASK}
    raw = client.chat.completions.with_raw_response.create(**wanted)
    assert raw.headers["x-request-id"] == raw.request_id == "r1"
    assert raw.parse().choices[0].message.content == "Done."
    with client.chat.completions.with_streaming_response.create(**wanted) as response:
        assert response.headers["x-request-id"] == "r3"
        assert json.loads(b"".join(response.iter_bytes()))["caddie"]["agent_calls"] == 2


def test_answers_are_parsed_into_models(plain: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask(), text="{}"), '{"order": 7, "refund": true}'] * 2, strict=True)
    client = plain(upstream, critic()).client
    wanted: Any = {"model": "m", "messages": ASK, "response_format": Verdict}
    parsed = client.chat.completions.parse(**wanted)
    assert parsed.choices[0].message.parsed == Verdict(order=7, refund=True)
    assert upstream.chats[0]["response_format"]["type"] == "json_schema"
    with client.chat.completions.stream(**wanted) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Verdict(order=7, refund=True)


def test_options_keep_the_wrapping_and_what_it_knows(upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask()), "Done.", "Bye."], strict=True)
    with starter("sync-create") as start:
        caller = start(upstream, critic())
        other = caller.client.with_options(timeout=5, default_headers={"x-own": "1"})
        assert isinstance(other, type(caller.client))
        turn = caller.say(ASK, client=other)
        caller.say([*ASK, turn.message, USER])
    assert [request.headers.get("x-own") for request in upstream.requests] == ["1", "1", None]
    assert roles(upstream.chats[2]) == "suCAau"


@pytest.mark.parametrize(
    "options", [{"extra_headers": {"X-Caddie": "off"}}, {"extra_body": {"caddie": {"enabled": False}}}]
)
def test_a_request_may_do_without_a_critic(some: Start, upstreams: Upstreams, options: dict[str, Any]) -> None:
    upstream = upstreams(["Done."], strict=True)
    some(upstream, critic(), protocol="fixed:0").say(ASK, **options)
    assert roles(upstream.chats[0]) == "su"
    assert offered(upstream.chats[0]) == ["look", "refund"]
    assert "caddie" not in upstream.chats[0]
    assert not any(name.startswith("x-caddie") for name in upstream.requests[0].headers)


def test_an_option_that_cannot_be_is_a_bad_request(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([])
    with pytest.raises(BadRequestError, match="max_uses"):
        some(upstream, critic()).say(ASK, extra_body={"caddie": {"max_uses": "many"}})
    assert not upstream.requests


def test_the_wrapped_client_stays_as_it_was(upstreams: Upstreams) -> None:
    upstream = upstreams(["Done."], strict=True)
    bare = OpenAI(base_url=upstream.url, api_key="k", organization="o", max_retries=7, timeout=3)
    wrapped = wrap(bare, critic())
    assert (wrapped.api_key, wrapped.organization, wrapped.max_retries, wrapped.timeout) == ("k", "o", 7, 3)
    bare.chat.completions.create(model="m", messages=ASK, tools=TOOLS)
    assert offered(upstream.chats[0]) == ["look", "refund"]
    assert wrapped.embeddings.create(model="m", input=["ab"]).data[0].embedding == [2, 0]
    assert [model.id for model in wrapped.models.list()] == ["scripted"]
    wrapped.close()


@pytest.mark.parametrize("library", [httpx, httpx2], ids=lambda library: str(library.__name__))
def test_a_client_of_ones_own_keeps_its_settings(upstreams: Upstreams, library: Any) -> None:
    upstream, signed = upstreams([calls(ask()), "Done."], strict=True), []
    own = library.Client(
        params={"q": "1"}, headers={"x-own": "2"}, event_hooks={"request": [lambda request: signed.append(request.url)]}
    )
    with wrap(OpenAI(base_url=upstream.url, api_key="k", http_client=own), critic()) as client:
        client.chat.completions.create(model="m", messages=ASK)
    assert [(request.query, request.headers["x-own"]) for request in upstream.requests] == [({"q": ["1"]}, "2")] * 2
    assert len(signed) == 2


def test_azures_client_is_one_too(upstreams: Upstreams) -> None:
    class Azure(Upstream):
        async def _plan(self, request: Any) -> Any:
            return await self._chat(request.body)

    with Azure([calls(ask()), "Done."], strict=True) as upstream:
        bare = AzureOpenAI(azure_endpoint=upstream.url.removesuffix("/v1"), api_key="k", api_version="v")
        with wrap(bare, critic()) as client:
            assert client.chat.completions.create(model="m", messages=ASK).choices[0].message.content == "Done."
        assert {request.path for request in upstream.requests} == {"/openai/deployments/m/chat/completions"}


def test_a_client_lives_as_long_as_what_wraps_it(upstreams: Upstreams) -> None:
    upstream = upstreams(["Done."], strict=True)
    wrapped = wrap(OpenAI(base_url=upstream.url, api_key="k"), critic())
    gc.collect()
    assert wrapped.chat.completions.create(model="m", messages=ASK).choices[0].message.content == "Done."
    wrapped.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no client", critic()), "OpenAI or AsyncOpenAI client"),
        ((OpenAI(api_key="k"),), "needs a critic"),
        ((OpenAI(api_key="k"), "no critic"), "critique"),
        ((OpenAI(api_key="k"), type(critic())), "critique"),
    ],
)
def test_what_cannot_be_wrapped_is_told(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrap(*arguments)


@pytest.mark.parametrize("setting", [{"protocol": "now"}, {"on_error": "shrug"}, {"ledger": "/proc/none/x"}])
def test_a_setting_that_cannot_be_is_told(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        wrap(OpenAI(api_key="k"), critic(), **setting)


def test_every_way_gives_the_same_turns(upstreams: Upstreams) -> None:
    script = [
        calls(ask("c1"), text="Hm."),
        calls(look("1", "a1"), ask("c2"), refund("1", "r1"), text="So."),
        calls(refund("1", "r2")),
        calls(look("1", "a1"), look("2", ""), text="Again."),
        "Done.",
    ]
    seen: dict[str, Any] = {}
    for name in EVERY:
        upstream = upstreams(script, strict=True)
        with starter(name) as start:
            history = work(start(upstream, critic(), protocol="guarded:refund"), ASK, lambda call: call["id"])
        told = [(m["role"], m.get("content"), m.get("tool_calls"), m.get("tool_call_id")) for m in history]
        bodies = [{k: v for k, v in body.items() if not k.startswith("stream")} for body in upstream.chats]
        seen[name] = told, bodies
        upstream.raise_if_unused()
    first = seen[EVERY[0]]
    assert len(first[1]) == 5
    for name, one in seen.items():
        assert one == first, name
