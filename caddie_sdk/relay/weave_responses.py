"""Several event streams of the Responses API as one, in which calls of the control tools never show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caddie_sdk.messages import Message
from caddie_sdk.relay import sse
from caddie_sdk.relay.adopt import Unadopted
from caddie_sdk.relay.exchange import Exchange
from caddie_sdk.relay.items import CALL, CALLS, kind_of
from caddie_sdk.relay.responses import ResponsesRequest
from caddie_sdk.relay.weave import StreamState
from caddie_sdk.usage import Usage

_BEGIN = ("response.created", "response.in_progress", "response.queued")
_END = ("response.completed", "response.incomplete")
_FACTS = ("id", "created_at")
"""What the beginning of a stream tells of a response, and its end must repeat."""


class ResponsesWeaver:
    """The visible stream of one request, over all the upstream streams that it takes. See `ChatWeaver`."""

    def __init__(self, request: ResponsesRequest, exchange: Exchange) -> None:
        self._request, self._exchange = request, exchange
        self._session, self._config = exchange.session, exchange.session.config
        self._sequence = self._visible = 0
        self._answers: list[dict[str, Any]] = []
        self._told: dict[str, Any] = {}
        self._held: dict[Any, list[dict[str, Any]]] = {}
        self._kinds: dict[Any, str] = {}
        self._late = b""
        self.begin()

    def begin(self) -> None:
        """Another upstream stream follows."""
        self._late = self._released(lambda index: self._kinds[index] not in CALLS and not self._silent(index))
        self._shown: dict[Any, int] = {}
        self._ids: dict[Any, str] = {}
        self._kinds = {}
        self._held = {}
        self._hidden: set[Any] = set()
        self._done: dict[Any, Mapping[str, Any]] = {}
        self.state: StreamState = "open"

    def feed(self, event: sse.ServerEvent) -> bytes:
        """What the caller gets of one upstream event."""
        late, self._late = self._late, b""
        return late + self._fed(event)

    def _fed(self, event: sse.ServerEvent) -> bytes:
        data = event.json()
        if not isinstance(data, dict):
            self.state = "failed"
            return sse.event(event.data, event.name)
        kind = str(data.get("type", event.name))
        if kind in ("error", "response.failed") or data.get("error"):
            self.state = "failed"
            return self._numbered(self._as_told(data))
        if kind in _END:
            return self._ended(data)
        if kind in _BEGIN:
            return b"" if self._answers else self._begun(data)
        return self._item_event(kind, data)

    def _begun(self, data: dict[str, Any]) -> bytes:
        response = data.get("response")
        if isinstance(response, dict):
            self._told = {name: response[name] for name in _FACTS if name in response}
        return self._numbered(self._as_told(data))

    def _ended(self, data: dict[str, Any]) -> bytes:
        answer = data.get("response")
        try:
            if not isinstance(answer, dict):
                raise Unadopted("the last event has no response")
            if not answer.get("output") and self._done:  # some servers leave them out at the end
                answer["output"] = [self._done[index] for index in sorted(self._done)]
            self._turn = self._request.read(self._with_ids(answer))
        except Unadopted:
            self.state = "failed"
            return self._numbered(data)
        self._answers.append(answer)
        self._last, self.state = data, "over"
        return b""

    def _with_ids(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """A response with its calls under the ids that they are stored by, as the stream has told them."""
        ids, output = iter(self._ids[index] for index in sorted(self._ids)), answer.get("output")
        if not isinstance(output, list):
            return answer
        return {
            **answer,
            "output": [
                {**item, "call_id": next(ids, item.get("call_id"))}
                if isinstance(item, dict) and kind_of(item) in CALLS
                else item
                for item in output
            ],
        }

    def _as_told(self, data: dict[str, Any]) -> dict[str, Any]:
        """An event with a response in it, that response under the facts told first, and nothing hidden in it."""
        response = data.get("response")
        if not isinstance(response, dict):
            return data
        output = [item for item in response.get("output") or () if not self._is_control(item)]
        told = {**self._request.shown(response, self._exchange), **self._told, "output": output}
        return {**data, "response": told if "output" in response else {**told, "output": []}}

    def _is_control(self, item: Any) -> bool:
        return isinstance(item, dict) and kind_of(item) == CALL and item.get("name") in self._config.controls

    def _item_event(self, kind: str, data: dict[str, Any]) -> bytes:
        index = data.get("output_index")
        if index is None:
            return self._numbered(data)
        item = data.get("item")
        if isinstance(item, dict) and index not in self._kinds:
            self._admit(index, item)
        if isinstance(item, dict) and kind == "response.output_item.done":
            self._done[index] = item
        if index in self._hidden:
            return b""
        if index in self._held:
            self._held[index].append(data)
            return b""
        return self._numbered(self._mapped(index, data))

    def _admit(self, index: Any, item: Mapping[str, Any]) -> None:
        """Decide what becomes of an item: it shows, it never does, or that is seen at the end of the turn."""
        self._kinds[index] = kind_of(item)
        guarded = False
        if kind_of(item) in CALLS:
            name, proposed = str(item.get("name")), str(item.get("call_id") or "")
            self._ids[index] = self._session.call_id(proposed, set(self._ids.values()))
            guarded = self._config.protocol.guards(name)
        if self._is_control(item):
            self._hidden.add(index)
        elif guarded or self._held or self._silent(index):
            # Whatever comes after a held item is held as well, so that the order of the items stays.
            self._held[index] = []

    def _silent(self, index: Any) -> bool:
        """Whether an item is a text that may turn out not to be the answer, for a caller who parses that."""
        return self._request.quiet and self._kinds[index] == "message"

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

    def _released(self, chosen: Any) -> bytes:
        """The events of held items after all, of those that are chosen by their index."""
        return b"".join(
            self._numbered(self._mapped(index, data))
            for index, events in self._held.items()
            if chosen(index)
            for data in events
        )

    def broke_off(self) -> bool:
        """At the end of the upstream's bytes: whether the turn is not whole."""
        return self.state != "over"

    def turn(self) -> tuple[Message, tuple[Any, ...], Usage]:
        """The turn that this upstream stream was: message, items to send back, usage."""
        return self._turn

    def end(self, extension: Mapping[str, Any] | None) -> bytes:
        """The rest: what was held back and is the caller's after all, and the response as a whole."""
        visible = {call["id"] for call in self._exchange.visible().get("tool_calls", ())}
        shown = self._released(lambda index: index not in self._ids or self._ids[index] in visible)
        response = self._request.compose(self._exchange, self._answers, extension, self._told)
        return self._late + shown + self._numbered({**self._last, "response": response})
