"""What callers do not see is found again by what they do see, and by nothing else."""

from __future__ import annotations

import copy
import json
import sqlite3
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import ASK, USER, ask, calls, critic, drive, look, offered, result, roles, starter
from upstream import Upstream

from caddie_sdk import Critique
from caddie_sdk.errors import ConfigError
from caddie_sdk.messages import canonical
from caddie_sdk.relay import chat
from caddie_sdk.relay.adopt import Terms
from caddie_sdk.relay.fast import Memo
from caddie_sdk.relay.flow import Relay
from caddie_sdk.relay.ledger import Ledger, MemoryLedger, SqliteLedger, chain, fingerprint
from caddie_sdk.relay.live import LiveSessions

Upstreams = Callable[..., Upstream]

# ---------------------------------------------------------------------- keys

NAMES = st.sampled_from(["look", "refund", "open"])
TEXTS = st.text(st.sampled_from("aé 🏔/:0\n"), max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-4, 4).map(lambda x: round(x, 1)) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALL = st.builds(
    lambda id, name, arguments: {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    },
    TEXTS,
    NAMES,
    st.dictionaries(TEXTS, JSON, max_size=3) | st.just("cut off"),
)
MESSAGE = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
    st.builds(lambda text: {"role": "system", "content": text}, TEXTS),
    st.builds(lambda id, text: {"role": "tool", "tool_call_id": id, "content": text}, TEXTS, TEXTS),
    st.builds(
        lambda text, made: {"role": "assistant", "content": text, "tool_calls": made},
        TEXTS,
        st.lists(CALL, max_size=3),
    ),
)


def keys(messages: list[Any], scope: str = "") -> list[str]:
    return chain(scope, [fingerprint(canonical(message)) for message in messages])


