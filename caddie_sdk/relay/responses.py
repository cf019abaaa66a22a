"""The Responses API: what a request says, what goes upstream, and what the caller is answered.

Histories are lists of items, and a caller may leave them to the server (`previous_response_id`). The session behind
such a response is kept in the ledger under the response's id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from caddie_sdk.errors import ConfigError, MessageError
from caddie_sdk.messages import Message, text_of, wire_arguments
from caddie_sdk.relay.adopt import Said, Terms, Unadopted
from caddie_sdk.relay.chat import add_usage
from caddie_sdk.relay.exchange import Exchange
from caddie_sdk.relay.items import (
    CALL,
    RESULT,
    assistant_turn,
    chat_tools,
    flat_tool,
    is_function,
    kind_of,
    open_calls,
    read_items,
)
from caddie_sdk.relay.ledger import Ledger, beside
from caddie_sdk.relay.live import LiveSessions
from caddie_sdk.usage import Usage

_ELSEWHERE = ("conversation", "background", "prompt")
"""Fields that leave a part of the request to the server, where no session can follow."""

_BY_CONTENT = ("message", "reasoning", CALL, "custom_tool_call")
"""Items that servers take without an id; those of built-in tools must have one."""


class ResponsesRequest:
    """A request to `/v1/responses`. See `ChatRequest` for the attributes.

    Raises:
        Unadopted: it has no reading as a trajectory.
    """

    single = True

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        for name in _ELSEWHERE:
            if body.get(name):
                raise Unadopted(f"the request uses {name!r}")
        instructions = body.get("instructions")
        try:
            head = [Said({"role": "system", "content": instructions})] if isinstance(instructions, str) else []
            self.said = [*head, *read_items(body.get("input") or [])]
            self.tools = chat_tools(body.get("tools") or ())
        except (MessageError, ConfigError, TypeError) as error:
            raise Unadopted(str(error)) from error
        self.stream = bool(body.get("stream"))
        self.stored = body.get("store") is not False
        self.asks = (body.get("tool_choice") or "auto") in ("auto", "required")
        text = body.get("text")
        form = text.get("format") if isinstance(text, Mapping) else None
        self.quiet = isinstance(form, Mapping) and form.get("type", "text") != "text"
        self.previous = self._continues = body.get("previous_response_id")
        self._ledger: Ledger | None = None
        self._scope = ""
        self._ids: dict[str, str] = {}

    def exchange(self, terms: Terms, ledger: Ledger, scope: str, live: LiveSessions | None = None) -> Exchange:
        """The session of this request.

        Raises:
            Unadopted: the history has no reading as a trajectory.
        """
        self._ledger, self._scope = ledger, scope
        if not self.previous:
            return Exchange(self.said, self.tools, terms, ledger, scope, live)
        kept = _kept(ledger, scope, self.previous)
        self._continues, self._ids = kept.get("id") or self.previous, kept.get("ids", {})
        # What is new says nothing about what came before, so its keys belong to the response it continues.
        scope = f"{scope}/{self.previous}"
        exchange = Exchange(self.said, self.tools, terms, ledger, scope, base=kept.get("session"))
        exchange.known = kept.get("known", exchange.known)
        return exchange

    def upstream(self, exchange: Exchange) -> dict[str, Any]:
        """The body to send now: with all that is new since the response that the caller continues."""
        kinds: dict[str, str] = {}
        nodes = exchange.nodes(exchange.known)
        sent = [item for node in nodes for item in restate(*node, kinds)]
        body = {**self.body, "input": _in_ids_of(self._ids, sent)}
        if self.previous:
            body["previous_response_id"] = self._continues
        controls = exchange.session.controls_offered if self.asks else []
        if controls:
            body["tools"] = [*(self.body.get("tools") or ()), *map(flat_tool, controls)]
        return body

    def read(self, answer: Any) -> tuple[Message, tuple[Any, ...], Usage]:
        """What a response says: message, items to send back, usage.

        Raises:
            Unadopted: the answer is no response, or one that failed.
        """
        try:
            if answer.get("status") in ("failed", "cancelled"):
                raise Unadopted(f"the response is {answer['status']}")
            output = answer["output"]
            raw = tuple(item for item in map(self._sendable, output) if item is not None)
            return assistant_turn(output), raw, Usage.from_openai(answer.get("usage"))
        except (AttributeError, KeyError, TypeError, MessageError) as error:
            raise Unadopted(f"the answer is no response: {error!r}") from error

    def _sendable(self, item: Mapping[str, Any]) -> dict[str, Any] | None:
        """An output item as an input item.

        A server that stores items pairs reasoning with what follows it by their ids. One that does not must not be
        asked for an id, and only reasoning that it has encrypted means something to it.
        """
        kept = {key: value for key, value in item.items() if value is not None}
        if self.stored or kind_of(item) not in _BY_CONTENT:
            return kept
        if kind_of(item) == "reasoning" and not item.get("encrypted_content"):
            return None
        return {key: value for key, value in kept.items() if key not in ("id", "status")}

    def shown(self, answer: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
        """A response with what it repeats of the request as the caller wrote that."""
        told = dict(answer)
        if isinstance(told.get("tools"), list):
            hidden = exchange.session.config.controls
            told["tools"] = [tool for tool in told["tools"] if not (is_function(tool) and tool.get("name") in hidden)]
        if told.get("previous_response_id") is not None:
            told["previous_response_id"] = self.previous
        return told

    def compose(
        self,
        exchange: Exchange,
        answers: Sequence[Mapping[str, Any]],
        extension: Mapping[str, Any] | None,
        told: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response the caller gets: the last one, with the items of those on the way to it.

        Args:
            exchange: at its end.
            answers: the upstream's responses.
            extension: see `Exchange.report`.
            told: what a stream has said of the response (its id) before the later ones were known.
        """
        last = answers[-1]
        output = [item for answer in answers[:-1] for item in self._between(answer["output"])]
        output += visible_items(last["output"], exchange)
        composed = {**self.shown(last, exchange), **(told or {}), "output": output}
        for answer in reversed(answers[:-1]):
            composed["usage"] = add_usage(answer.get("usage"), composed.get("usage"))
        self._save(exchange, output)
        self._keep(exchange, composed.get("id"), last)
        return composed if extension is None else {**composed, "caddie": extension}

    def _between(self, items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """What the caller sees of a turn after which the model went on: none of its calls was the caller's."""
        calls = open_calls(items)
        return [item for item in items if item not in calls and not (self.quiet and kind_of(item) == "message")]

    def _save(self, exchange: Exchange, output: Sequence[Mapping[str, Any]]) -> None:
        visible, texts = assistant_turn(output), output_texts(output)
        # Some callers send back `output_text` alone: the client joins it with nothing between.
        joined: Message = {**visible, "content": "".join(texts)}
        exchange.save(visible, *([joined] if len(texts) > 1 else []))

    def _keep(self, exchange: Exchange, shown: Any, last: Mapping[str, Any]) -> None:
        """Remember the session, and the response that the server knows it by, for a request that continues this one.

        Callers who send their history themselves do so from their second request on.
        """
        if self._ledger is None or not self.stored:
            return
        told, calls = last.get("id"), zip(open_calls(last["output"]), exchange.last_calls(), strict=False)
        ids = {
            ours["id"]: str(theirs.get("call_id") or "")
            for theirs, ours in calls
            if theirs.get("call_id") != ours["id"]
        }
        answers = _in_ids_of(ids, hidden_results(exchange))
        if shown != told or ids or answers or self.previous or not self._own_history():
            kept = {"id": told, "ids": ids, "answers": answers, "known": exchange.heard}
            self._ledger.put(_key(self._scope, shown), {**kept, "session": exchange.session.dump()})

    def _own_history(self) -> bool:
        """Whether the input repeats what a server has said; examples that the caller made up carry no ids."""
        turns = [item.raw for item in self.said if item.message["role"] == "assistant"]
        return any(item.get("id") or kind_of(item) != "message" for raw in turns for item in raw)


def settled(body: Mapping[str, Any], ledger: Ledger, scope: str) -> dict[str, Any]:
    """A request that no session can follow, with the response it continues as the server knows that."""
    kept = _kept(ledger, scope, body["previous_response_id"]) if body.get("previous_response_id") else {}
    if not kept:
        return dict(body)
    given = body.get("input") or []
    given = [{"role": "user", "content": given}] if isinstance(given, str) else given
    answers, ids = kept.get("answers") or [], kept.get("ids") or {}
    changed = {"input": [*answers, *_in_ids_of(ids, given)]} if (answers or ids) and isinstance(given, list) else {}
    return {**body, "previous_response_id": kept.get("id") or body["previous_response_id"], **changed}


def _in_ids_of(ids: Mapping[str, str], items: Sequence[Any]) -> list[Any]:
    """Results under the ids by which a server that keeps the history knows their calls; some servers use an id twice.

    Args:
        ids: of calls in the response that is continued: the caller's to the server's.
        items: of a request.
    """
    if not ids:
        return list(items)
    return [
        {**item, "call_id": ids[item["call_id"]]}
        if isinstance(item, Mapping) and kind_of(item).endswith("_output") and str(item.get("call_id")) in ids
        else item
        for item in items
    ]


def _key(scope: str, response_id: Any) -> str:
    return beside(scope, f"response:{response_id}")


def _kept(ledger: Ledger, scope: str, response_id: Any) -> dict[str, Any]:
    key = _key(scope, response_id)
    return ledger.get([key]).get(key) or {}


def hidden_results(exchange: Exchange) -> list[dict[str, Any]]:
    """What belongs behind the last response and the server was not told: refusals after which the turn ended, and in
    a turn that is open the advice and what was held back."""
    told = [item for message, _ in exchange.nodes(exchange.heard) for item in restate(message, None, {})]
    calls = (exchange.session.turn or {"calls": ()})["calls"]
    return told + [
        {"type": RESULT, "call_id": call["id"], "output": call["content"]} for call in calls if "content" in call
    ]


def output_texts(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts that the client's `output_text` joins."""
    parts = [part for item in items if kind_of(item) == "message" for part in item.get("content") or ()]
    found = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "output_text"]
    return [text for text in found if isinstance(text, str)]


def visible_items(items: Sequence[Mapping[str, Any]], exchange: Exchange) -> list[Mapping[str, Any]]:
    """The items of the last turn that are the caller's, with the ids under which its calls are stored."""
    visible = {call["id"] for call in exchange.visible().get("tool_calls", ())}
    stored, calls = iter(exchange.last_calls()), open_calls(items)
    shown: list[Mapping[str, Any]] = []
    for item in items:
        if item not in calls:
            shown.append(item)
        elif (call := next(stored, None)) is not None and call["id"] in visible:
            shown.append(item if item.get("call_id") == call["id"] else {**item, "call_id": call["id"]})
    return shown


def restate(message: Message, raw: Sequence[Any] | None, kinds: dict[str, str]) -> list[Any]:
    """A stored message as input items: as its author wrote it, with ids and arguments that a strict server accepts.

    Args:
        message: of the session's history.
        raw: as its author wrote it; None for the session's own words.
        kinds: call id to the type of its item, where that is no function call; read and added to.
    """
    if message["role"] == "tool":
        return _restated_result(message, raw, kinds)
    if raw is None:
        return _items(message)
    calls, restated = iter(message.get("tool_calls", ())), []
    waiting = open_calls(raw) if message["role"] == "assistant" else []
    for item in raw:
        call = next(calls, None) if item in waiting else None
        if call is not None:
            kinds[call["id"]] = kind_of(item)
        restated.append(item if call is None else _restated(item, call))
    return restated


def _restated_result(message: Message, raw: Sequence[Any] | None, kinds: Mapping[str, str]) -> list[Any]:
    call_id = message["tool_call_id"]
    if raw is None:
        kind = "custom_tool_call" if kinds.get(call_id) == "custom_tool_call" else CALL
        return [{"type": f"{kind}_output", "call_id": call_id, "output": text_of(message)}]
    return [{**item, "call_id": call_id} if "call_id" in item else item for item in raw[:1]]


def _restated(item: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    if kind_of(item) != CALL:
        return {**item, "call_id": call["id"]}
    return {**item, "call_id": call["id"], "arguments": wire_arguments(call["function"]["arguments"])}


def _items(message: Message) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = (
        [{"role": message["role"], "content": message["content"]}] if message["content"] else []
    )
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = wire_arguments(function["arguments"])
        said.append({"type": CALL, "call_id": call["id"], "name": function["name"], "arguments": arguments})
    return said
