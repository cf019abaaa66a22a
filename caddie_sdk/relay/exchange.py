"""One request of a caller who keeps the history and runs the tools: a session made from it, and driven on.

The caller's messages are told to a session as events that have already happened; turns that held consultations are
put back from the ledger on the way. What then comes next is the session's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from caddie_sdk.commands import Command, Finish, RunTools
from caddie_sdk.config import SessionConfig, tool_name
from caddie_sdk.critique import Critique
from caddie_sdk.errors import SessionError
from caddie_sdk.messages import Message, text_of
from caddie_sdk.relay.adopt import BETWEEN, Adoption, Said, Terms, Unadopted, configure, leading_system, put_back
from caddie_sdk.relay.ledger import Ledger, beside, chain, extend, fingerprint
from caddie_sdk.relay.live import Live, LiveSessions
from caddie_sdk.session import DUMP_VERSION, Session
from caddie_sdk.usage import Usage


class Exchange:
    """A session for one request.

    Args:
        said: the caller's history, system messages included.
        tools: schemas of the caller's function tools, in chat form.
        terms: protocol, limits, control tools.
        ledger: where hidden turns are kept.
        scope: keeps callers apart in the ledger.
        live: sessions of conversations under way.
        base: dump of a session that `said` continues, for callers who send only what is new; None starts from nothing.

    Raises:
        Unadopted: the history has no reading as a trajectory (a call without its result, an unknown role, ...).
    """

    def __init__(
        self,
        said: Sequence[Said],
        tools: Iterable[Mapping[str, Any]],
        terms: Terms,
        ledger: Ledger,
        scope: str,
        live: LiveSessions | None = None,
        base: Mapping[str, Any] | None = None,
    ) -> None:
        self._ledger, self._said, self._live = ledger, list(said), live
        self.keys = chain(scope, [item.mark or fingerprint(item.message) for item in said])
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.advised = self.heard = 0
        self._made_for = terms, list(tools), [item.message for item in leading_system(said)]
        start = self._open(base)
        self._adopt(start)
        self._mark = self.session.mark()
        self._usage, self._critic_usage = self.session.usage, self.session.critic_usage
        self._take_pending()
        self.command: Command = self.session.resume()

    # ------------------------------------------------------------------ the caller's history

    def _open(self, base: Mapping[str, Any] | None) -> int:
        """Find or make the session; returns how many of the caller's messages it knows."""
        known = self._live.take(self.keys, self._made_for) if self._live is not None and base is None else None
        self._places: dict[int, int] = dict(known.places) if known else {}
        self._kept: dict[int, tuple[Any, ...]] = dict(known.kept) if known else {}
        self.known = 0
        if known is not None:
            self.session = known.session
            return known.told
        # The first user turn and all before it stay the same for as long as the conversation lasts.
        first = next((n for n, item in enumerate(self._said) if item.message["role"] == "user"), None)
        seed = 0 if first is None else int(self.keys[first][:8], 16)
        terms, tools, _ = self._made_for
        config = configure(leading_system(self._said), tools, terms, seed)
        self.session = Session(config) if base is None else _continued(base, config)
        self.known = len(self.session.history.path())
        # A session that goes on has its system prompt; what the caller puts before new turns is new as well.
        return sum(base is None or not item.raw for item in leading_system(self._said))

    def _adopt(self, start: int) -> None:
        pending = beside(self.keys[-1], "pending") if self.keys else ""
        new = zip(self.keys[start:], self._said[start:], strict=True)
        found = self._ledger.get([*(key for key, item in new if item.message["role"] == "assistant"), pending])
        # What another version has kept is as good as gone.
        entries = {key: entry for key, entry in found.items() if entry["delta"]["version"] == DUMP_VERSION}
        self._pending = entries.pop(pending, None)
        adoption = Adoption(self.session, self._said, self.keys, entries)
        adoption.places, adoption.kept = self._places, self._kept
        adoption.tell(start)
        self.raw = adoption.raw()
        path = self.session.history.path()
        if path and not self.known and path[0].kind == "system":
            self.raw[0] = tuple(raw for item in leading_system(self._said) for raw in item.raw)
        if self.session.phase != "model":
            raise Unadopted(f"the history ends where no model is to speak ({self.session.phase})")

    def _take_pending(self) -> None:
        """Go on from an attempt at this very request that failed after its consultations."""
        if self._pending is not None:
            self.raw |= put_back(self.session, self._pending)
            for record in self.session.consultations[self._mark[1] :]:
                self.session.critic_usage += Usage.load(record["critique"]["usage"])

    # ------------------------------------------------------------------ what happens now

    def replied(self, message: Message, raw: Sequence[Any], usage: Usage | None = None) -> Command:
        """The upstream model answered."""
        at = len(self.session.history.path())
        self.command = self.session.model_replied(message, usage)
        self.raw[at] = tuple(raw)
        self.heard = at + 1
        self.texts.append(text_of(message))
        if thought := message.get("reasoning_content"):
            self.reasoning.append(thought)
        return self.command

    def critic_replied(self, critique: Critique) -> Command:
        """The critic answered.

        Raises:
            ConsultationError: it failed, and the terms say `on_error="raise"`.
        """
        self.command = self.session.critic_replied(critique)
        self.advised += 1
        return self.command

    @property
    def done(self) -> bool:
        """Whether the rest is the caller's."""
        return isinstance(self.command, RunTools | Finish)

    def visible(self, *, quiet: bool = False) -> Message:
        """The turn as the caller sees it: everything said since the request, and the calls that are the caller's.

        Args:
            quiet: only the last text, for callers who parse it as a whole.
        """
        texts = self.texts[-1:] if quiet else self.texts
        message: Message = {"role": "assistant", "content": BETWEEN.join(filter(None, texts))}
        if isinstance(self.command, RunTools):
            message["tool_calls"] = self.command.message.get("tool_calls", [])
        if self.reasoning:
            message["reasoning_content"] = BETWEEN.join(self.reasoning)
        return message

    def save(self, visible: Message, *also: Message) -> None:
        """Keep what the caller does not see under what it does.

        Args:
            visible: the turn as the caller sees it.
            also: other readings of it, which some callers send back in its place.
        """
        if self._pending is not None:
            self._ledger.drop(beside(self.keys[-1], "pending"))
        if self.session.phase == "done" and self.session.history.path()[-1].message["role"] == "tool":
            # The turn ended in refusals, and strict servers want to hear the assistant before the user.
            self.session.overheard({"role": "assistant", "content": ""})
        key, hidden = extend(self.keys[-1], visible), self.hides(visible)
        for message in (visible, *also) if hidden else ():
            self._ledger.put(extend(self.keys[-1], message), self._entry())
        if self._live is not None:
            self._live.put(key, self._now(hidden))

    def _now(self, hidden: bool) -> Live:
        """The session as it stands, for the caller's next request."""
        at, told = self._mark[0], len(self._said) + 1
        places, kept = dict(self._places), dict(self._kept)
        if hidden:
            kept |= {index: raw for index, raw in self.raw.items() if index >= at}
        else:
            places[at] = told - 1
        return Live(self.session, places, kept, told, self._made_for)

    def abandon(self) -> None:
        """The upstream failed: keep finished consultations for the caller's next attempt."""
        if self.advised and self.session.phase == "model":
            self._ledger.put(beside(self.keys[-1], "pending"), self._entry())

    @contextmanager
    def kept_on_failure(self) -> Iterator[None]:
        """Around all that is done for a request: whatever ends it early, a caller who hangs up too, is a failure."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def hides(self, visible: Message) -> bool:
        """Whether the caller's copy of this turn says less than ours."""
        since = self.session.history.path()[self._mark[0] :]
        return len(since) != 1 or since[0].message.get("tool_calls") != visible.get("tool_calls")

    def _entry(self) -> dict[str, Any]:
        at = self._mark[0]
        raw = {str(index - at): list(items) for index, items in self.raw.items() if index >= at}
        return {"delta": self.session.since(self._mark), "raw": raw}

    # ------------------------------------------------------------------ for the dialects

    def nodes(self, start: int = 0) -> list[tuple[Message, tuple[Any, ...] | None]]:
        """The history to send, each message with the form its author wrote, where there is one."""
        path = self.session.history.path()
        return [(path[index].message, self.raw.get(index)) for index in range(start, len(path))]

    def last_calls(self) -> list[Any]:
        """The calls of the model's latest turn, hidden ones among them."""
        action = next((node for node in reversed(self.session.history.path()) if node.kind == "action"), None)
        return list(action.message.get("tool_calls", ())) if action else []

    def spent(self) -> tuple[Usage, Usage]:
        """(agent's, critic's) tokens since the request came in."""
        return _difference(self.session.usage, self._usage), _difference(self.session.critic_usage, self._critic_usage)

    def report(self, *, advice: bool = False) -> dict[str, Any] | None:
        """The extension field of the answer: the consultations of this request and what they cost. None without any.

        Args:
            advice: include the critiques' texts.
        """
        records = self.session.consultations[self._mark[1] :]
        if not records:
            return None
        agent, critic = self.spent()
        return {
            "consultations": [_told(record, advice) for record in records],
            "remaining": self.session.remaining,
            "agent_calls": agent.calls,
            "critic_usage": critic.dump(),
        }


def _continued(base: Mapping[str, Any], config: SessionConfig) -> Session:
    """A stored session under the terms of this request. It keeps its system prompt and its seed."""
    try:
        first = base["config"]
        return Session.load(base, replace(config, system=first["system"], seed=first["seed"]))
    except (KeyError, TypeError, SessionError) as error:
        raise Unadopted(f"the stored session cannot be read: {error}") from error


def _told(record: Mapping[str, Any], advice: bool) -> dict[str, Any]:
    critique = record["critique"]
    facts = {name: record[name] for name in ("control", "trigger", "step")}
    facts |= {name: critique[name] for name in ("status", "seconds")}
    return {**facts, "analysis": critique["analysis"], "advice": critique["advice"]} if advice else facts


def _difference(now: Usage, before: Usage) -> Usage:
    return Usage(**{name: getattr(now, name) - getattr(before, name) for name in Usage.__dataclass_fields__})


def function_tools(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """The function tools among a request's chat tools; others (custom, built in) are none of a session's business."""
    chosen = []
    for tool in tools:
        if isinstance(tool, Mapping) and tool.get("type") == "function":
            tool_name(tool)
            chosen.append(dict(tool))
    return chosen