def _sorted_deep(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_deep(value[key]) for key in sorted(value, reverse=True)}
    if isinstance(value, list):
        return [_sorted_deep(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """The same message after a client has read it into objects and written it anew."""
    again = copy.deepcopy(message)
    again["content"] = f" {again['content']}\n" if again["content"].strip() else None
    for call in again.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        if isinstance(arguments, dict):
            call["function"]["arguments"] = json.dumps(
                _sorted_deep(arguments), separators=(",", ":"), ensure_ascii=False
            )
    if again["role"] == "assistant" and not again.get("tool_calls"):
        again.pop("tool_calls", None)
    if again["role"] == "assistant":
        again["reasoning_content"] = "left out or put in"
    return again


@given(st.lists(MESSAGE, min_size=1, max_size=5))
def test_a_client_that_writes_anew_changes_no_key(messages: list[Any]) -> None:
    assert keys([rewritten(message) for message in messages]) == keys(messages)


def _meaning(message: dict[str, Any]) -> str:
    """What makes a message, worked out in another way than the keys are."""
    made = []
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        made.append([call["id"], call["function"]["name"], _sorted_deep(arguments)])
    facts = [message["role"], message["content"].strip(), message.get("tool_call_id") or "", made]
    return json.dumps(facts, sort_keys=True)


@settings(max_examples=200)
@given(st.lists(MESSAGE, min_size=1, max_size=3), st.lists(MESSAGE, min_size=1, max_size=3))
def test_keys_are_equal_where_the_histories_are_and_only_there(one: list[Any], two: list[Any]) -> None:
    same = [_meaning(message) for message in one] == [_meaning(message) for message in two]
    assert (keys(one)[-1] == keys(two)[-1]) == same


@given(st.lists(MESSAGE, min_size=2, max_size=5), st.integers(0, 4))
def test_a_key_depends_on_everything_before_it(messages: list[Any], number: int) -> None:
    number %= len(messages)
    edited = copy.deepcopy(messages)
    edited[number]["content"] += "!"
    before, after = keys(messages), keys(edited)
    assert before[:number] == after[:number]
    assert not set(before[number:]) & set(after[number:])
    assert len({*before, *after}) == 2 * len(messages) - number


def test_callers_with_different_scopes_share_no_key() -> None:
    assert not set(keys(ASK, "a")) & set(keys(ASK, "b"))


def test_arguments_nested_too_deeply_are_still_told_apart() -> None:
    deep = ['{"a":' * 5000 + text + "}" * 5000 for text in ("1", "2")]
    made = [keys([calls({"id": "a", "function": {"name": "look", "arguments": text}})])[0] for text in deep]
    assert made[0] != made[1]


# ---------------------------------------------------------------------- the places


@pytest.fixture(params=["memory", "file"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Ledger:
    return MemoryLedger() if request.param == "memory" else SqliteLedger(tmp_path / "ledger.db")


def test_what_is_put_is_got_until_it_is_dropped(ledger: Ledger) -> None:
    ledger.put("a", {"n": 1, "text": "Zürich \ud800"})
    ledger.put("a", {"n": 2})
    ledger.put("b", {"n": 3})
    assert ledger.get(["a", "b", "c"]) == {"a": {"n": 2}, "b": {"n": 3}}
    ledger.drop("a")
    ledger.drop("c")
    assert ledger.get(["a", "b"]) == {"b": {"n": 3}}
    assert ledger.get([]) == {}
    assert len(ledger.get([*map(str, range(1200)), "b"])) == 1


def test_threads_may_share_it(ledger: Ledger) -> None:
    failed: list[BaseException] = []

    def use(who: int) -> None:
        try:
            for n in range(30):
                ledger.put(f"{who}/{n}", {"who": who, "n": n})
                assert ledger.get([f"{who}/{n}"])[f"{who}/{n}"] == {"who": who, "n": n}
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=use, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_the_entries_used_longest_ago_go_first() -> None:
    ledger = MemoryLedger(max_bytes=300)
    for key in "abc":
        ledger.put(key, {"text": "x" * 80})
    ledger.get(["a"])
    ledger.put("d", {"text": "x" * 80})
    assert sorted(ledger.get(list("abcd"))) == ["a", "c", "d"]


def test_an_entry_that_is_too_large_pushes_nothing_out() -> None:
    ledger = MemoryLedger(max_bytes=300)
    ledger.put("a", {"text": "x" * 80})
    ledger.put("b", {"text": "x" * 400})
    assert sorted(ledger.get(["a", "b"])) == ["a"]
    ledger.put("a", {"text": "x" * 400})
    assert len(ledger) == 0


def test_old_entries_of_a_file_go(tmp_path: Path) -> None:
    first = SqliteLedger(tmp_path / "ledger.db", keep=0.05)
    first.put("a", {"n": 1})
    time.sleep(0.1)
    first.put("b", {"n": 2})
    first.close()
    assert sorted(SqliteLedger(tmp_path / "ledger.db", keep=0.05 + 0.04).get(["a", "b"])) == ["b"]


def test_the_file_is_the_owners_alone(tmp_path: Path) -> None:
    SqliteLedger(tmp_path / "ledger.db").put("a", {})
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}


@pytest.mark.parametrize("content", [None, b"no database at all, but long enough to be looked at" * 9])
def test_a_file_that_cannot_be_one_is_told_at_once(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ledger.db"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="give the path of a writable SQLite file"):
        SqliteLedger(path)


def test_a_file_that_fails_later_stops_nobody(
    tmp_path: Path, upstreams: Upstreams, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.db")
    upstream = upstreams([calls(ask()), "Done."], strict=True)
    with starter("sync-create") as start:
        caller = start(upstream, critic(), ledger=ledger)
        with sqlite3.connect(tmp_path / "ledger.db") as other:
            other.execute("DROP TABLE entries")
        assert caller.say(ASK).content == "Done."
    assert "the ledger" in caplog.text
    assert USER["content"] not in caplog.text


def test_an_entry_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / "ledger.db")
    ledger.put("a", {"n": 1})
    with sqlite3.connect(tmp_path / "ledger.db") as other:
        other.execute("UPDATE entries SET entry = '{cut'")
    assert ledger.get(["a"]) == {}


# ---------------------------------------------------------------------- across processes


def test_a_file_carries_advice_over_a_restart(tmp_path: Path, upstreams: Upstreams) -> None:
    path, mixed = tmp_path / "ledger.db", calls(look(id="a1"), ask("c1"))
    upstream = upstreams([mixed, "Done."], strict=True)
    with starter("sync-create") as start:
        turn = start(upstream, critic("Beware."), ledger=path).say(ASK)
    with starter("proxy-stream") as start:
        start(upstream, critic("never"), ledger=path).say([*ASK, turn.message, result(turn.calls[0])])
    assert roles(upstream.chats[1]) == "suMtA"
    assert "Beware." in upstream.chats[1]["messages"][-1]["content"]


def test_entries_of_another_version_are_passed_over(upstreams: Upstreams) -> None:
    class Old(MemoryLedger):
        def put(self, key: str, entry: Any) -> None:
            super().put(key, {**entry, "delta": {**entry["delta"], "version": 0}})

    upstream = upstreams([calls(ask()), "Done.", "Bye."], strict=True)
    with starter("sync-create") as start:
        turn = start(upstream, critic(), ledger=(old := Old())).say(ASK)
        again = start(upstream, critic(), ledger=old).say([*ASK, turn.message, USER])
    assert again.content == "Bye."
    assert roles(upstream.chats[2]) == "suau"
    assert "call_critic" in offered(upstream.chats[2])


# ---------------------------------------------------------------------- memory


def test_memory_stays_flat_over_many_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_SAID", Memo(chat._SAID._make, 300_000))
    relay = Relay(Terms(), MemoryLedger(200_000), live=LiveSessions(300_000))
    script, critique = [calls(ask("c1")), {"role": "assistant", "content": "Done."}], Critique("As seen.", "Beware.")

    def whole(message: dict[str, Any]) -> bytes:
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return json.dumps({"id": "x", "object": "chat.completion", "choices": [choice]}).encode()

    def many(start: int, count: int) -> int:
        for n in range(start, start + count):
            drive(
                relay, {"messages": [{"role": "user", "content": f"Return order {n}."}]}, map(whole, script), critique
            )
        return tracemalloc.get_traced_memory()[0]

    many(0, 3600)
    tracemalloc.start()  # which makes all of it three times as slow
    try:
        base = many(3600, 400)
        grown = many(4000, 1000) - base
    finally:
        tracemalloc.stop()
    assert isinstance(relay.ledger, MemoryLedger)
    kept = relay.ledger.get([*relay.ledger._entries])
    assert len(kept) > 0
    assert sum(len(key) + len(json.dumps(entry)) for key, entry in kept.items()) < 250_000
    assert grown < 100_000, grown
    # the latest conversation is still there, the first is not
    for n, wanted in ((4999, 5), (0, 3)):
        history = [{"role": "user", "content": f"Return order {n}."}, {"role": "assistant", "content": "Done."}, USER]
        _, sent = drive(relay, {"messages": history}, map(whole, script[1:]), critique)
        assert len(sent[0]["messages"]) == wanted


def test_what_was_read_before_is_remembered_within_a_bound() -> None:
    memory = Memo(chat._said, 2_000_000)

    def fill(start: int, count: int) -> None:
        for n in range(start, start + count):
            memory(calls(look(str(n), f"a{n}")) if n % 2 else {"role": "user", "content": f"Return order {n}."})

    tracemalloc.start()
    try:
        fill(0, 6000)
        assert 300_000 < tracemalloc.get_traced_memory()[0] < 3_000_000
    finally:
        tracemalloc.stop()
