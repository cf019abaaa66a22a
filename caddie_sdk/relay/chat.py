"""Chat completions: what a request says, what goes upstream, and what the caller is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from caddie_sdk.errors import ConfigError, MessageError
from caddie_sdk.messages import PROFILES, Message, canonical, wire, wire_arguments
from caddie_sdk.relay.adopt import Said, Terms, Unadopted
from caddie_sdk.relay.exchange import Exchange, function_tools
from caddie_sdk.relay.fast import Memo
from caddie_sdk.relay.ledger import Ledger, fingerprint
from caddie_sdk.relay.live import LiveSessions
from caddie_sdk.usage import Usage

_LEGACY = ("functions", "function_call")
_PLAIN = PROFILES["openai"]


def _said(raw: Mapping[str, Any]) -> Said:
    message = canonical(raw)
    return Said(message, (raw,), mark=fingerprint(message))


_SAID = Memo(_said)


def _joined(messages: Sequence[Said]) -> list[Said]:
    """With a turn in one piece where the caller tells its text and its calls as two messages."""
    said: list[Said] = []
    for item in messages:
        before, now = said[-1].message if said else None, item.message
        parted = now["role"] == "assistant" and now.get("tool_calls") and not now["content"]
        if parted and before and before["role"] == "assistant" and before["content"] and not before.get("tool_calls"):
            said[-1] = Said({**now, "content": before["content"]}, (*said[-1].raw, *item.raw))
        else:
            said.append(item)
    return said


def add_usage(first: Any, second: Any) -> Any:
    """Two `usage` objects as one: every number is summed, at any depth; other values come from the later one."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return {**first, **{key: add_usage(first.get(key), value) for key, value in second.items()}}
    if _is_number(first) and _is_number(second):
        return first + second
    return first if second is None else second


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class ChatRequest:
    """A chat-completions request.

    Args:
        body: the request's JSON, without the extension field.

    Attributes:
        said: the history.
        tools: the caller's function tools.
        stream: whether the answer is to be a stream.
        asks: whether the agent may call a control tool in its answer. Not when the request names the tool to be
            called, forbids calls, or wants several choices.
        single: whether one choice is wanted; consultations belong to one line of events.
        quiet: whether the caller parses the text as a whole, so that texts of several turns must not be joined.

    Raises:
        Unadopted: it has no reading as a trajectory.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Unadopted("the request has no messages")
        if any(name in body for name in _LEGACY):
            raise Unadopted("the request uses the retired functions field")
        if any(isinstance(tool, Mapping) and tool.get("type") == "custom" for tool in body.get("tools") or ()):
            raise Unadopted("the request offers custom tools, whose calls have no place in a session")
        try:
            self.said = _joined([_SAID(message) for message in messages])
            self.tools = function_tools(body.get("tools") or ())
        except (MessageError, ConfigError) as error:
            raise Unadopted(str(error)) from error
        choice = body.get("tool_choice") or "auto"
        self.stream = bool(body.get("stream"))
        self.single = (body.get("n") or 1) == 1
        self.asks = self.single and choice in ("auto", "required")
        form = body.get("response_format") or {}
        self.quiet = isinstance(form, Mapping) and form.get("type", "text") != "text"
        options = body.get("stream_options") or {}
        self.include_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))

    def exchange(self, terms: Terms, ledger: Ledger, scope: str, live: LiveSessions | None = None) -> Exchange:
        """The session of this request.

        Raises:
            Unadopted: the history has no reading as a trajectory.
        """
        return Exchange(self.said, self.tools, terms, ledger, scope, live)

    def upstream(self, exchange: Exchange) -> dict[str, Any]:
        """The body to send now."""
        body = {**self.body, "messages": [item for node in exchange.nodes() for item in restate(*node)]}
        controls = exchange.session.controls_offered if self.asks else []
        if controls:
            body["tools"] = [*(self.body.get("tools") or ()), *controls]
        return body

    def read(self, answer: Any) -> tuple[Message, tuple[Any, ...], Usage]:
        """The first choice of an answer: message, the same as raw items, usage.

        Raises:
            Unadopted: the answer is no chat completion.
        """
        try:
            raw = answer["choices"][0]["message"]
            return *self.heard({**raw, "role": "assistant"}), Usage.from_openai(answer.get("usage"))
        except (AttributeError, IndexError, KeyError, TypeError, MessageError) as error:
            raise Unadopted(f"the answer is no chat completion: {error!r}") from error

    def heard(self, raw: Mapping[str, Any]) -> tuple[Message, tuple[Any, ...]]:
        """A message put together from a stream: canonical, and as it is to be sent back."""
        return canonical(raw), (_sendable(raw),)

    def compose(
        self, exchange: Exchange, answers: Sequence[Mapping[str, Any]], extension: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The answer the caller gets: the last one, with everything that was said on the way to it."""
        last = answers[-1]
        visible = exchange.visible(quiet=self.quiet)
        choice = dict(last["choices"][0])
        raw = choice["message"].get("tool_calls") or ()
        calls = dressed(visible.get("tool_calls", ()), exchange.last_calls(), raw)
        if len(answers) == 1 and extension is None and calls == list(raw):
            exchange.save(visible)
            return dict(last)
        choice["message"] = _shown(choice["message"], visible, calls)
        choice["finish_reason"] = finish_reason(choice.get("finish_reason"), visible)
        if logprobs := _logprobs(answers, quiet=self.quiet):
            choice["logprobs"] = logprobs
        composed = {**last, "choices": [choice]}
        for answer in reversed(answers[:-1]):
            composed["usage"] = add_usage(answer.get("usage"), composed.get("usage"))
        exchange.save(canonical(choice["message"]))
        return composed if extension is None else {**composed, "caddie": extension}


