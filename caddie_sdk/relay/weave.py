"""Several chat-completion streams as one: text passes as it arrives, calls of the control tools never show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from caddie_sdk.messages import Message, dump_json, parse_arguments
from caddie_sdk.relay import sse
from caddie_sdk.relay.adopt import BETWEEN
from caddie_sdk.relay.chat import ChatRequest, add_usage, finish_reason
from caddie_sdk.relay.exchange import Exchange
from caddie_sdk.usage import Usage

_FRAME = ("id", "object", "created", "model", "system_fingerprint", "service_tier")
"""What the chunks of one stream have in common; whatever else stands beside `choices` belongs to its chunk."""
_JOINED = ("content", "reasoning_content", "reasoning")
"""Texts that go on over several turns, parted by a blank line."""
_TEXTS = (*_JOINED, "refusal")
"""Fields of a delta that come in pieces and add up."""


class _Call:
    """One tool call as its pieces come in."""

    def __init__(self, id: str, proposed: str) -> None:
        self.id, self.proposed = id, proposed
        self.raw: dict[str, Any] = {"id": id, "type": "function", "function": {"name": "", "arguments": ""}}
        self.pieces = 0
        self.repeats = False
        """Whether later pieces name the tool again."""
        self.complete = False
        """Whether the name has come to its end."""
        self.sent: int | None = None
        """Index under which the caller sees it; None while it is held back."""

    @property
    def name(self) -> str:
        return str(self.raw["function"]["name"])

    def add(self, piece: Mapping[str, Any]) -> dict[str, Any]:
        """Take a piece in; returns what of it is new."""
        function, own = dict(piece.get("function") or {}), self.raw["function"]
        self.repeats = self.repeats or bool(self.pieces and function.get("name"))
        self.pieces += 1
        if function.get("name") == own["name"]:
            function.pop("name", None)  # some servers repeat the whole name in every piece; others send it in parts
        arguments = function.get("arguments") or ""
        function["arguments"] = arguments if isinstance(arguments, str) else dump_json(arguments)
        own["name"] += function.get("name") or ""
        own["arguments"] += function["arguments"]
        self.complete = self.complete or bool(function["arguments"])
        rest = {key: value for key, value in piece.items() if key not in ("index", "id", "type", "function")}
        self.raw |= {key: value for key, value in rest.items() if value is not None}
        return {**rest, "function": function}

    def followed_by(self, id: str, function: Mapping[str, Any]) -> bool:
        """Whether a piece in this call's place begins another one: a new id, or arguments after the end of these."""
        if not function.get("name"):
            return False
        if id and id != self.proposed:
            return True
        own = self.raw["function"]["arguments"]
        return bool(own and parse_arguments(own) is not None and (function.get("arguments") or not self.repeats))


StreamState = Literal["open", "over", "failed"]


