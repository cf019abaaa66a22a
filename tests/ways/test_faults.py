"""Faults, on either side and in between: nobody loses more than with a bare client, and nothing is asked twice."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from kit import (
    ASK,
    TOOLS,
    USER,
    AsyncCaller,
    Start,
    ask,
    calls,
    critic,
    look,
    offered,
    refund,
    result,
    roles,
    starter,
)
from openai import AsyncOpenAI, OpenAI
from test_chat_streams import as_stream
from upstream import Scripted, Upstream, failure

from caddie_critics import EndpointCritic
from caddie_sdk import Budget, Critique, wrap
from caddie_sdk.relay.flow import Answer, Ask, Emit, Read, Relay, Send
from caddie_sdk.relay.ledger import MemoryLedger
from caddie_sdk.testing import ScriptedCritic
from caddie_sdk.usage import Usage

Upstreams = Callable[..., Upstream]
ADVICE = "Analysis: as seen\nAdvices for next steps: look first"


@pytest.fixture(params=["sync-stream", "async-stream", "proxy-stream"])
def streaming(request: pytest.FixtureRequest) -> Iterator[Start]:
    with starter(request.param) as made:
        yield made


# ---------------------------------------------------------------------- the critic


class Dripping:
    """A critic that never comes to an end."""

    def critique(self, state: Any) -> Critique:
        time.sleep(0.3)
        return Critique(status="timeout")

    async def acritique(self, state: Any) -> Critique:
        await asyncio.sleep(30)
        return Critique("never", "never")


class Garbled:
    """A critic that returns no critique."""

    def critique(self, state: Any) -> Any:
        return {"advice": "no"}

    async def acritique(self, state: Any) -> Any:
        return None


FAILING: dict[str, tuple[Any, str]] = {
    "raises": (ScriptedCritic(lambda state: RuntimeError("secret of the critic")), "failed"),
    "down": (ScriptedCritic(lambda state: Critique(status="unavailable")), "unavailable"),
    "slow": (Dripping(), "timeout"),
    "garbled": (Garbled(), "failed"),
    "empty": (ScriptedCritic(lambda state: Critique("x", " ")), "malformed"),
}


@pytest.mark.parametrize("fault", FAILING)
def test_a_critic_that_fails_stops_nobody(some: Start, upstreams: Upstreams, fault: str) -> None:
    judge, status = FAILING[fault]
    upstream = upstreams([calls(ask("c1")), "Done."], strict=True)
    turn = some(upstream, judge, budget=Budget(timeout=0.3)).say(ASK)
    assert turn.content == "Done."
    assert turn.caddie is not None
    assert turn.caddie["consultations"][0]["status"] == status
    told = upstream.chats[1]["messages"][-1]["content"]
    assert "Go on with your own judgement" in told
    assert "secret" not in told


@pytest.mark.parametrize("fault", ["raises", "garbled"])
def test_whoever_wants_an_error_gets_one_that_is_not_tried_again(some: Start, upstreams: Upstreams, fault: str) -> None:
    upstream = upstreams([calls(ask("c1"))], strict=True)
    caller = some(upstream, FAILING[fault][0], on_error="raise", client={"max_retries": 2})
    with pytest.raises(openai.APIError) as raised:
        caller.say(ASK)
    assert len(upstream.chats) == 1
    assert "the consultation failed" in str(raised.value)
    if caller.mode == "create":
        assert isinstance(raised.value, openai.APIStatusError)
        assert raised.value.status_code == 424
        assert raised.value.type == "consultation_failed"


def test_a_failed_forced_consultation_raises_before_anything_is_sent(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([])
    with pytest.raises(openai.APIStatusError) as raised:
        some(upstream, FAILING["raises"][0], protocol="fixed:0", on_error="raise").say(ASK)
    assert raised.value.status_code == 424
    assert not upstream.requests


def test_a_critic_over_http_that_is_down_stops_nobody(some: Start, upstreams: Upstreams) -> None:
    served = upstreams(lambda body: failure(503), models=["critic"])
    upstream = upstreams([calls(ask("c1")), "Done."], strict=True)
    judge = EndpointCritic(served.url, model="critic", pack="general")
    turn = some(upstream, judge, budget=Budget(timeout=0.5)).say(ASK)
    assert turn.content == "Done."
    assert turn.caddie is not None
    assert turn.caddie["consultations"][0]["status"] in ("unavailable", "timeout")


def test_a_critic_asked_again_without_new_evidence_is_asked_as_often_as_the_budget_says(
    some: Start, upstreams: Upstreams
) -> None:
    upstream = upstreams(lambda body: calls(ask()) if "call_critic" in offered(body) else "Done.", strict=True)
    judge = critic()
    assert some(upstream, judge, budget=Budget(max_uses=5)).say(ASK).content == "Done."
    assert len(judge.seen) == 5
    assert [state.remaining for state in judge.seen] == [4, 3, 2, 1, 0]


# ---------------------------------------------------------------------- histories that callers edit


@pytest.fixture
def talk(some: Start, upstreams: Upstreams) -> tuple[Any, Upstream, list[Any]]:
    """A conversation with a mixed turn and a hidden one, and what its caller knows of it."""
    script = [calls(look("1", "a1"), ask("c1"), look("2", "a2"), text="Both."), calls(ask("c2")), "Done."]
    upstream = upstreams([*script, "Next.", "Next."], strict=True)
    caller = some(upstream, critic("Beware.", "Be brief."))
    first = caller.say(ASK)
    history = [*ASK, first.message, result(first.calls[0], "one"), result(first.calls[1], "two")]
    history.append(caller.say(history).message)
    return caller, upstream, [*history, {"role": "user", "content": "And now?"}]


def last(upstream: Upstream) -> dict[str, Any]:
    assert not upstream.refused
    return upstream.chats[-1]


def test_the_same_history_has_both_pairs(talk: Any) -> None:
    caller, upstream, history = talk
    caller.say(history)
    assert roles(last(upstream)) == "suMtAtCAau"


def test_an_edited_task_has_none(talk: Any) -> None:
    caller, upstream, history = talk
    caller.say([history[0], {"role": "user", "content": "Return order 8."}, *history[2:]])
    assert roles(last(upstream)) == "suattau"


def test_another_system_prompt_has_none(talk: Any) -> None:
    caller, upstream, history = talk
    caller.say([{"role": "system", "content": "You are a pirate."}, *history[1:]])
    assert roles(last(upstream)) == "suattau"


def test_a_changed_result_keeps_what_came_before_it(talk: Any) -> None:
    caller, upstream, history = talk
    edited = [*history]
    edited[4] = {**edited[4], "content": "three"}
    caller.say(edited)
    assert roles(last(upstream)) == "suMtAtau"
    assert [m["content"] for m in last(upstream)["messages"] if m["role"] == "tool"][2] == "three"


def test_swapped_results_still_answer_their_own_calls(talk: Any) -> None:
    caller, upstream, history = talk
    caller.say([*history[:3], history[4], history[3], *history[5:]])
    assert roles(last(upstream)) == "suMtAtau"
    told = {m["tool_call_id"]: m["content"] for m in last(upstream)["messages"] if m["role"] == "tool"}
    assert (told["a1"], told["a2"]) == ("one", "two")


def test_an_edited_answer_keeps_what_came_before_it(talk: Any) -> None:
    caller, upstream, history = talk
    caller.say([*history[:5], {"role": "assistant", "content": "Not done."}, history[6]])
    assert roles(last(upstream)) == "suMtAtau"


def test_a_dropped_turn_takes_its_advice_along(talk: Any) -> None:
    caller, upstream, history = talk
    caller.say([*history[:2], *history[5:]])
    assert roles(last(upstream)) == "suau"


def test_a_dropped_result_passes_as_it_is(talk: Any) -> None:
    caller, upstream, history = talk
    edited = [*history[:4], *history[5:]]
    with pytest.raises(openai.BadRequestError):
        caller.say(edited)
    assert upstream.chats[-1]["messages"] == edited
    assert "call_critic" not in offered(upstream.chats[-1])


def test_an_earlier_point_has_the_advice_of_its_time(talk: Any) -> None:
    caller, upstream, history = talk
    assert caller.say(history[:5]).content == "Next."
    assert roles(last(upstream)) == "suMtAt"
    assert caller.say(history[:2]).content == "Next."
    assert roles(last(upstream)) == "su"


def test_two_branches_of_one_history_keep_apart(some: Start, upstreams: Upstreams) -> None:
    script = [calls(ask("c1")), "One.", calls(ask("c2")), "Two.", "x", "y"]
    upstream = upstreams(script, strict=True)
    caller = some(upstream, critic("First.", "Second."))
    branches = [caller.say(ASK).message for _ in range(2)]
    for branch in branches:
        caller.say([*ASK, branch, USER])
    for body, advice in zip(upstream.chats[4:], ("First.", "Second."), strict=True):
        assert roles(body) == "suCAau"
        assert advice in body["messages"][3]["content"]


def rewrite(turn: Any) -> dict[str, Any]:
    """What a client makes of a turn that reads it into objects of its own."""
    made = [
        {
            "id": call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1),
            },
        }
        for call in turn.calls
    ]
    return {"role": "assistant", "content": turn.content or "", **({"tool_calls": made} if made else {})}


def test_clients_that_write_turns_anew_keep_their_advice(some: Start, upstreams: Upstreams) -> None:
    mixed = {**calls(look("1", "a1"), ask("c1")), "content": None, "reasoning_content": "Hm."}
    upstream = upstreams([mixed, {"content": "Done.\n", "reasoning_content": "Ah."}, "Bye."], strict=True)
    caller = some(upstream, critic())
    first = caller.say(ASK)
    history = [*ASK, rewrite(first), result(first.calls[0])]
    second = caller.say(history)
    caller.say([*history, {"role": "assistant", "content": (second.content or "").strip()}, USER])
    assert [roles(body) for body in upstream.chats] == ["su", "suMtA", "suMtAau"]


def test_clients_that_part_text_from_calls_are_understood(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(look("1", "a1"), ask("c1"), text="Both."), "Done.", "Bye."], strict=True)
    caller = some(upstream, critic())
    turn = caller.say(ASK)
    parted = [{"role": "assistant", "content": "Both."}, {**turn.message, "content": None}]
    history = [*ASK, *parted, result(turn.calls[0])]
    done = caller.say(history)
    assert done.content == "Done."
    assert roles(upstream.chats[1]) == "suMtA"
    caller.say([*history, done.message, USER])
    assert roles(upstream.chats[2]) == "suMtAau"


def test_callers_with_different_keys_share_nothing(upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask("c1")), "Done.", "Bye.", "Bye."], strict=True)
    with starter("proxy-create") as start:
        caller = start(upstream, critic())
        turn = caller.say(ASK)
        history = [*ASK, turn.message, USER]
        caller.say(history, client=caller.client.with_options(api_key="another"))
        assert roles(upstream.chats[2]) == "suau"
        caller.say(history)
        assert roles(upstream.chats[3]) == "suCAau"
        assert [request.headers["authorization"] for request in upstream.requests[2:]] == [
            "Bearer another",
            "Bearer none",
        ]


def test_a_ledger_that_has_forgotten_costs_advice_and_nothing_else(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(look("1", "a1"), ask("c1")), "Done.", "Again."], strict=True)
    caller = some(upstream, critic(), ledger=MemoryLedger(max_bytes=0))
    turn = caller.say(ASK)
    history = [*ASK, turn.message, result(turn.calls[0])]
    assert caller.say(history).content == "Done."
    assert caller.say(history).content == "Again."
    assert roles(upstream.chats[2]) == "suat"


# ---------------------------------------------------------------------- the upstream


@pytest.mark.parametrize("rule", ["user-after-tool", "alternating", "second-system"])
def test_what_we_insert_breaks_no_servers_rule(some: Start, upstreams: Upstreams, rule: str) -> None:
    script = [calls(ask(), text="Hm."), calls(refund(id="r1")), calls(refund(id="r2")), "Done.", calls(ask()), "Bye."]
    upstream = upstreams(script, strict=True, refuse=[rule])
    caller = some(upstream, critic(), protocol="guarded:refund")
    turn = caller.say(ASK)
    history = [*ASK, turn.message, result(turn.calls[0])]
    done = caller.say(history)
    caller.say([*history, done.message, USER])
    assert not upstream.refused
    upstream.raise_if_unused()


@pytest.mark.parametrize("rule", ["user-after-tool", "alternating"])
@pytest.mark.parametrize("said", ["", None])
def test_a_turn_that_ended_in_refusals_breaks_no_servers_rule(
    some: Start, upstreams: Upstreams, rule: str, said: str | None
) -> None:
    upstream = upstreams(lambda body: calls(ask()), strict=True, refuse=[rule])
    caller = some(upstream, critic())
    turn = caller.say(ASK)
    assert turn.seen == ("", [], "stop")
    caller.say([*ASK, {"role": "assistant", "content": said}, USER])
    assert not upstream.refused
    assert roles(upstream.chats[7])[:4] == "suCA"


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("hidden", [False, True])
def test_refusals_pass_unchanged(some: Start, upstreams: Upstreams, status: int, hidden: bool) -> None:
    fault = failure(status, "not today", code="some_code", retry_after=7)
    upstream = upstreams([*([calls(ask())] if hidden else []), fault])
    caller = some(upstream, critic())
    with pytest.raises(openai.APIError) as raised:
        caller.say(ASK)
    error = raised.value
    assert error.body["message"] == "not today"  # type: ignore[index, call-overload]
    assert error.code == "some_code"
    if not (hidden and caller.mode != "create"):
        assert isinstance(error, openai.APIStatusError)
        assert error.status_code == status
        assert error.response.headers["retry-after"] == "7"


def test_an_error_that_is_no_json_passes_too(some: Start, upstreams: Upstreams) -> None:
    page = Scripted(status=502, body=b"<h1>Bad gateway</h1>", headers={"content-type": "text/html"})
    with pytest.raises(openai.InternalServerError) as raised:
        some(upstreams([page]), critic()).say(ASK)
    assert raised.value.response.headers["content-type"] == "text/html"
    assert raised.value.response.text == "<h1>Bad gateway</h1>"


@pytest.mark.parametrize("fault", [failure(429, retry_after=0.01), failure(500), Scripted(status=0)])
def test_the_clients_own_retries_work_and_ask_the_critic_once(
    some: Start, upstreams: Upstreams, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    upstream = upstreams([fault, calls(ask("c1"), text="Hm."), "Done."], strict=True)
    judge = critic()
    turn = some(upstream, judge, client={"max_retries": 1}).say(ASK)
    assert turn.content == "Hm.\n\nDone."
    assert len(judge.seen) == 1


def _failing(action: Callable[[], Any]) -> BaseException:
    with pytest.raises((openai.APIError, httpx.HTTPError)) as raised:
        action()
    return raised.value


@pytest.mark.parametrize(
    "fault",
    [failure(429), failure(500), Scripted(status=0), Scripted("Done.", die_after=0), Scripted("Done.", die_after=2)],
)
def test_a_second_attempt_does_not_consult_again(start: Start, upstreams: Upstreams, fault: Any) -> None:
    upstream = upstreams([calls(ask("c1"), text="Hm."), fault, "Done.", "Bye."], strict=True)
    judge = critic("Look first.")
    caller = start(upstream, judge)
    _failing(lambda: caller.say(ASK))
    turn = caller.say(ASK)
    assert turn.content == "Done."
    assert len(judge.seen) == 1
    assert roles(upstream.chats[2]) == "suCA"
    caller.say([*ASK, turn.message, USER])
    assert roles(upstream.chats[3]) == "suCAau"


@pytest.mark.parametrize("hidden", [False, True])
def test_a_stream_that_dies_midway_is_an_error_as_for_a_bare_client(
    streaming: Start, upstreams: Upstreams, hidden: bool
) -> None:
    dying = Scripted("0123456789", die_after=2)
    upstream = upstreams([*([calls(ask())] if hidden else []), dying], strict=True)
    caller = streaming(upstream, critic())
    seen: list[str] = []

    async def aread() -> None:
        async for one in await caller.client.chat.completions.create(model="m", messages=ASK, stream=True):
            seen.extend(choice.delta.content for choice in one.choices if choice.delta.content)

    def read() -> None:
        for one in caller.client.chat.completions.create(model="m", messages=ASK, stream=True):
            seen.extend(choice.delta.content for choice in one.choices if choice.delta.content)

    _failing((lambda: caller.run(aread())) if isinstance(caller, AsyncCaller) else read)
    assert seen == ["01234"]


def test_a_stream_that_tells_an_error_midway_is_an_error(streaming: Start, upstreams: Upstreams) -> None:
    told = {"error": {"message": "out of memory", "type": "server_error", "code": None, "param": None}}
    upstream = upstreams([calls(ask()), Scripted(raw_chunks=[told], end=False), "Done."], strict=True)
    caller, judge = streaming(upstream, one := critic()), one
    assert "out of memory" in str(_failing(lambda: caller.say(ASK)))
    assert caller.say(ASK).content == "Done."
    assert len(judge.seen) == 1


def test_a_connection_refused_is_one_as_for_a_bare_client(some: Start) -> None:
    class Nowhere:
        url = "http://127.0.0.1:9/v1"

    with pytest.raises(openai.APIError) as raised:
        some(Nowhere(), critic()).say(ASK)
    if isinstance(raised.value, openai.APIStatusError):
        assert raised.value.status_code == 502
        assert "cannot be reached" in str(raised.value)
    else:
        assert isinstance(raised.value, openai.APIConnectionError)


def test_a_stall_ends_with_the_clients_own_timeout(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask()), Scripted("late", stall=5), "Done."], strict=True)
    caller, judge = some(upstream, one := critic(), client={"timeout": 0.4}), one
    started = time.monotonic()
    _failing(lambda: caller.say(ASK))
    assert time.monotonic() - started < 3
    upstream.wait_until(lambda: upstream.requests[1].aborted)
    assert caller.say(ASK).content == "Done."
    assert len(judge.seen) == 1


def test_an_answer_nested_too_deeply_passes_as_it_is(upstreams: Upstreams) -> None:
    body = ('{"choices": ' + "[" * 100_000 + "]" * 100_000 + "}").encode()
    with starter("sync-create") as start:
        caller = start(upstreams([Scripted(body=body)]), critic())
        raw = caller.client.chat.completions.with_raw_response.create(model="m", messages=ASK)
        assert raw.content == body


# ---------------------------------------------------------------------- callers that go away


def _leave(url: str, body: dict[str, Any], read: int | None) -> None:
    """Hang up after some bytes of the answer; None does so before its head."""
    with httpx.Client(timeout=5) as client:
        if read is None:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{url}/chat/completions", json=body, timeout=0.3)
            return
        with client.stream("POST", f"{url}/chat/completions", json=body) as response:
            for seen, _ in enumerate(response.iter_raw(1)):
                if seen >= read:
                    return


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_before_the_head_cancels_the_upstream(upstreams: Upstreams, stream: bool) -> None:
    upstream = upstreams([Scripted("late", stall=5)])
    with starter("proxy-create") as start:
        url = str(start(upstream, critic()).client.base_url).rstrip("/")
        _leave(url, {"messages": ASK, "stream": stream}, None)
        upstream.wait_until(lambda: upstream.requests[0].aborted)


def test_a_caller_that_leaves_a_stream_cancels_the_upstream(upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask()), Scripted("0123456789" * 50, gap=0.05), "Done."])
    judge = critic()
    with starter("proxy-stream") as start:
        caller = start(upstream, judge)
        _leave(str(caller.client.base_url).rstrip("/"), {"messages": ASK, "stream": True}, 300)
        upstream.wait_until(lambda: upstream.requests[1].aborted)
        # the advice was given, and is not asked for again
        _leave(str(caller.client.base_url).rstrip("/"), {"messages": ASK, "stream": True}, 1)
        assert roles(upstream.chats[2]) == "suCA"
        assert len(judge.seen) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_while_the_critic_is_asked_cancels_it(upstreams: Upstreams, stream: bool) -> None:
    served = upstreams([Scripted(ADVICE, stall=5)], models=["critic"])
    upstream = upstreams([calls(ask())])
    with starter("proxy-create") as start:
        url = str(start(upstream, EndpointCritic(served.url, model="critic", pack="general")).client.base_url)
        body = {"messages": ASK, "stream": stream}
        if stream:
            with httpx.Client() as client, client.stream("POST", f"{url}chat/completions", json=body):
                served.wait_until(lambda: bool(served.chats))
        else:
            _leave(url.rstrip("/"), body, None)
        served.wait_until(lambda: any(r.aborted for r in served.requests if r.path.endswith("completions")))
        assert len(upstream.requests) == 1


@pytest.mark.parametrize("where", ["upstream", "critic"])
def test_a_cancelled_task_cancels_what_it_waits_for(upstreams: Upstreams, where: str) -> None:
    served = upstreams([Scripted(ADVICE, stall=5)], models=["critic"])
    upstream = upstreams([Scripted("late", stall=5)] if where == "upstream" else [calls(ask())])
    waited = upstream if where == "upstream" else served

    async def leave() -> None:
        async with wrap(
            AsyncOpenAI(base_url=upstream.url, api_key="none", max_retries=0),
            EndpointCritic(served.url, model="critic", pack="general"),
        ) as client:
            work = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
            await asyncio.to_thread(waited.wait_until, lambda: bool(waited.chats))
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work

    asyncio.run(leave())
    waited.wait_until(lambda: any(r.aborted for r in waited.requests if r.path.endswith("completions")))


def test_a_stream_that_is_closed_early_closes_the_upstreams(streaming: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([Scripted("0123456789" * 50, gap=0.05)])
    caller = streaming(upstream, critic())

    async def aread() -> None:
        async with await caller.client.chat.completions.create(model="m", messages=ASK, stream=True) as stream:
            async for _ in stream:
                break

    def read() -> None:
        with caller.client.chat.completions.create(model="m", messages=ASK, stream=True) as stream:
            next(iter(stream))

    caller.run(aread()) if isinstance(caller, AsyncCaller) else read()
    upstream.wait_until(lambda: upstream.requests[0].aborted)


# ---------------------------------------------------------------------- many at once


def _order(body: dict[str, Any]) -> str:
    return re.findall(r"order (\w+)", json.dumps(body["messages"]))[0]


async def _shop(body: dict[str, Any]) -> Any:
    """An agent that asks, looks, and answers with all it was told of its order; anything else is a mix-up."""
    order, stage = _order(body), roles(body)
    words = set(re.findall(r"order (\w+)", json.dumps(body["messages"])))
    assert words == {order}, words
    await asyncio.sleep(0.002 * (len(order) % 3))
    if stage == "u":
        return calls(ask(f"c{order}"), text=f"order {order} asks")
    if stage == "uCA":
        return calls(look(order, f"a{order}"), ask(f"d{order}"), text=f"order {order} looks")
    assert stage == "uCAMtA", stage
    return f"order {order} done"


def test_200_conversations_in_two_event_loops_do_not_mix(upstreams: Upstreams) -> None:
    upstream = upstreams(_shop, strict=True)

    def advise(state: Any) -> tuple[str, str]:
        order = re.findall(r"order (\w+)", str([event.dump() for event in state.events]))
        assert len(set(order)) == 1
        return f"order {order[0]} seen", f"order {order[0]} now"

    judge, ledger, failed = ScriptedCritic(advise), MemoryLedger(), []

    async def one(client: AsyncOpenAI, name: str, number: int) -> None:
        caller = AsyncCaller.__new__(AsyncCaller)
        history: list[Any] = [{"role": "user", "content": f"Return order {name}."}]
        wanted = {"model": "m", "tools": TOOLS}
        mode = ("create", "stream", "helper")[number % 3]
        first = await caller._asay(client, mode, {**wanted, "messages": history})
        assert first.content == f"order {name} asks\n\norder {name} looks"
        assert [call["id"] for call in first.calls] == [f"a{name}"]
        history += [first.message, result(first.calls[0], f"order {name} found")]
        last = await caller._asay(client, mode, {**wanted, "messages": history})
        assert last.content == f"order {name} done"

    async def many(who: str) -> None:
        client = AsyncOpenAI(base_url=upstream.url, api_key="none", max_retries=0)
        async with wrap(client, judge, ledger=ledger) as wrapped:
            await asyncio.gather(*(one(wrapped, f"{who}{n}", n) for n in range(100)))

    def run(who: str) -> None:
        try:
            asyncio.run(many(who))
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=run, args=(who,)) for who in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    assert len(judge.seen) == 400
    assert len(upstream.chats) == 600


def test_threads_may_share_a_wrapped_client(upstreams: Upstreams) -> None:
    upstream = upstreams(_shop, strict=True)
    judge = ScriptedCritic(lambda state: ("as seen", "go on"))
    failed: list[BaseException] = []
    with wrap(OpenAI(base_url=upstream.url, api_key="none", max_retries=0), judge) as client:

        def one(name: str) -> None:
            try:
                said = client.chat.completions.create(
                    model="m", tools=TOOLS, messages=[{"role": "user", "content": f"Return order {name}."}]
                )
                assert said.choices[0].message.content == f"order {name} asks\n\norder {name} looks"
            except BaseException as error:  # noqa: BLE001 - told to the test's own thread
                failed.append(error)

        threads = [threading.Thread(target=one, args=(f"t{n}",)) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed, failed[0]


def test_what_was_asked_of_the_critic_is_told_with_the_answer(some: Start, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(ask("c1")), failure(500), "Done."], strict=True)
    spent = Usage(prompt_tokens=50, completion_tokens=5, calls=1)
    caller = some(upstream, ScriptedCritic(lambda state: Critique("As seen.", "Beware.", usage=spent)))
    _failing(lambda: caller.say(ASK))
    told = caller.say(ASK).caddie
    assert told is not None
    assert len(told["consultations"]) == 1
    assert told["remaining"] == 2
    assert told["critic_usage"]["prompt_tokens"] == 50
    assert told["agent_calls"] == 1


def test_a_request_nested_too_deeply_passes_as_it_is() -> None:
    body = b"[" * 100_000
    assert next(Relay().flow("/v1/chat/completions", {}, body)) == Send(body)


@pytest.mark.parametrize("seen", [1, 2, 3])
def test_a_stream_given_up_anywhere_keeps_its_advice(seen: int) -> None:
    """By hand, so that the caller leaves at every kind of step: after an event, and while one is awaited."""
    relay, body = Relay(), json.dumps({"messages": ASK, "stream": True}).encode()
    first = as_stream({"content": "", "tool_calls": [ask("c1")]}, 5, "usual")
    flow, value, emitted = relay.flow("/v1/chat/completions", {}, body), None, 0
    bodies = iter([first, as_stream({"content": "0123456789", "tool_calls": []}, 2, "usual")])
    rest: list[bytes] = []
    sent = 0
    while not (sent == 2 and emitted == seen):
        step, value = flow.send(value), None
        if isinstance(step, Send):
            sent, emitted = sent + 1, 0
            rest = [part + b"\n\n" for part in next(bodies).split(b"\n\n")]
            value = Answer(200, {"content-type": "text/event-stream"})
        elif isinstance(step, Read):
            value = rest.pop(0)
        elif isinstance(step, Ask):
            value = Critique("As seen.", "Beware.")
        elif isinstance(step, Emit):
            emitted += 1
    flow.close()
    again = next(relay.flow("/v1/chat/completions", {}, body))
    assert isinstance(again, Send)
    assert roles(json.loads(again.body)) == "suCA"
