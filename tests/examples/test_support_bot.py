"""The support bot over HTTP: what customers and staff can do, and what the database says afterwards."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from bot_kit import (
    ADVICE,
    ANALYSIS,
    BOOTS,
    CANCEL,
    HUMAN,
    SWAP,
    TENT,
    THEIRS,
    WEB,
    YES,
    Bot,
    Customer,
    contents,
    count,
    critic_says,
    model_says,
    rows,
    wait_until,
)
from upstream import Scripted, Upstream, context_overflow, failure

from examples.support_bot.views import SORRY

# ------------------------------------------------------------------ customers


def test_a_return_from_the_first_word_to_the_refund(start: Callable[..., Bot], critic: Upstream) -> None:
    bot = start()
    nadia = Customer(bot)
    assert "89.00 EUR" in nadia.ask(BOOTS)
    assert count(bot.db, "returns") == 0
    assert nadia.ask(YES).startswith("Done: {'return': 'R1', 'items': ['W1001-1']")
    assert rows(bot.db, "SELECT order_id, item_id FROM returns JOIN return_items ON return_id = id") == [
        ("W1001", "W1001-1")
    ]
    assert rows(bot.db, "SELECT payment_id, amount_cents, status FROM refunds") == [("P1001", 8900, "pending")]
    assert nadia.ask("Thank you.") == "You said: Thank you."
    # The critic was asked once, with the support pack: about the proposal, with the policy before it.
    (asked,) = critic.chats
    shown = json.dumps(asked["messages"])
    assert "You coach a customer-service agent" in shown
    assert "start_return" in shown
    assert "support assistant of a small online shop" in shown
    contents(bot.db)


def test_advice_is_for_staff_alone(start: Callable[..., Bot]) -> None:
    bot = start()
    nadia = Customer(bot)
    nadia.ask(BOOTS)
    nadia.ask(YES)
    seen = WEB.get(f"{bot.url}/api/chat", headers=nadia.headers).text
    for secret in (ADVICE, ANALYSIS, "Critic feedback", "Not run yet", "call_critic", "start_return"):
        assert secret not in seen
    # Staff sees the calls; the words of the critic only when asked for.
    thread = bot.thread("C1")
    assert [entry["kind"] for entry in thread["entries"]] == [
        "customer", "call", "result", "call", "result", "call", "result", "bot",
        "customer", "call", "held", "advice", "call", "result", "bot",
    ]  # fmt: skip
    assert ADVICE not in json.dumps(thread)
    advice = bot.staff("GET", "/threads/customer-C1/advice/0")
    assert advice == {"trigger": "guarded", "status": "ok", "analysis": ANALYSIS, "advice": ADVICE, "detail": ""}
    wrong = WEB.get(f"{bot.url}/api/staff/threads/customer-C1/advice/0", headers=nadia.headers)
    assert wrong.status_code == 401


def test_two_customers_at_the_same_time_do_not_mix(start: Callable[..., Bot], model: Upstream) -> None:
    bot = start()
    nadia, tomas = Customer(bot), Customer(bot, "C2")
    for text in (BOOTS, YES, CANCEL):
        nadia.post(text)
        tomas.post(f"Tomas says hello {text[:4]}")
    assert "'cancelled': 'W1002'" in nadia.hears(3)
    assert tomas.hears(3) == f"You said: Tomas says hello {CANCEL[:4]}"
    assert len(nadia.said("customer")) == len(tomas.said("customer")) == 3
    assert len(model.chats) == 4 + 3 + 3 + 3
    for body in model.chats:
        said = json.dumps(body["messages"][1:])
        assert ("W1001" in said) + ("Tomas" in said) == 1
    assert {key.split("/")[0] for (key,) in rows(bot.db, "SELECT key FROM actions")} == {"customer-C1"}


def test_orders_of_others_do_not_exist(start: Callable[..., Bot]) -> None:
    nadia = Customer(start())
    assert nadia.ask(THEIRS).startswith("Not done: this customer has no order W2001")


def test_done_in_one_way_is_not_done_in_another(start: Callable[..., Bot]) -> None:
    bot = start()
    nadia = Customer(bot)
    nadia.ask(BOOTS)
    nadia.ask(YES)
    assert nadia.ask(SWAP) == "Not done: W1001-1 cannot be sent back: it was returned before"
    first = nadia.said("bot")[1]
    # The same return again, in the same thread: the same outcome, and nothing new in the records.
    nadia.ask(YES)
    assert nadia.said("bot")[3] == first
    assert [count(bot.db, table) for table in ("returns", "refunds", "exchanges")] == [1, 1, 0]


def test_a_message_sent_twice_is_stored_once(start: Callable[..., Bot]) -> None:
    nadia = Customer(start())
    assert [nadia.post("Hello", "same").json() for _ in range(3)] == [{"number": 1}] * 3
    nadia.hears(1)
    assert nadia.said("customer") == ["Hello"]


def test_a_long_conversation_does_not_fill_the_disk(start: Callable[..., Bot]) -> None:
    bot = start()
    nadia = Customer(bot)
    threads = bot.db.with_name("shop.db.threads")
    kept = []
    for turn in range(1, 16):
        assert "89.00 EUR" in nadia.ask(BOOTS)
        wait_until(lambda: rows(bot.db, "SELECT open FROM threads") == [(0,)], "end of the turn")
        assert count(threads, "checkpoints") == 1
        kept.append(rows(threads, "SELECT sum(length(checkpoint)) FROM checkpoints")[0][0] / turn)
    assert kept[-1] < 1.2 * kept[2]  # by the turn: it grows with what was said, not with its square
    assert sum(file.stat().st_size for file in bot.db.parent.glob("shop.db.threads*")) < 8_000_000


def test_progress_can_be_waited_for(start: Callable[..., Bot]) -> None:
    async def slowly(body: Mapping[str, Any]) -> Any:
        await asyncio.sleep(0.15)
        return model_says(body)

    seen: list[dict[str, Any]] = []
    with Upstream(slowly) as model:
        bot = start(model=model.url)
        nadia = Customer(bot)
        mark = nadia.chat()["mark"]
        nadia.post(BOOTS)
        while not seen or seen[-1]["state"] != "idle":
            answer = WEB.get(f"{bot.url}/api/chat", params={"seen": mark}, headers=nadia.headers)
            seen.append(answer.json())
            assert seen[-1]["mark"] != mark  # it answers when there is news, not before
            mark = seen[-1]["mark"]
    doing = list(dict.fromkeys(one["doing"] for one in seen))
    looked = ["Looking at your account", "Looking up your order", "Checking what can be returned"]
    assert doing == ["Thinking", *looked, ""]
    assert len(seen[-1]["messages"]) == 2


# ------------------------------------------------------------------ colleagues


@pytest.mark.parametrize(("decision", "returns"), [("approve", 1), ("deny", 0)])
def test_a_large_refund_waits_for_a_colleague(decision: str, returns: int, start: Callable[..., Bot]) -> None:
    bot = start()
    tomas = Customer(bot, "C2")
    tomas.post(TENT)
    asked = bot.waiting("C2")
    assert (asked["kind"], asked["amount_cents"], "W2001-1" in asked["summary"]) == ("approval", 39900, True)
    assert tomas.chat()["state"] == "waiting"
    assert bot.staff("GET", "/threads")["threads"][0]["waiting"] == 1
    # What is said meanwhile is kept until the turn is over.
    tomas.post("Are you there?")
    assert tomas.said("bot") == []
    assert count(bot.db, "returns") == 0
    bot.answers("C2", decision, "By me.")
    told = tomas.hears(2)
    assert told == "You said: Are you there?"
    assert ("'return': 'R1'" in tomas.said("bot")[0]) is bool(returns)
    assert ("a colleague denied this refund. Message: By me." in tomas.said("bot")[0]) is not bool(returns)
    assert tomas.said("staff") == ["By me."]
    assert count(bot.db, "returns") == count(bot.db, "refunds") == returns
    second = WEB.post(
        f"{bot.url}/api/staff/handovers/{asked['id']}",
        json={"decision": "approve", "message": ""},
        headers={"Authorization": "Bearer token-of-the-tests"},
    )
    assert (second.status_code, second.json()) == (409, {"error": "This question has been answered already."})


def test_the_limit_can_be_set(start: Callable[..., Bot]) -> None:
    bot = start(options=["--approve-above", "399.00"])
    assert "'return': 'R1'" in Customer(bot, "C2").ask(TENT)


def test_a_customer_asks_for_a_human(start: Callable[..., Bot]) -> None:
    bot = start()
    nadia = Customer(bot)
    for number, words in enumerate(("I will call you.", "And again."), 1):
        nadia.post(HUMAN)
        asked = bot.waiting("C1")
        assert (asked["kind"], asked["summary"]) == ("question", "Wants a human.")
        with pytest.raises(AssertionError, match="Approve or deny a request; reply to a question"):
            bot.answers("C1", "approve")
        with pytest.raises(AssertionError, match="A reply needs a message"):
            bot.answers("C1", "reply", " ")
        bot.answers("C1", "reply", words)
        assert nadia.hears(number) == f"Done: {{'colleague': '{words}'}}"
    assert nadia.said("staff") == ["I will call you.", "And again."]
    assert count(bot.db, "handovers") == 2


def test_two_questions_of_one_turn_are_answered_one_by_one(start: Callable[..., Bot], monkeypatch: Any) -> None:
    from bot_kit import SCRIPT

    from caddie_sdk.testing import calls, tool_call

    both = calls(tool_call("hand_over", {"summary": "first"}), tool_call("hand_over", {"summary": "second"}))
    monkeypatch.setitem(SCRIPT, HUMAN, [both, lambda messages: " ".join(m["content"] for m in messages[-2:])])
    bot = start()
    nadia = Customer(bot)
    nadia.post(HUMAN)
    wait_until(lambda: len(bot.thread("C1")["handovers"]) == 2, "two questions")
    numbers = {one["summary"]: one["id"] for one in bot.thread("C1")["handovers"]}
    bot.staff("POST", f"/handovers/{numbers['second']}", {"decision": "reply", "message": "2"})
    assert nadia.chat()["state"] == "waiting"
    bot.staff("POST", f"/handovers/{numbers['first']}", {"decision": "reply", "message": "1"})
    assert nadia.hears(1) == '{"colleague": "1"} {"colleague": "2"}'


# ------------------------------------------------------------------ a critic, or a model, that fails


async def _stalls(body: Mapping[str, Any]) -> str:
    await asyncio.sleep(30)
    return critic_says(body)


FAULTS: dict[str, Any] = {
    "stalls": (_stalls, "timeout"),
    "garbage": (lambda body: "As an AI I would say: why not?", "malformed"),
    "half": (lambda body: "Analysis: fine.", "malformed"),
    "no JSON": (lambda body: Scripted(body=b"<html>"), "unavailable"),
    "broken": (lambda body: failure(500), "unavailable"),
    "hangs up": (lambda body: Scripted(status=0), "unavailable"),
}


@pytest.mark.parametrize("fault", ["down", *FAULTS])
def test_the_critic_fails_and_the_bot_goes_on(fault: str, start: Callable[..., Bot]) -> None:
    script, status = FAULTS.get(fault, (critic_says, "unavailable"))
    with Upstream(script) as broken:
        url = broken.url
        if fault == "down":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        bot = start(critic=url, options=["--critic-timeout", "1.5"])
        nadia = Customer(bot)
        assert nadia.ask(CANCEL).startswith("Done: {'cancelled': 'W1002'")
        assert (fault == "down") is (not broken.chats)
    assert rows(bot.db, "SELECT status FROM orders WHERE id = 'W1002'") == [("cancelled",)]
    assert count(bot.db, "cancellations") == count(bot.db, "refunds") == 1
    advice = bot.staff("GET", "/threads/customer-C1/advice/0")
    assert advice["advice"] == ""
    assert advice["status"] == status
    if fault == "down":
        wait_until(lambda: "goes on without advice until it answers" in bot.log, "word about the critic")


def test_without_a_critic(start: Callable[..., Bot]) -> None:
    bot = start(critic="off")
    assert Customer(bot).ask(CANCEL).startswith("Done: ")
    assert "advice" not in {entry["kind"] for entry in bot.thread("C1")["entries"]}


def test_the_model_fails_and_comes_back(start: Callable[..., Bot], tmp_path: Path) -> None:
    """No word of the customer is lost, and each is answered once the server is there again."""
    down = True

    def says(body: Mapping[str, Any]) -> Any:
        return failure(400, "You wrote: secret words", code="none") if down else model_says(body)

    with Upstream(says) as model:
        bot = start(model=model.url)
        nadia = Customer(bot)
        nadia.post("Secret words of Nadia")
        wait_until(lambda: nadia.chat()["state"] == "delayed", "trouble")
        nadia.post(BOOTS)
        down = False
        assert "89.00 EUR" in nadia.hears(2)
    assert nadia.said("bot")[0] == "You said: Secret words of Nadia"
    assert f"customer-C1: EndpointRefused at {model.url}; trying again later" in bot.log
    assert "ecret" not in bot.log


@pytest.mark.parametrize("fault", [context_overflow(), ""], ids=["history too long", "empty answers"])
def test_a_colleague_is_asked_where_the_model_has_no_answer(fault: Any, start: Callable[..., Bot]) -> None:
    with Upstream(lambda body: fault if "riddle" in json.dumps(body) else model_says(body)) as model:
        bot = start(model=model.url)
        nadia = Customer(bot)
        nadia.post("A riddle")
        asked = bot.waiting("C1")
        assert asked["summary"].startswith("The bot has no answer to this message.")
        assert nadia.said("bot") == [SORRY]
        bot.answers("C1", "reply", "It is the moon.")
        assert nadia.hears(1) == SORRY
        assert nadia.said("staff") == ["It is the moon."]
    assert count(bot.db, "handovers") == 1
    wait_until(lambda: rows(bot.db, "SELECT open FROM threads") == [(0,)], "end of the turn")


def test_nothing_that_was_said_is_logged(start: Callable[..., Bot]) -> None:
    bot = start()
    nadia = Customer(bot)
    nadia.ask(BOOTS)
    nadia.ask(YES)
    nadia.post("x" * 5000)
    WEB.post(f"{bot.url}/api/sign-in", json={"email": "nadia@shop.example", "postcode": "0"})
    assert bot.log == ""


# ------------------------------------------------------------------ what is refused


def test_bad_requests(start: Callable[..., Bot]) -> None:
    bot = start()
    nadia = Customer(bot)

    def refusal(body: bytes, path: str = "/api/chat", headers: Any = None) -> tuple[int, str]:
        answer = WEB.post(f"{bot.url}{path}", content=body, headers=nadia.headers if headers is None else headers)
        return answer.status_code, answer.json()["error"]

    def message(**fields: Any) -> bytes:
        return json.dumps({"ref": "r", "text": "t", **fields}).encode()

    object_wanted = (400, "The request's body must be a JSON object.")
    assert refusal(b"") == refusal(b"[1]") == refusal(b"\xff") == refusal(b"[" * 20_000) == object_wanted
    assert refusal(b" " * 40_000) == (413, "The request is longer than 32768 bytes.")
    assert refusal(message(text="")) == refusal(message(text=" \x00\x07\n")) == (400, "text must not be empty.")
    assert refusal(message(text=7)) == refusal(message(text="\ud800")) == (400, "text must be a text.")
    assert refusal(message(text="x" * 4001)) == (400, "text must not be longer than 4000 characters.")
    assert refusal(message(ref="")) == (400, "ref must not be empty.")
    assert refusal(message(), headers={}) == (401, "Please sign in.")
    assert refusal(message(), headers={"Authorization": "Bearer \xe9".encode("latin-1")}) == (401, "Please sign in.")
    assert count(bot.db, "inbox") == 0
    assert WEB.get(f"{bot.url}/api/nothing").status_code == 404
    assert WEB.get(f"{bot.url}/static/../app.py").status_code == 404
    assert WEB.get(f"{bot.url}/static/%2e%2e/app.py").status_code == 404
    for path in ("/threads", "/threads/customer-C1", "/threads/customer-C1/advice/0"):
        for headers in ({}, nadia.headers, {"Authorization": "Bearer token-of-the-test"}):
            assert WEB.get(f"{bot.url}/api/staff{path}", headers=headers).status_code == 401
    with pytest.raises(AssertionError, match="There is no such conversation"):
        bot.staff("GET", "/threads/customer-C9")
    with pytest.raises(AssertionError, match="There is no such question"):
        bot.staff("POST", "/handovers/99", {"decision": "reply", "message": "x"})


def test_an_endless_body_is_cut_off(start: Callable[..., Bot]) -> None:
    bot = start()
    sent = 0

    def endless() -> Any:
        nonlocal sent
        while sent < 50_000_000:
            sent += 10_000
            yield b"x" * 10_000

    try:
        status = httpx.post(f"{bot.url}/api/sign-in", content=endless()).status_code
    except httpx.WriteError:
        status = 413
    assert status == 413
    assert sent < 20_000_000


def test_sign_in(start: Callable[..., Bot]) -> None:
    bot = start()

    def tries(email: str, postcode: str) -> httpx.Response:
        return WEB.post(f"{bot.url}/api/sign-in", json={"email": email, "postcode": postcode})

    assert tries(" NADIA@shop.example", "4021 ").status_code == 200
    assert tries("nobody@shop.example", "4021").status_code == 401
    assert [tries("tomas@shop.example", "4021").status_code for _ in range(6)] == [401] * 5 + [429]
    assert tries("tomas@shop.example", "77310").status_code == 429
    nadia = Customer(bot)
    assert WEB.post(f"{bot.url}/api/sign-out", headers=nadia.headers).status_code == 204
    assert WEB.get(f"{bot.url}/api/chat", headers=nadia.headers).status_code == 401
    stored = rows(bot.db, "SELECT token_hash FROM sign_ins")
    assert stored
    assert all(len(digest) == 64 for (digest,) in stored)


def test_one_customer_cannot_flood_the_bot(start: Callable[..., Bot]) -> None:
    with Upstream(_stalls) as model:
        nadia = Customer(start(model=model.url))
        answers = [nadia.post(f"message {number}").status_code for number in range(24)]
        assert answers[:20] == [202] * 20
        assert set(answers[21:]) == {409}


def test_headers_on_every_answer(start: Callable[..., Bot]) -> None:
    bot = start()
    for path in ("/", "/staff", "/static/common.js", "/api/samples", "/api/chat", "/nothing"):
        headers = WEB.get(f"{bot.url}{path}").headers
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