def _shown(raw: Mapping[str, Any], visible: Message, calls: Sequence[Any]) -> dict[str, Any]:
    message = {**raw, "role": "assistant", "content": visible["content"] or None}
    if thought := visible.get("reasoning_content"):
        # Servers use one of two names for it, some use both.
        names = [name for name in ("reasoning_content", "reasoning") if name in raw] or ["reasoning_content"]
        message |= dict.fromkeys(names, thought)
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = list(calls)
    return message


def dressed(calls: Sequence[Any], stored: Sequence[Any], raw: Sequence[Any]) -> list[Any]:
    """Calls with whatever else their author wrote beside id and function (signatures of some providers).

    Args:
        calls: some of the stored ones, to be dressed; the `stored` ones may differ from theirs in ids.
        stored: the calls of the turn.
        raw: the same calls as the model wrote them, in the same order.
    """
    if len(raw) != len(stored):
        return list(calls)
    written = {call["id"]: own for call, own in zip(stored, raw, strict=True)}
    return [_dress(call, written.get(call["id"], {})) for call in calls]


def _dress(call: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **own,
        "id": call["id"],
        "function": {**(own.get("function") or {}), **call["function"]},
        "type": "function",
    }


def finish_reason(reason: str | None, visible: Message) -> str | None:
    """Why the turn ended, for the caller: calls it does not see are no reason."""
    if visible.get("tool_calls"):
        return "tool_calls" if reason in ("stop", "tool_calls", None) else reason
    return "stop" if reason == "tool_calls" else reason


def _logprobs(answers: Sequence[Mapping[str, Any]], *, quiet: bool) -> dict[str, Any] | None:
    """Log-probabilities of the visible text's tokens, in order; the blank line between two texts has none."""
    parts = [answer["choices"][0].get("logprobs") for answer in (answers[-1:] if quiet else answers)]
    if not any(parts):
        return None
    kinds = {kind for part in parts if part for kind in part}
    return {kind: [entry for part in parts if part for entry in part.get(kind) or ()] or None for kind in kinds}


def _sendable(raw: Mapping[str, Any]) -> dict[str, Any]:
    """An answer's message as a message to send: strict servers refuse nulls that they themselves wrote."""
    return {"role": "assistant", "content": None, **{key: value for key, value in raw.items() if value is not None}}


def _acceptable(given: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Whether a call can be sent as it was given."""
    arguments = (given.get("function") or {}).get("arguments")
    usable = arguments == wire_arguments(call["function"]["arguments"])
    return usable and given.get("id") == call["id"] and given.get("type") == "function"


def restate(message: Message, raw: Sequence[Any] | None) -> list[Any]:
    """A stored message for a chat-completions server: as its author wrote it, but with the ids and the arguments of
    its calls in a form that a strict server accepts."""
    if raw is not None and message["role"] in ("user", "system"):
        return list(raw)
    if raw is not None and message["role"] == "tool":
        same = raw[0].get("tool_call_id") == message["tool_call_id"]
        return list(raw) if same else [{**raw[0], "tool_call_id": message["tool_call_id"]}]
    if raw is None:
        return wire([message], _PLAIN)
    given = raw[-1].get("tool_calls") or ()
    if all(map(_acceptable, given, message.get("tool_calls", ()))):
        return list(raw)
    ours = wire([message], _PLAIN)[0]
    wanted = dressed(ours["tool_calls"], message["tool_calls"], given)
    return list(raw) if wanted == list(given) else [*raw[:-1], {**raw[-1], "tool_calls": wanted}]
