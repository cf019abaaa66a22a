"""Whatever a model says, and whatever breaks on the way: the same conversation through the relay in every manner.

A model server is played without sockets, so that hundreds of conversations can be had: JSON and streams cut anywhere,
histories of the caller's own and kept ones, connections that fail. The server refuses what real ones refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise, product
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from responding import ADVICE, REFUND, SEARCH, assert_nothing_hidden, checked_json, events_of, message

from caddie_sdk.critique import Critique
from caddie_sdk.intervention import parse_protocol
from caddie_sdk.relay.adopt import Terms
from caddie_sdk.relay.flow import Answer, Ask, Emit, Read, Relay, Send, Start
from caddie_sdk.relay.items import CALLS
from caddie_sdk.relay.ledger import MemoryLedger
from caddie_sdk.relay.sse import EventReader

WORDS = ("think", "say", "ask", "search", "refund", "custom", "web")
FAULTS = ("none", "none", "none", "refused", "500", "cut")
Turn = Sequence[str]


class Broken(Exception):
    """The connection failed."""


def item_of(word: str, number: int) -> dict[str, Any]:
    call = {"call_id": f"call_{number}", "status": "completed", "id": f"it_{number}"}
    match word:
        case "think":
            return {"id": f"rs_{number}", "type": "reasoning", "summary": [], "encrypted_content": f"E{number}"}
        case "say":
            return message(f"text {number}", f"msg_{number}")
        case "web":
            return {"id": f"ws_{number}", "type": "web_search_call", "status": "completed"}
        case "custom":
            return {**call, "type": "custom_tool_call", "name": "patch", "input": f"input {number}"}
    name = {"ask": "call_critic"}.get(word, word)
    return {**call, "type": "function_call", "name": name, "arguments": json.dumps({"n": number})}


@dataclass
class Server:
    """Says its turns one after the other, then a last text; keeps what it said, and refuses what does not pair up.

    Attributes:
        seen: the whole conversation at the latest request.
    """

    turns: Sequence[Turn]
    faults: Sequence[str]
    kept: dict[str, list[Any]] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)
    said: int = 0
    requests: int = 0

    def answer(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The next response, and the fault that befalls it."""
        previous = body.get("previous_response_id")
        assert previous is None or previous in self.kept, f"{previous} not found"
        self.seen = [*self.kept.get(previous or "", ()), *body["input"]]
        self._check()
        fault = self.faults[self.requests] if self.requests < len(self.faults) else "none"
        self.requests += 1
        words = self.turns[self.said] if self.said < len(self.turns) else ("say",)
        output = [item_of(word, self.said * 10 + place) for place, word in enumerate(words)]
        response = {
            "id": f"resp_{self.requests}", "object": "response", "created_at": self.requests, "model": "m",
            "status": "completed", "output": output, "tools": body["tools"], "previous_response_id": previous,
            "usage": {"input_tokens": 10, "output_tokens": 1, "total_tokens": 11},
        }  # fmt: skip
        if fault == "none":
            self.said += 1
            if body.get("store") is not False:
                self.kept[response["id"]] = [*self.seen, *output]
        return response, fault

    def _check(self) -> None:
        waiting: list[tuple[str, str]] = []
        for item in self.seen:
            kind = str(item.get("type") or "message")
            if kind in CALLS:
                waiting.append((item["call_id"], f"{kind}_output"))
            elif kind.endswith("_output"):
                assert (item["call_id"], kind) in waiting, f"no call for {item} in {self.seen}"
                waiting.remove((item["call_id"], kind))
            elif item.get("role") == "user":
                assert not waiting, f"no result for {waiting} in {self.seen}"
        assert not waiting, f"no result for {waiting} in {self.seen}"
        ids = [item["call_id"] for item in self.seen if item.get("type") in CALLS]
        assert len(ids) == len(set(ids))


