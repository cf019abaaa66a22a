"""Several chat-completion streams as one: text passes as it arrives, calls of the control tools never show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from caddie_sdk.messages import Message
from caddie_sdk.relay import sse
from caddie_sdk.relay.adopt import BETWEEN
from caddie_sdk.relay.chat import ChatRequest, add_usage, finish_reason
from caddie_sdk.relay.exchange import Exchange
from caddie_sdk.usage import Usage

_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
"""Fields of a delta that come in pieces and add up."""


class _Call:
    """One tool call as its pieces come in."""

    def __init__(self, id: str, proposed: str) -> None:
        self.id, self.proposed = id, proposed
        self.raw: dict[str, Any] = {"id": id, "type": "function", "function": {"name": "", "arguments": ""}}
        self.sent: int | None = None
        """Index under which the caller sees it; None while it is held back."""
        self.waiting: list[dict[str, Any]] = []

    @property
    def name(self) -> str:
        return str(self.raw["function"]["name"])


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
        self._session = exchange.session
        self._controls = exchange.session.config.controls
        self._holds = exchange.session.config.protocol.guards
        self._frame: dict[str, Any] = {}
        self._visible_calls = 0
        self._spoke = self._role_sent = False
        self.usage: Any = None
        self.begin()

    def begin(self) -> None:
        """Another upstream stream follows."""
        self._calls: list[_Call] = []
        self._at: dict[Any, _Call] = {}
        self._latest: _Call | None = None
        self._said: dict[str, str] = {}
        self._held_text: list[dict[str, Any]] = []
        self._fresh_text = True
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
        if not self._frame:
            self._frame = {key: value for key, value in chunk.items() if key not in ("choices", "usage")}
        choices = chunk.get("choices") or []
        if not choices:
            return [] if chunk.get("usage") is not None else [dict(chunk)]
        choice = choices[0]
        self.finish = choice.get("finish_reason") or self.finish
        delta = dict(choice.get("delta") or {})
        calls = delta.pop("tool_calls", None) or []
        shown = self._words(delta, choice)
        for piece in calls:
            shown += self._piece(piece)
        return shown

    def _words(self, delta: dict[str, Any], choice: Mapping[str, Any]) -> list[dict[str, Any]]:
        for key in _TEXTS:
            if isinstance(delta.get(key), str):
                self._said[key] = self._said.get(key, "") + delta[key]
        if "role" in delta and self._role_sent:
            del delta["role"]
        text = delta.get("content")
        if not any(value not in (None, "") for key, value in delta.items()):
            return []
        extra = {key: value for key, value in choice.items() if key not in ("delta", "finish_reason", "index")}
        extra = {key: value for key, value in extra.items() if value is not None}
        if self.quiet and text:
            self._held_text.append({"delta": delta, **extra})
            return []
        self._role_sent = self._role_sent or "role" in delta
        return [self._chunk(self._spaced(delta), extra)]

    def _spaced(self, delta: dict[str, Any]) -> dict[str, Any]:
        """With the blank line that parts this turn's text from an earlier one's."""
        if delta.get("content"):
            if self._fresh_text and self._spoke and not self.quiet:
                delta = {**delta, "content": BETWEEN + delta["content"]}
            self._fresh_text, self._spoke = False, True
        return delta

    def _piece(self, piece: Mapping[str, Any]) -> list[dict[str, Any]]:
        call, function = self._call_of(piece), dict(piece.get("function") or {})
        own, arguments = call.raw["function"], function.get("arguments") or ""
        if function.get("name") and function["name"] == own["name"]:
            del function["name"]  # some servers repeat the whole name in every piece; others send it in parts
        own["name"] += function.get("name") or ""
        own["arguments"] += arguments if isinstance(arguments, str) else ""
        rest = {key: value for key, value in piece.items() if key not in ("index", "id", "type", "function")}
        call.raw |= {key: value for key, value in rest.items() if value is not None}
        call.waiting.append({**rest, "function": function})
        return self._show(call) if self._is_plain(call, complete=bool(arguments)) else []

    def _call_of(self, piece: Mapping[str, Any]) -> _Call:
        """The call a piece belongs to. Indices may be missing, or the same for all calls: then the id tells."""
        index, id = piece.get("index"), piece.get("id") or ""
        named = bool((piece.get("function") or {}).get("name"))
        known = self._at.get(index) if index is not None else self._latest
        if known is None or (id and id != known.proposed and named):
            known = _Call(self._session.call_id(id, {call.id for call in self._calls}), id)
            self._calls.append(known)
            if index is not None:
                self._at[index] = known
        self._latest = known
        return known

    def _is_plain(self, call: _Call, *, complete: bool) -> bool:
        """Whether the caller may see the call already: its name is known, and no decision about it is open."""
        if call.sent is not None:
            return True
        if not complete and any(control.startswith(call.name) for control in self._controls):
            return False
        return bool(call.name) and call.name not in self._controls and not self._holds(call.name)

    def _show(self, call: _Call) -> list[dict[str, Any]]:
        """The pieces of a call that were not shown yet, under the caller's own count."""
        head: dict[str, Any] = {}
        if call.sent is None:
            call.sent, self._visible_calls = self._visible_calls, self._visible_calls + 1
            head = {"id": call.id, "type": "function"}
        pieces = [{"index": call.sent, **piece} for piece in call.waiting]
        pieces[0] = {"index": call.sent, **head, **pieces[0]}
        call.waiting = []
        return [self._chunk({"tool_calls": [piece]}) for piece in pieces]

    # ------------------------------------------------------------------ the end of a turn, and of all

    def turn(self) -> tuple[Message, tuple[Any, ...], Usage]:
        """The assistant message that this upstream stream was: canonical, as it is to be sent back, its usage."""
        message: dict[str, Any] = {"role": "assistant", "content": None, **self._said}
        if self._calls:
            message["tool_calls"] = [call.raw for call in self._calls]
        self.usage = self._turn_usage if self.usage is None else add_usage(self.usage, self._turn_usage)
        return *self._request.heard(message), Usage.from_openai(self._turn_usage)

    def end(self, extension: Mapping[str, Any] | None) -> bytes:
        """The rest: text and calls that were held back and are the caller's after all, why it ended, the usage."""
        visible = self._exchange.visible(quiet=self.quiet)
        self._exchange.save(visible)
        shown = [self._chunk(self._spaced(held.pop("delta")), held) for held in self._held_text]
        ids = {call["id"] for call in visible.get("tool_calls", ())}
        for call in self._calls:
            if call.id in ids and call.waiting:
                shown += self._show(call)
        last = self._chunk({}, {"finish_reason": finish_reason(self.finish, visible)})
        if extension is not None:
            last["caddie"] = dict(extension)
        shown.append(last)
        if self._request.include_usage and self.usage is not None:
            shown.append({**self._frame, "choices": [], "usage": self.usage})
        return b"".join([*map(sse.event, shown), sse.event(sse.DONE)])

    def _chunk(self, delta: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": dict(delta), "finish_reason": None, **(extra or {})}
        return {**self._frame, "choices": [choice]}
