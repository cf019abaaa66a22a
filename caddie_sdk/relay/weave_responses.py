"""Several event streams of the Responses API as one, in which calls of the control tools never show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caddie_sdk.messages import Message
from caddie_sdk.relay import sse
from caddie_sdk.relay.exchange import Exchange
from caddie_sdk.relay.items import CALL
from caddie_sdk.relay.responses import ResponsesRequest
from caddie_sdk.relay.weave import StreamState
from caddie_sdk.usage import Usage

_BEGIN = ("response.created", "response.in_progress", "response.queued")
_END = ("response.completed", "response.incomplete", "response.failed")


class ResponsesWeaver:
    """The visible stream of one request, over all the upstream streams that it takes. See `ChatWeaver`."""

    def __init__(self, request: ResponsesRequest, exchange: Exchange) -> None:
        self._request, self._exchange = request, exchange
        self._session, self._config = exchange.session, exchange.session.config
        self._sequence = self._visible = 0
        self._answers: list[dict[str, Any]] = []
        self._last = ""
        self.begin()

    def begin(self) -> None:
        """Another upstream stream follows."""
        self._shown: dict[Any, int] = {}
        self._ids: dict[Any, str] = {}
        self._held: dict[Any, list[dict[str, Any]]] = {}
        self._hidden: set[Any] = set()
        self.state: StreamState = "open"

    def feed(self, event: sse.ServerEvent) -> bytes:
        """What the caller gets of one upstream event."""
        data = event.json()
        kind = data.get("type", event.name) if isinstance(data, dict) else ""
        if not isinstance(data, dict) or kind == "error" or "error" in data:
            self.state = "failed"
            return sse.event(event.data, event.name)
        if kind in _END:
            self._answers.append(data.get("response") or {})
            self._last, self.state = kind, "over"
            return b""
        if kind in _BEGIN:
            return b"" if self._answers else self._numbered(data)
        return self._item_event(kind, data)

    def _item_event(self, kind: str, data: dict[str, Any]) -> bytes:
        index = data.get("output_index")
        if index is None:
            return self._numbered(data)
        if kind == "response.output_item.added":
            self._admit(index, data.get("item") or {})
        if index in self._hidden:
            return b""
        if index in self._held:
            self._held[index].append(data)
            return b""
        return self._numbered(self._mapped(index, data))

    def _admit(self, index: Any, item: Mapping[str, Any]) -> None:
        """Decide what becomes of an item: it shows, it never does, or that is seen at the end of the turn."""
        if item.get("type") == CALL:
            name = str(item.get("name"))
            proposed = str(item.get("call_id") or "")
            self._ids[index] = self._session.call_id(proposed, set(self._ids.values()))
            if name in self._config.controls:
                self._hidden.add(index)
            elif self._config.protocol.guards(name):
                self._held[index] = []
        elif item.get("type") == "message" and self._request.quiet:
            self._held[index] = []

    def _mapped(self, index: Any, data: dict[str, Any]) -> dict[str, Any]:
        """The event under the caller's own count and the id of the stored call."""
        if index not in self._shown:
            self._shown[index], self._visible = self._visible, self._visible + 1
        data = {**data, "output_index": self._shown[index]}
        if index in self._ids and isinstance(data.get("item"), dict):
            data["item"] = {**data["item"], "call_id": self._ids[index]}
        return data

    def _numbered(self, data: dict[str, Any]) -> bytes:
        if "sequence_number" in data:
            data = {**data, "sequence_number": self._sequence}
            self._sequence += 1
        return sse.event(data, str(data.get("type", "")))

    def broke_off(self) -> bool:
        """At the end of the upstream's bytes: whether the turn is not whole."""
        return self.state != "over"

    def turn(self) -> tuple[Message, tuple[Any, ...], Usage]:
        """The turn that this upstream stream was: message, items to send back, usage."""
        answer = self._answers[-1]
        calls = iter(self._ids[index] for index in sorted(self._ids))
        answer["output"] = [
            {**item, "call_id": next(calls, item.get("call_id"))} if item.get("type") == CALL else item
            for item in answer.get("output") or ()
        ]
        return self._request.read(answer)

    def end(self, extension: Mapping[str, Any] | None) -> bytes:
        """The rest: what was held back and is the caller's after all, and the response as a whole."""
        visible = {call["id"] for call in self._exchange.visible().get("tool_calls", ())}
        shown = b""
        for index, events in self._held.items():
            if index not in self._ids or self._ids[index] in visible:
                shown += b"".join(self._numbered(self._mapped(index, data)) for data in events)
        response = self._request.compose(self._exchange, self._answers, extension)
        final = {"type": self._last, "response": response, "sequence_number": self._sequence}
        return shown + self._numbered(final)