class ChatWeaver:
    """The visible stream of one request, over all the upstream streams that it takes.

    Args:
        request: what was asked.
        exchange: its session.

    Attributes:
        state: of the upstream stream at hand; `over` when the server said so, `failed` when it told an error.
    """

    def __init__(self, request: ChatRequest, exchange: Exchange) -> None:
        self._request, self._exchange, self.quiet = request, exchange, request.quiet
        self._session, config = exchange.session, exchange.session.config
        self._controls, self._holds = config.controls, config.protocol.guards
        self._names = {tool["function"]["name"] for tool in request.tools} | set(config.controls)
        self._frame: dict[str, Any] = {}
        self._visible_calls = 0
        self._spoken: set[str] = set()
        self._role_sent = False
        self.usage: Any = None
        self.begin()

    def begin(self) -> None:
        """Another upstream stream follows."""
        self._calls: list[_Call] = []
        self._at: dict[Any, _Call] = {}
        self._said: dict[str, str] = {}
        self._also: dict[str, Any] = {}
        self._begun: set[str] = set()
        self._held_text: list[dict[str, Any]] = []
        self._beside: dict[str, Any] = {}
        self._turn_usage: Any = None
        self.finish: str | None = None
        self.state: StreamState = "open"

    # ------------------------------------------------------------------ pieces in, pieces out

    def feed(self, event: sse.ServerEvent) -> bytes:
        """What the caller gets of one upstream event."""
        if event.data == sse.DONE:
            self.state = "over"
            return b""
        chunk = event.json()
        if not isinstance(chunk, dict) or "error" in chunk:
            self.state = "failed"
            return sse.event(event.data, event.name)
        return b"".join(map(sse.event, self._chunk_came(chunk)))

    def broke_off(self) -> bool:
        """At the end of the upstream's bytes: whether the turn is not whole."""
        return self.state == "failed" or (self.state == "open" and self.finish is None)

    def _chunk_came(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        if chunk.get("usage") is not None:
            self._turn_usage = chunk["usage"]
        choices = chunk.get("choices") or []
        if not choices:
            return [] if chunk.get("usage") is not None else [dict(chunk)]
        self._frame = self._frame or {key: chunk[key] for key in _FRAME if key in chunk}
        self._beside = {key: value for key, value in chunk.items() if key not in (*_FRAME, "choices", "usage")}
        choice = choices[0]
        self.finish = choice.get("finish_reason") or self.finish
        delta = dict(choice.get("delta") or {})
        calls = delta.pop("tool_calls", None) or []
        shown = self._words(delta, choice)
        for piece in calls:
            shown += self._piece(piece)
        return shown

    def _words(self, delta: dict[str, Any], choice: Mapping[str, Any]) -> list[dict[str, Any]]:
        for key, value in delta.items():
            if key in _TEXTS and isinstance(value, str):
                self._said[key] = self._said.get(key, "") + value
            elif key not in (*_TEXTS, "role") and value is not None:
                self._also[key] = _added(self._also.get(key), value)
        if "role" in delta and self._role_sent:
            del delta["role"]
        if not any(value not in (None, "") for value in delta.values()):
            return []
        extra = {key: value for key, value in choice.items() if key not in ("delta", "finish_reason", "index")}
        extra = {key: value for key, value in extra.items() if value is not None}
        if self.quiet and delta.get("content"):
            self._held_text.append({"delta": delta, **extra})
            return []
        self._role_sent = self._role_sent or "role" in delta
        return [self._chunk(self._spaced(delta), extra)]

    def _spaced(self, delta: dict[str, Any]) -> dict[str, Any]:
        """With the blank line that parts this turn's texts from those of an earlier one."""
        for key in _JOINED:
            if delta.get(key) and key not in self._begun:
                if key in self._spoken and not (self.quiet and key == "content"):
                    delta = {**delta, key: BETWEEN + delta[key]}
                self._begun.add(key)
                self._spoken.add(key)
        return delta

    # ------------------------------------------------------------------ calls

    def _piece(self, piece: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One piece of a call, and what the caller may see because of it."""
        call = self._call_of(piece)
        new = call.add(piece)
        if call.sent is not None:
            return [self._chunk({"tool_calls": [{"index": call.sent, **new}]})]
        shown = []
        for waiting in self._calls:
            if waiting.sent is None and self._is_plain(waiting):
                shown.append(self._show(waiting))
            elif waiting.sent is None and not (waiting.complete and waiting.name in self._controls):
                break  # those behind it wait as well, so that the caller sees calls in the order of the model
        return shown

    def _call_of(self, piece: Mapping[str, Any]) -> _Call:
        """The call a piece belongs to. Indices may be missing, or the same for all calls: then the rest must tell."""
        index, id = piece.get("index"), piece.get("id") or ""
        if index is not None:
            known = self._at.get(index)
        else:
            latest = self._calls[-1] if self._calls else None
            known = next((call for call in reversed(self._calls) if id and call.proposed == id), latest)
        if known is None or known.followed_by(id, piece.get("function") or {}):
            if self._calls:
                self._calls[-1].complete = True
            known = _Call(self._session.call_id(id, {call.id for call in self._calls}), id)
            self._calls.append(known)
        if index is not None:
            self._at[index] = known
        return known

    def _is_plain(self, call: _Call) -> bool:
        """Whether the caller may see a call already: its name is whole, and no decision about it is open."""
        name = call.name
        if not name or name in self._controls or self._holds(name):
            return False
        grows = any(other != name and other.startswith(name) for other in self._names)
        return call.complete or (name in self._names and not grows)

    def _show(self, call: _Call) -> dict[str, Any]:
        """All of a call so far, under the caller's own count."""
        call.sent, self._visible_calls = self._visible_calls, self._visible_calls + 1
        whole = {"index": call.sent, **call.raw, "function": dict(call.raw["function"])}
        return self._chunk({"tool_calls": [whole]})

    # ------------------------------------------------------------------ the end of a turn, and of all

    def turn(self) -> tuple[Message, tuple[Any, ...], Usage]:
        """The assistant message that this upstream stream was: canonical, as it is to be sent back, its usage."""
        message: dict[str, Any] = {"role": "assistant", "content": None, **self._also, **self._said}
        if self._calls:
            message["tool_calls"] = [call.raw for call in self._calls]
        self.usage = self._turn_usage if self.usage is None else add_usage(self.usage, self._turn_usage)
        return *self._request.heard(message), Usage.from_openai(self._turn_usage)

    def end(self, extension: Mapping[str, Any] | None) -> bytes:
        """The rest: text and calls that were held back and are the caller's after all, why it ended, the usage."""
        visible = self._exchange.visible(quiet=self.quiet)
        self._exchange.save(visible)
        beside, self._beside = self._beside, {}
        shown = [self._chunk(self._spaced(held.pop("delta")), held) for held in self._held_text]
        ids = {call["id"] for call in visible.get("tool_calls", ())}
        shown += [self._show(call) for call in self._calls if call.id in ids and call.sent is None]
        last = {**self._chunk({}, {"finish_reason": finish_reason(self.finish, visible)}), **beside}
        if extension is not None:
            last["caddie"] = dict(extension)
        shown.append(last)
        if self._request.include_usage and self.usage is not None:
            shown.append({**self._frame, "choices": [], "usage": self.usage})
        elif self.usage is not None:
            last["usage"] = self.usage  # the server tells it unasked
        return b"".join([*map(sse.event, shown), sse.event(sse.DONE)])

    def _chunk(self, delta: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": dict(delta), "finish_reason": None, **(extra or {})}
        return {**self._frame, **self._beside, "choices": [choice]}


def _added(first: Any, second: Any) -> Any:
    """Two pieces of a field that nobody told us about: texts and lists go on, objects are joined, the rest is set."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    if isinstance(first, list) and isinstance(second, list):
        return [*first, *second]
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return {**first, **{key: _added(first.get(key), value) for key, value in second.items()}}
    return second