@dataclass
class Talk:
    """A caller with its relay and server, in one manner of calling.

    Attributes:
        by_id: whether the server keeps the history, or the caller.
        restarts: whether every request meets a new process, which knows what the ledger knows.
    """

    server: Server
    terms: Terms
    stream: bool
    by_id: bool
    restarts: bool
    cut: int
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    critiques: list[Any] = field(default_factory=list)

    def have(self) -> list[Any]:
        """The whole conversation, as the server sees it at its end."""
        self.relay = Relay(self.terms, self.ledger)
        history: list[Any] = [{"role": "user", "content": "Task"}]
        new, previous, turns = list(history), None, count(1)
        while True:
            body: dict[str, Any] = {"model": "m", "input": new if self.by_id else history, "stream": self.stream}
            body["tools"] = [SEARCH, REFUND, {"type": "custom", "name": "patch"}]
            body |= {"previous_response_id": previous} if previous else {}
            body |= {} if self.by_id else {"store": False}
            ended = self.server.said >= len(self.server.turns)
            response = self._until_it_works(body)
            assert response.get("previous_response_id") == previous
            previous = response["id"] if self.by_id else None
            made = [item for item in response["output"] if item["type"] in CALLS]
            new = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "found"} for item in made]
            if not made:
                if ended or self.server.said > len(self.server.turns):
                    return self.server.seen
                new = [{"role": "user", "content": f"More {next(turns)}"}]
            history += [*response["output"], *new]

    def _until_it_works(self, body: Mapping[str, Any]) -> dict[str, Any]:
        for _ in range(20):
            try:
                response = self._request(body)
            except Broken:
                continue
            if response is not None:
                return response
        raise AssertionError("the relay never answers")

    def _request(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """The response, None where the request failed."""
        if self.restarts:
            self.relay = Relay(self.terms, self.ledger)
        flow = self.relay.flow("/v1/responses", {}, json.dumps(body).encode())
        upstream: list[Any] = []
        shown, status, value = b"", 0, None
        step: Any = next(flow)
        try:
            while True:
                match step:
                    case Send(sent):
                        response, fault = self.server.answer(json.loads(sent))
                        if fault == "refused":
                            step = flow.throw(Broken())
                            continue
                        upstream = self._pieces(response, fault)
                        head = {"content-type": "text/event-stream" if self.stream else "application/json"}
                        value = Answer(500 if fault == "500" else 200, head)
                    case Read():
                        value = upstream.pop(0) if upstream else None
                        if isinstance(value, Broken):
                            step = flow.throw(value)
                            continue
                    case Ask(state):
                        self.critiques.append(state)
                        value = Critique(*ADVICE)
                    case Start():
                        status, value = step.status, None
                    case Emit(data):
                        shown, value = shown + data, None
                step = flow.send(value)
        except StopIteration:
            pass
        return self._read(status, shown)

    def _pieces(self, response: Mapping[str, Any], fault: str) -> list[Any]:
        if self.stream and fault != "500":
            events = [json.dumps(event) for event in events_of(response)]
            whole = "".join(f"data: {event}\n\n" for event in events).encode()
        else:
            whole = json.dumps({"error": {"message": "no"}} if fault == "500" else response).encode()
        pieces: list[Any] = [whole[start : start + self.cut] for start in range(0, len(whole), self.cut)]
        return [*pieces[: len(pieces) // 2], Broken()] if fault == "cut" else pieces

    def _read(self, status: int, shown: bytes) -> dict[str, Any] | None:
        if status != 200:
            return None
        if not self.stream:
            response = json.loads(shown)
            assert_nothing_hidden(response)
            return dict(response)
        events = [event.json() for event in EventReader().feed(shown)]
        if "error" in events[-1]:
            return None
        return checked_json(events)


def plain(items: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Items without what depends on the manner: ids of items, and the order of one turn's results."""
    bare = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in items]
    done: list[Any] = []
    for item in bare:
        if str(item.get("type")).endswith("_output"):
            done[-1] = sorted([*done[-1], json.dumps(item)]) if isinstance(done[-1], list) else done[-1]
            if not isinstance(done[-1], list):
                done.append([json.dumps(item)])
        else:
            done.append(item)
    return done


def audible(turn: list[str]) -> list[str]:
    """A caller who keeps the history must have been shown something of a turn: else it is gone."""
    return ["say", *turn] if set(turn) == {"ask"} else turn


TURNS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(audible), min_size=1, max_size=7)
PROTOCOLS = st.sampled_from(["self-call", "guarded:refund", "fixed:0,2", "probabilistic:0.5"])


def talks(turns: Sequence[Turn], protocol: str, faults: Sequence[str], cut: int) -> list[Talk]:
    terms, either = Terms(protocol=parse_protocol(protocol)), (False, True)
    manners = product(either, either, either)
    return [Talk(Server(turns, faults), terms, stream, by_id, restarts, cut) for stream, by_id, restarts in manners]


@example(turns=[["say", "ask"]] * 8 + [["search", "ask"], ["ask"], ["say"]], protocol="self-call", cut=64)
@given(TURNS, PROTOCOLS, st.sampled_from([1, 7, 64, 5000]))
@settings(max_examples=30, deadline=None)
def test_every_manner_of_calling_is_the_same_conversation(turns: list[list[str]], protocol: str, cut: int) -> None:
    had = talks(turns, protocol, (), cut)
    ends = [plain(talk.have()) for talk in had]
    for one, other in pairwise(ends):
        assert one == other
    for first, second in pairwise(had):
        assert [state.events for state in first.critiques] == [state.events for state in second.critiques]


@given(TURNS, PROTOCOLS, st.lists(st.sampled_from(FAULTS), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_no_fault_leaves_a_conversation_that_cannot_go_on(
    turns: list[list[str]], protocol: str, faults: list[str]
) -> None:
    for talk in talks(turns, protocol, faults, 64):
        seen = talk.have()
        assert seen[0] == {"role": "user", "content": "Task"}
        uses = sum("Search for zanzibar" in str(item.get("output")) for item in seen)
        assert uses == len(talk.critiques)  # no advice is lost, and none is asked for twice
