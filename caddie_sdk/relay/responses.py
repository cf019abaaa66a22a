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
from caddie_sdk.relay.items import CALL, RESULT, assistant_turn, chat_tools, flat_tool, read_items
from caddie_sdk.relay.ledger import Ledger, beside
from caddie_sdk.usage import Usage

_ELSEWHERE = ("conversation", "background", "prompt")
"""Fields that leave a part of the request to the server, where no session can follow."""


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
        self.asks = (body.get("tool_choice") or "auto") in ("auto", "required")
        form = (body.get("text") or {}).get("format") or {}
        self.quiet = form.get("type", "text") != "text"
        self.previous = self._continues = body.get("previous_response_id")
        self._ledger: Ledger | None = None
        self._scope = ""

    def exchange(self, terms: Terms, ledger: Ledger, scope: str) -> Exchange:
        """The session of this request.

        Raises:
            Unadopted: the history has no reading as a trajectory.
        """
        self._ledger, self._scope = ledger, scope
        if not self.previous:
            return Exchange(self.said, self.tools, terms, ledger, scope)
        key = self._key(self.previous)
        kept = ledger.get([key]).get(key) or {}
        self._continues = kept.get("id") or self.previous
        # What is new says nothing about what came before, so its keys belong to the response it continues.
        return Exchange(self.said, self.tools, terms, ledger, f"{scope}/{self.previous}", kept.get("session"))

    def _key(self, response_id: Any) -> str:
        return beside(self._scope, f"response:{response_id}")

    def upstream(self, exchange: Exchange) -> dict[str, Any]:
        """The body to send now: with all that is new since the response that the caller continues."""
        nodes = exchange.nodes(exchange.known)
        body = {**self.body, "input": [item for node in nodes for item in restate(*node)]}
        if self.previous:
            body["previous_response_id"] = self._continues
        controls = exchange.session.controls_offered if self.asks else []
        if controls:
            body["tools"] = [*(self.body.get("tools") or ()), *map(flat_tool, controls)]
        return body

    def read(self, answer: Any) -> tuple[Message, tuple[Any, ...], Usage]:
        """What a response says: message, items to send back, usage.

        Raises:
            Unadopted: the answer is no response.
        """
        try:
            output = answer["output"]
            raw = tuple(item for item in map(self._sendable, output) if item is not None)
            return assistant_turn(output), raw, Usage.from_openai(answer.get("usage"))
        except (AttributeError, KeyError, TypeError, MessageError) as error:
            raise Unadopted(f"the answer is no response: {error!r}") from error

    def _sendable(self, item: Mapping[str, Any]) -> dict[str, Any] | None:
        """An output item as an input item. A server that stores nothing knows no item by its id."""
        if item.get("type") == "reasoning":
            stored = self.body.get("store", True) or item.get("encrypted_content")
            return dict(item) if stored else None
        return {key: value for key, value in item.items() if key not in ("id", "status") and value is not None}

    def compose(
        self, exchange: Exchange, answers: Sequence[Mapping[str, Any]], extension: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The response the caller gets: the last one, with the items of those on the way to it.

        Its id is that of the first one, which a stream has told before the others are known.
        """
        last = answers[-1]
        output = [item for answer in answers[:-1] if not self.quiet for item in _without_calls(answer["output"])]
        output += visible_items(last["output"], exchange)
        composed = {**last, "id": answers[0].get("id"), "output": output}
        for answer in reversed(answers[:-1]):
            composed["usage"] = add_usage(answer.get("usage"), composed.get("usage"))
        exchange.save(assistant_turn(output))
        self._keep(exchange, composed["id"], last.get("id"))
        return composed if extension is None else {**composed, "caddie": extension}

    def _keep(self, exchange: Exchange, shown: Any, upstream: Any) -> None:
        """Remember the session, and the response that the server knows it by, for a request that continues this one.

        Callers who send their history themselves do so from their second request on.
        """
        if self._ledger is None or not self.body.get("store", True):
            return
        own_history = any(item.message["role"] == "assistant" for item in self.said)
        if not own_history or shown != upstream:
            self._ledger.put(self._key(shown), {"id": upstream, "session": exchange.session.dump()})


def _without_calls(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [item for item in items if item.get("type") != CALL]


def visible_items(items: Sequence[Mapping[str, Any]], exchange: Exchange) -> list[Mapping[str, Any]]:
    """The items of the last turn that are the caller's, with the ids under which its calls are stored."""
    visible = {call["id"] for call in exchange.visible().get("tool_calls", ())}
    stored = iter(exchange.last_calls())
    shown: list[Mapping[str, Any]] = []
    for item in items:
        if item.get("type") != CALL:
            shown.append(item)
        elif (call := next(stored, None)) is not None and call["id"] in visible:
            shown.append(item if item.get("call_id") == call["id"] else {**item, "call_id": call["id"]})
    return shown


def restate(message: Message, raw: Sequence[Any] | None) -> list[Any]:
    """A stored message as input items: as its author wrote it, with ids and arguments that a strict server accepts."""
    if raw is None:
        return _items(message)
    if message["role"] == "tool":
        return [{**raw[0], "call_id": message["tool_call_id"]}] if raw else []
    calls = iter(message.get("tool_calls", ()))
    return [_restated(item, next(calls, None)) if item.get("type") == CALL else item for item in raw]


def _restated(item: Mapping[str, Any], call: Mapping[str, Any] | None) -> dict[str, Any]:
    if call is None:
        return dict(item)
    return {**item, "call_id": call["id"], "arguments": wire_arguments(call["function"]["arguments"])}


def _items(message: Message) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [{"type": RESULT, "call_id": message["tool_call_id"], "output": text_of(message)}]
    said: list[dict[str, Any]] = (
        [{"role": message["role"], "content": message["content"]}] if message["content"] else []
    )
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = wire_arguments(function["arguments"])
        said.append({"type": CALL, "call_id": call["id"], "name": function["name"], "arguments": arguments})
    return said
