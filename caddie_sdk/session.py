"""The sans-IO heart: all semantics of a trajectory with consultations (SPEC §4).

A session is fed events and answers each with one command that says what to do next:

    command = session.user_said("Which river runs through the town where Ada was born?")
    while not isinstance(command, Finish):
        match command:
            case CallModel():  command = session.model_replied(ask_the_model(command))
            case RunTools():   command = session.tools_returned(run_the_tools(command.calls))
            case Consult():    command = session.critic_replied(ask_the_critic(command.state))
            case Reject():     command = session.proceed()

It does no I/O and holds no client: it can be dumped to JSON at any moment, loaded elsewhere and continued.
Every way into Caddie is a thin shell around it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from caddie_sdk.actions import (
    ActionFormat,
    Call,
    Forms,
    Turn,
    action_format,
    calls_in_text,
    single_argument,
    strip_thinking,
)
from caddie_sdk.commands import CallModel, Command, Consult, Finish, Reason, Reject, RunTools, ToolResult
from caddie_sdk.config import CONTROLS, SessionConfig, tool_name
from caddie_sdk.critic import ConsultState
from caddie_sdk.critique import Critique
from caddie_sdk.errors import ConsultationError, SessionError
from caddie_sdk.history import History, Kind, Node
from caddie_sdk.intervention import Moment
from caddie_sdk.messages import (
    Message,
    Profile,
    ToolCall,
    canonical,
    clean,
    dump_json,
    parse_arguments,
    profile,
    text_of,
    wire,
    wire_tools,
)
from caddie_sdk.render import ADVICE_LABEL, escape
from caddie_sdk.trajectory import read_trajectory
from caddie_sdk.usage import Usage

DUMP_VERSION = 1

Phase = Literal["ready", "model", "tools", "critic", "rejected", "done"]
_SNAPSHOT = (
    "phase", "trajectory", "step", "uses", "session_uses", "rejections", "repeats", "last_action", "checked_step",
    "fresh_advice", "closing", "draft", "answer", "reason", "notice", "synthetic",
)  # fmt: skip
"""The fields, beside config, history, consultations and usage, that make up a session's state."""


class Session:
    """One agent at work, with consultations, as a state machine.

    Raises:
        SessionError: from any event that the current phase does not allow.
    """

    def __init__(self, config: SessionConfig | None = None) -> None:
        self.config = config or SessionConfig()
        self.history = History()
        self.consultations: list[dict[str, Any]] = []
        self.usage = Usage()
        self.critic_usage = Usage()
        self.phase: Phase = "ready"
        self.trajectory = -1
        self.step = 0
        self.uses = 0
        self.session_uses = 0
        self.rejections = 0
        self.repeats = 0
        self.last_action: str | None = None
        self.checked_step = -1
        self.fresh_advice = False
        self.closing = False
        self.draft: str | None = None
        self.answer: str | None = None
        self.reason: Reason = ""
        self.notice = ""
        self.synthetic = 0
        self.turn: dict[str, Any] | None = None
        self.observing = False
        self._wire_up()

    def _wire_up(self) -> None:
        """Derive what follows from the configuration."""
        self._format: ActionFormat = action_format(self.config.format)
        self._profile: Profile = profile(self.config.profile)
        self._tools = {tool_name(tool): single_argument(tool) for tool in self.config.tools}
        self._schemas = wire_tools(self.config.tools)
        self._control_schemas = [_control_schema(name) for name in self.config.controls]
        self._config_dump = self.config.dump()
        self._ids: set[str] | None = None

    # ------------------------------------------------------------------ events

    def user_said(self, message: str | Mapping[str, Any]) -> Command:
        """A user turn: the task, or in a chat the next thing the user says. Starts a new trajectory."""
        self._require("user_said", "ready", "done", "model")
        said = canonical({"role": "user", "content": message} if isinstance(message, str) else message)
        if said["role"] != "user":
            raise SessionError(f"user_said takes a user message, not one of role {said['role']!r}")
        if not self._format.native_tools:
            said["content"] = _escaped(said["content"])
        if self.history.head is None:
            self._store_system()
        if self.phase != "model":
            self._begin_trajectory()
        self._append(said, "task")
        return self._next_model_call()

    def model_replied(self, message: Any, usage: Usage | None = None) -> Command:
        """The agent's model answered. Takes any form `messages.canonical` reads; never fails on its content."""
        self._require("model_replied", "model")
        reply = canonical(message)
        if reply["role"] != "assistant":
            raise SessionError(f"model_replied takes an assistant message, not one of role {reply['role']!r}")
        self.usage += usage or Usage(calls=1)
        if self._format.native_tools:
            # A caller who owns the tools has been shown the text as it is, so there it stays text.
            reply = self._with_ids(reply if self.config.caller_owned else calls_in_text(reply))
        else:
            # No tools were offered, so nothing could answer these calls; the text alone says what is meant.
            reply.pop("tool_calls", None)
        turn = self._format.parse(reply, self._tools, self.config.controls[0] if self.config.controls else "")
        if turn.calls and not self.closing:
            return self._take_calls(reply, turn)
        return self._take_words(reply, turn)

    def tools_returned(self, results: Iterable[ToolResult | Mapping[str, Any]]) -> Command:
        """The tools have run. A call without a result is answered by an error the agent can read."""
        self._require("tools_returned", "tools")
        turn = self._turn()
        waiting = [call for call in turn["calls"] if call["do"] == "run"]
        given: dict[str, ToolResult] = {}
        for item in results:
            result = ToolResult.read(item)
            if result.id in given or all(call["id"] != result.id for call in waiting):
                raise SessionError(f"tools_returned: no call with id {result.id!r} is waiting for a result")
            given[result.id] = result
        for call in waiting:
            result = given.get(call["id"], ToolResult(call["id"], "The tool gave no result.", is_error=True))
            call["content"] = clean(result.content)
            if result.is_error:
                call["error"] = True
        return self._close_turn()

    def critic_replied(self, critique: Critique) -> Command:
        """The critic answered, or failed: the critique's status says which.

        Raises:
            ConsultationError: the critique is not `ok` and the session was configured with `on_error="raise"`.
                The session still waits for a critique then.
        """
        self._require("critic_replied", "critic")
        critique = _checked(critique)
        if not critique.ok and self.config.on_error == "raise" and not self.observing:
            raise ConsultationError(
                f"the consultation failed ({critique.status}): {critique.detail or 'no detail given'}"
            )
        turn = self._turn()
        control, trigger, call = self._due(turn)
        self.consultations.append(
            {
                "trajectory": self.trajectory,
                "step": self.step,
                "control": control,
                "trigger": trigger,
                "critique": critique.dump(),
            }
        )
        self.critic_usage += critique.usage
        self.uses += 1
        self.session_uses += 1
        self.fresh_advice = True
        number = len(self.consultations) - 1
        if call is not None:
            call["consultation"], call["content"] = number, self._advice_text(critique)
        else:
            turn["forced"], turn["forced_advice"] = None, number
        return self._continue_turn()

    def close(self) -> Command:
        """Make the next reply the last one: no tools any more, only an answer (the shell is running out of time)."""
        self._require("close", "model")
        self.closing = True
        return self.command

    def proceed(self) -> Command:
        """Go on after a `Reject`."""
        self._require("proceed", "rejected")
        return self._next_model_call()

    def stop(self, reason: Reason) -> Command:
        """End the trajectory from outside (context overflow, cancellation, a dead server).

        Calls without a result are answered, so the history stays valid and the session can take another turn.
        """
        self._require("stop", "model", "tools", "critic", "rejected")
        if self.turn is not None:
            for call in self.turn["calls"]:
                call.setdefault("content", f"Not run: the work was stopped ({reason}).")
            self._store_results(self._turn())
            self.turn = None
        return self._finish(self.draft, reason)

    # ------------------------------------------------------------------ a history that others keep

    def overheard(self, message: Any) -> None:
        """A message outside of any turn in a history that a caller keeps: a later system message, a greeting, a
        second assistant message in a row. It is stored and changes nothing else.

        Raises:
            SessionError: a turn is open, or the message is neither a system nor an assistant message without calls.
        """
        self._require("overheard", "ready", "model", "done")
        heard = canonical(message)
        if heard["role"] not in ("system", "assistant") or heard.get("tool_calls"):
            raise SessionError("overheard takes a system message, or an assistant message without tool calls")
        if self.history.head is None:
            self._store_system()
        if heard["role"] == "system":
            self._append(heard, "system")
        else:
            self._append(heard, "action", {"answer": strip_thinking(text_of(heard))})

    def dismissed(self, content: str) -> Command:
        """The control call that is due was answered by words that are no critique, in a history that others keep."""
        self._require("dismissed", "critic")
        _, _, call = self._due(self._turn())
        if call is None:
            raise SessionError("dismissed() answers a control call, and this consultation was forced by the protocol")
        call.update(do="refuse", content=clean(content))
        return self._continue_turn()

    @contextmanager
    def observe(self) -> Iterator[None]:
        """While events tell what has already happened: the protocol forces nothing, and nothing is held or refused."""
        self.observing = True
        try:
            yield
        finally:
            self.observing = False

    def resume(self) -> Command:
        """After `observe`: what comes next, with the protocol's say in it."""
        return self._next_model_call() if self.phase == "model" else self.command

    def mark(self) -> tuple[int, int]:
        """The place reached, for `since`."""
        return len(self.history.path()), len(self.consultations)

    def since(self, mark: tuple[int, int]) -> dict[str, Any]:
        """What has happened since a mark, as plain JSON that `advance` plays back onto the same history.

        Decisions are kept with their outcome, so playing back needs neither the same protocol nor the same limits.
        """
        nodes, consultations = mark
        return {
            "version": DUMP_VERSION,
            "nodes": [
                {"message": node.message, "kind": node.kind, "step": node.step, "meta": dict(node.meta)}
                for node in self.history.path()[nodes:]
            ],
            "first": consultations,
            "consultations": self.consultations[consultations:],
            "state": {name: getattr(self, name) for name in _SNAPSHOT},
            "turn": copy.deepcopy(self.turn),
        }

    def advance(self, delta: Mapping[str, Any]) -> None:
        """Play back what `since` gave.

        Raises:
            SessionError: the data is of another version, or no such data.
        """
        if delta.get("version") != DUMP_VERSION:
            raise SessionError(f"not a part of a session of version {DUMP_VERSION}")
        try:
            # Earlier consultations may be forgotten by now, so the numbers move.
            shift = len(self.consultations) - delta["first"]
            for node in delta["nodes"]:
                self._append(node["message"], node["kind"], _shifted(node["meta"], "consultation", shift))
                self.history.path()[-1].step = node["step"]
            self.consultations += delta["consultations"]
            for name in _SNAPSHOT:
                setattr(self, name, delta["state"][name])
            turn = copy.deepcopy(delta["turn"])
        except (AttributeError, KeyError, TypeError) as error:
            raise SessionError(f"not a part of a session: {error!r} is missing or of the wrong type") from None
        if turn is not None:
            turn = _shifted(turn, "forced_advice", shift)
            turn["calls"] = [_shifted(call, "consultation", shift) for call in turn["calls"]]
        self.turn = turn

    # ------------------------------------------------------------------ queries

    @property
    def command(self) -> Command:
        """What to do now; the same command the latest event returned. Useful after `load`."""
        match self.phase:
            case "model":
                return self._call_model()
            case "tools":
                return self._run_tools()
            case "critic":
                return Consult(self._consult_state())
            case "rejected":
                return Reject(self.notice)
            case "done":
                return Finish(self.answer, self.reason)
            case _:
                raise SessionError("nothing to do yet: the session waits for user_said()")

    @property
    def remaining(self) -> int:
        """Consultations left in this trajectory."""
        return self.config.budget.remaining(self.uses, self.session_uses)

    @property
    def controls_offered(self) -> list[dict[str, Any]]:
        """Schemas of the control tools that the agent may call now."""
        return list(self._control_schemas) if self._offers_control else []

    def transcript(self) -> list[Message]:
        """The canonical messages of the active path."""
        return self.history.messages()

    def fork(self) -> Session:
        """A copy that shares the history so far and goes its own way. Costs no copy of the history."""
        child = copy.copy(self)
        child.history = self.history.fork()
        child.consultations = list(self.consultations)
        child.turn = copy.deepcopy(self.turn)
        child._ids = None
        return child

    def dump(self) -> dict[str, Any]:
        """The whole session as plain JSON. Stored messages are shared: treat the result as frozen."""
        return {
            "version": DUMP_VERSION,
            "config": self._config_dump,
            "history": self.history.dump(),
            "consultations": list(self.consultations),
            "usage": self.usage.dump(),
            "critic_usage": self.critic_usage.dump(),
            **{name: getattr(self, name) for name in _SNAPSHOT},
            "turn": copy.deepcopy(self.turn),
        }

    @classmethod
    def load(cls, data: Mapping[str, Any], config: SessionConfig | None = None) -> Session:
        """Rebuild a session from `dump()`.

        Args:
            data: what `dump()` gave.
            config: takes the place of the stored configuration, so that a thread started by an older version of an
                application goes on with the tools and limits of the present one.

        Raises:
            SessionError: the data is not a dump of this version.
        """
        if not isinstance(data, Mapping) or data.get("version") != DUMP_VERSION:
            raise SessionError(f"not a session dump of version {DUMP_VERSION}")
        try:
            session = cls(config or SessionConfig.load(data["config"]))
            session.history = History.load(data["history"])
            session.consultations = list(data["consultations"])
            session.usage, session.critic_usage = Usage.load(data["usage"]), Usage.load(data["critic_usage"])
            for name in _SNAPSHOT:
                setattr(session, name, data[name])
            session.turn = copy.deepcopy(data["turn"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SessionError(f"not a session dump: {error!r} is missing or of the wrong type") from None
        return session

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Session) and self.dump() == other.dump()

    __hash__ = None  # type: ignore[assignment]

    # ------------------------------------------------------------------ a reply without calls

    def _take_words(self, reply: Message, turn: Turn) -> Command:
        """An answer, a plan, or something that is no legal action."""
        words = strip_thinking(text_of(reply))
        if turn.answer is None and self.config.caller_owned:
            turn = Turn(answer=words)
        if turn.answer is not None and (self._may_answer or self.closing):
            self._append(reply, "action", {"answer": turn.answer})
            return self._finish(turn.answer, "answer" if not self.closing else "max_steps")
        if self.closing:
            self._append(reply, "action", {"problem": "no answer at the step limit"})
            self._answer_calls(reply, "Not run: the step limit was reached.")
            return self._finish(turn.answer or self.draft or turn.thought or words or None, "max_steps")
        if turn.plan is not None:
            self._append(
                reply,
                "action",
                {"thought": turn.thought, "calls": [{"name": "plan", "arguments": turn.plan}]},
            )
            return self._end_step(["Plan noted."], f"plan {turn.plan}")
        if turn.answer is not None:
            self.draft = turn.answer
            return self._reject(reply, self._too_early())
        return self._reject(reply, turn.problem or "The reply was in none of the allowed forms.")

    @property
    def _may_answer(self) -> bool:
        return self.step >= self.config.budget.min_steps

    def _too_early(self) -> str:
        missing = self.config.budget.min_steps - self.step
        return f"Too early to answer: take at least {missing} more step{'s' if missing != 1 else ''} first."

    def _reject(self, reply: Message, problem: str) -> Command:
        self._append(reply, "action", {"problem": problem})
        if (ended := self._count_rejection("malformed")) is not None:
            return ended
        self.notice = f"{problem} {self._format.describe(self._forms())}"
        self._append({"role": "user", "content": self.notice}, "notice")
        self.phase = "rejected"
        return self.command

    def _count_rejection(self, reason: Reason) -> Command | None:
        self.rejections += 1
        if self.rejections > self.config.budget.max_rejections:
            return self._finish(self.draft, reason)
        return None

    def _answer_calls(self, reply: Message, content: str) -> None:
        """Give every call of a reply the same result, so that the history stays valid."""
        for call in reply.get("tool_calls", ()):
            self._append(_tool_message(call["id"], content), "observation", {"control": True})

    # ------------------------------------------------------------------ a reply with calls

    def _take_calls(self, reply: Message, turn: Turn) -> Command:
        calls = [self._classify(call) for call in turn.calls]
        self._limit_consultations(calls)
        forced = None
        if any(call["do"] == "hold" for call in calls) and not any(call["do"] == "consult" for call in calls):
            forced = {"control": self.config.controls[0], "trigger": "guarded"}
        consults = forced is not None or any(call["do"] == "consult" for call in calls)
        self._append(reply, "action", self._turn_meta(turn, calls, consults))
        self.turn = {"calls": calls, "forced": forced, "forced_advice": None, "reply": reply}
        return self._continue_turn()

    def _classify(self, call: Call) -> dict[str, Any]:
        """Decide what becomes of one call: run, consult, hold, or answer with an error."""
        name, raw = call.name, call.raw
        entry: dict[str, Any] = {"id": call.id or self._new_id(), "name": name, "arguments": raw, "do": "run"}
        if name in self.config.controls and name:
            return {**entry, "do": "consult", "control": True}
        if self.config.caller_owned:
            return self._held(entry)
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            return {
                **entry,
                "do": "error",
                "content": f"There is no tool {name!r}. Tools: {known}.",
                "error": True,
            }
        if call.arguments is None:
            told = "The arguments were not a JSON object, so the tool was not run. Send a JSON object."
            return {**entry, "do": "error", "content": told, "error": True}
        return self._held(entry)

    def _held(self, entry: dict[str, Any]) -> dict[str, Any]:
        """A guarded call waits for advice; what has happened already cannot wait any more."""
        guarded = not self.observing and self.config.protocol.guards(entry["name"])
        if guarded and not self.fresh_advice and self._can_consult:
            return {**entry, "do": "hold", "content": NOT_RUN}
        return entry

    def _limit_consultations(self, calls: list[dict[str, Any]]) -> None:
        """Within one turn each control is consulted once, and never beyond the budget."""
        if self.observing:
            return
        left, seen = (self.remaining if self.config.protocol.self_call else 0), set()
        for call in calls:
            if call["do"] != "consult":
                continue
            if call["name"] in seen:
                call.update(do="refuse", content="Answered together with the other request of this turn.")
            elif left <= 0:
                call.update(do="refuse", content=NONE_LEFT if self.config.protocol.self_call else NOT_OFFERED)
            else:
                left -= 1
                seen.add(call["name"])
        if any(call["do"] == "consult" for call in calls):
            # Advice must be read before a guarded call runs, even when older advice was still fresh.
            for call in calls:
                if call["do"] == "run" and self.config.protocol.guards(call["name"]):
                    call.update(do="hold", content=NOT_RUN)

    def _turn_meta(self, turn: Turn, calls: Sequence[Mapping[str, Any]], consults: bool) -> dict[str, Any]:
        meta: dict[str, Any] = {"consults": True} if consults else {}
        controls = [call["id"] for call in calls if call.get("control")]
        if self._format.native_tools:
            return {**meta, "controls": controls} if controls else meta
        acts = [{"name": c["name"], "arguments": c["arguments"]} for c in calls if not c.get("control")]
        return {**meta, "thought": turn.thought, "calls": acts}

    def _continue_turn(self) -> Command:
        """Consultations first, then the tools, then the results into the history."""
        turn = self._turn()
        if self._due(turn, peek=True)[0]:
            self.phase = "critic"
        elif any(call["do"] == "run" for call in turn["calls"]):
            self.phase = "tools"
        else:
            return self._close_turn()
        return self.command

    def _due(self, turn: dict[str, Any], *, peek: bool = False) -> tuple[str, str, dict[str, Any] | None]:
        """(control, trigger, call) of the consultation that is due; the call is None for a forced one."""
        for call in turn["calls"]:
            if call["do"] == "consult" and "content" not in call:
                return call["name"], "self-call", call
        if turn["forced"]:
            return turn["forced"]["control"], turn["forced"]["trigger"], None
        if peek:
            return "", "", None
        raise SessionError("no consultation is due")

    def _run_tools(self) -> RunTools:
        turn = self._turn()
        calls = tuple(
            Call(c["id"], c["name"], parse_arguments(c["arguments"]), c["arguments"])
            for c in turn["calls"]
            if c["do"] == "run"
        )
        visible: Message = turn["reply"].copy()
        if "tool_calls" in visible:
            hidden = {call["id"] for call in turn["calls"] if call["do"] != "run"}
            visible["tool_calls"] = [call for call in visible["tool_calls"] if call["id"] not in hidden]
        return RunTools(calls, visible)

    def _close_turn(self) -> Command:
        """All calls are answered: store the results and decide what comes next."""
        turn = self._turn()
        acted = [call for call in turn["calls"] if call["do"] in ("run", "error")]
        refused = any(call["do"] == "refuse" for call in turn["calls"])
        consulted = any("consultation" in call for call in turn["calls"]) or turn["forced_advice"] is not None
        if acted:
            self._count_step(dump_json([[call["name"], call["arguments"]] for call in acted]))
        # Advice of this very turn is read together with its results, so it is newer than the step.
        self.fresh_advice = consulted or self.fresh_advice
        self._store_results(turn)
        self.turn = None
        if not acted and refused and not consulted and (ended := self._count_rejection("stuck")) is not None:
            return ended
        return self._next_model_call()

    def _end_step(self, observations: list[str], action: str) -> Command:
        """A step of a text format that no tool had to carry out."""
        self._count_step(action)
        self._append_observation(observations)
        return self._next_model_call()

    def _count_step(self, action: str) -> None:
        self.repeats = self.repeats + 1 if action == self.last_action else 1
        self.last_action = action
        self.step += 1
        self.rejections = 0
        self.fresh_advice = False

    def _store_results(self, turn: dict[str, Any]) -> None:
        if self._format.native_tools:
            for call in turn["calls"]:
                self._store_tool_message(call)
            if turn["forced_advice"] is not None:
                self._store_forced(turn["forced_advice"])
            return
        observations = [call["content"] for call in turn["calls"] if not call.get("control")]
        refusals = [call["content"] for call in turn["calls"] if call["do"] == "refuse"]
        if observations:
            self._append_observation(observations, held=turn["calls"][0]["do"] == "hold")
        elif refusals:
            self._append({"role": "user", "content": f"{refusals[0]} {self._format.describe(self._forms())}"}, "notice")
        for number in [c["consultation"] for c in turn["calls"] if "consultation" in c]:
            self._append_advice(number)
        if turn["forced_advice"] is not None:
            self._store_forced(turn["forced_advice"])

    def _store_tool_message(self, call: dict[str, Any]) -> None:
        kind: Kind = "advice" if "consultation" in call else "observation"
        meta: dict[str, Any] = {}
        if "consultation" in call:
            meta["consultation"] = call["consultation"]
        elif call.get("control") or call["do"] == "hold":
            meta["control"] = True  # the session's own words, no observation of the environment
        if call.get("error"):
            meta["error"] = True
        self._append(_tool_message(call["id"], call["content"]), kind, meta)

    def _store_forced(self, number: int) -> None:
        """Advice nobody called for: the pair of a call and its result, or a user-role observation."""
        record = self.consultations[number]
        if not self._format.native_tools:
            self._append_advice(number)
            return
        call: ToolCall = {
            "id": self._new_id(record["control"]),
            "type": "function",
            "function": {"name": record["control"], "arguments": "{}"},
        }
        self._append({"role": "assistant", "content": "", "tool_calls": [call]}, "request")
        text = self._advice_text(Critique.load(record["critique"]))
        self._append(_tool_message(call["id"], text), "advice", {"consultation": number})

    def _append_advice(self, number: int) -> None:
        text = self._advice_text(Critique.load(self.consultations[number]["critique"]))
        self._append({"role": "user", "content": text}, "advice", {"consultation": number})

    def _append_observation(self, observations: Sequence[str], *, held: bool = False) -> None:
        """One user-role observation for a step of a text format; `spans` marks the tools' own words in it."""
        parts, spans, at = [], [], 0
        for text in observations:
            head, body = "Observation:\n", escape(text)
            spans.append([at + len(head), at + len(head) + len(body)])
            parts.append(head + body)
            at += len(head) + len(body) + 2
        if note := self._standing():
            parts.append(note)
        content = "\n\n".join(parts)
        self._append(
            {"role": "user", "content": content}, "observation", {"control": True} if held else {"spans": spans}
        )

    def _standing(self) -> str:
        """What the agent must know beside the observation: consultations left, or that it must answer now."""
        if self._at_limit:
            # No forms with placeholders here: a small model answers with the placeholder.
            return "This was the last step. Give the final answer now."
        if not self.config.protocol.self_call or not self.config.controls:
            return ""
        if self.remaining == 0:
            return f"{NONE_LEFT} Only an action or an answer is possible."
        return f"Consultations left: {self.remaining}."

    def _advice_text(self, critique: Critique) -> str:
        if critique.ok:
            words = critique.text
        else:
            words = f"none this time ({critique.status.replace('_', ' ')}). Go on with your own judgement."
        left = self.remaining
        note = f"Consultations left: {left}." if left else f"{NONE_LEFT} Only an action or an answer is possible."
        return f"{ADVICE_LABEL}\n{words}\n\n{note}"

    # ------------------------------------------------------------------ what comes next

    def _next_model_call(self) -> Command:
        """Before the agent acts again: the step limit, then whatever the protocol wants first."""
        if self.observing:
            self.phase = "model"
            return self.command
        if self._at_limit:
            self.closing = True
        elif self._forced_now():
            self.checked_step = self.step
            trigger = self.config.protocol.spec.partition(":")[0]
            self.turn = {
                "calls": [],
                "forced": {"control": self.config.controls[0], "trigger": trigger},
                "forced_advice": None,
                "reply": None,
            }
            self.phase = "critic"
            return self.command
        self.checked_step = self.step
        self.phase = "model"
        return self.command

    def _forced_now(self) -> bool:
        if self.checked_step == self.step or not self._can_consult:
            return False
        moment = Moment(self.config.seed, self.trajectory, self.step, self.repeats)
        return self.config.protocol.before_step(moment)

    @property
    def _at_limit(self) -> bool:
        limit = self.config.budget.max_steps
        return limit is not None and self.step >= limit

    @property
    def _can_consult(self) -> bool:
        return bool(self.config.controls) and self.remaining > 0

    @property
    def _offers_control(self) -> bool:
        return self.config.protocol.self_call and self._can_consult and not self.closing

    def _forms(self) -> Forms:
        return Forms(
            tools=tuple(self._tools.items()),
            control=self.config.controls[0] if self._offers_control else None,
            answer=self._may_answer or self.closing,
            act=not self.closing,
        )

    def _call_model(self) -> CallModel:
        path, forms = self.history.path(), self._forms()
        length, chat_profile = len(path), self._profile

        def messages() -> list[dict[str, Any]]:
            # The path only ever grows or is replaced, so its first `length` nodes stay what they are now.
            return wire((node.message for node in path[:length]), chat_profile)

        def grammar() -> str:
            return self._format.grammar(forms)

        if not self._format.native_tools:
            return CallModel(messages, [], grammar=grammar)
        tools = [*self._schemas, *self.controls_offered]
        choice: Literal["auto", "none", "required"] = "auto"
        if self.closing:
            choice = "none"
        elif tools and not self._may_answer:
            choice = "required"
        return CallModel(messages, tools, choice, grammar)

    def _consult_state(self) -> ConsultState:
        control, trigger, _ = self._due(self._turn())
        return self.consult_state(control, trigger)

    def consult_state(self, control: str, trigger: str = "self-call") -> ConsultState:
        """What a critic asked now would be shown, in any phase. Nothing changes; the advice is not awaited here."""
        budget = self.config.budget
        return ConsultState(
            control=control,
            trigger=trigger,
            step=self.step,
            events=read_trajectory(self._path_in_turn(self.turn or {"calls": ()}), self.consultations),
            system=self.config.system,
            tools=self.config.tools,
            remaining=max(self.remaining - 1, 0),
            max_tokens=budget.max_tokens,
            max_input_tokens=budget.max_input_tokens,
            timeout=budget.timeout,
        )

    def _path_in_turn(self, turn: Mapping[str, Any]) -> Sequence[Node]:
        """The active path, with advice that this very turn has brought already but not yet stored."""
        path = self.history.path()
        given = [call["consultation"] for call in turn["calls"] if "consultation" in call]
        extra = [Node(-1, None, _tool_message("", ""), "advice", self.step, {"consultation": n}) for n in given]
        return [*path, *extra] if extra else path

    # ------------------------------------------------------------------ bookkeeping

    def _require(self, event: str, *phases: Phase) -> None:
        if self.phase not in phases:
            raise SessionError(
                f"{event}() is not possible now: the session is in phase {self.phase!r}, "
                f"and this event needs {' or '.join(repr(p) for p in phases)}"
            )

    def _turn(self) -> dict[str, Any]:
        if self.turn is None:
            raise SessionError("no turn is open")
        return self.turn

    def _begin_trajectory(self) -> None:
        self.trajectory += 1
        self.step = self.uses = self.rejections = self.repeats = 0
        self.last_action = self.draft = self.answer = None
        self.checked_step, self.fresh_advice, self.closing, self.reason = -1, False, False, ""

    def _store_system(self) -> None:
        parts = [self.config.system] if self.config.system else []
        if not self._format.native_tools:
            parts.append(self._format.describe(Forms(tuple(self._tools.items()), self._first_control())))
            parts.append(self._consultation_rules())
        text = "\n\n".join(part for part in parts if part)
        if text:
            self._append({"role": "system", "content": text}, "system")
        for example in self.config.examples:
            self._append(canonical(example), "system")

    def _first_control(self) -> str | None:
        offered = self.config.protocol.self_call and self.config.controls and self.config.budget.max_uses > 0
        return self.config.controls[0] if offered else None

    def _consultation_rules(self) -> str:
        if not self.config.controls or self.config.protocol.spec == "off":
            return ""
        rules = [
            f"A message that starts with '{ADVICE_LABEL}' carries advice from a critic who reads the same history as "
            "you. Check it against what you have observed, then act yourself."
        ]
        if self._first_control():
            rules.insert(0, CONTROLS[self.config.controls[0]])
            rules.append(f"You may ask at most {self.config.budget.max_uses} times; asking is not a step.")
        return " ".join(rules)

    def _append(self, message: Message, kind: Kind, meta: Mapping[str, Any] | None = None) -> Node:
        if self._ids is not None:
            self._ids.update(call["id"] for call in message.get("tool_calls", ()))
        return self.history.append(message, kind, self.step, meta)

    def _with_ids(self, reply: Message) -> Message:
        """Replace missing, empty and duplicate call ids, so that every id gets exactly one result."""
        calls = reply.get("tool_calls")
        if not calls:
            return reply
        taken: set[str] = set()
        fixed: list[ToolCall] = []
        for call in calls:
            made = self.call_id(call["id"], taken)
            taken.add(made)
            fixed.append({**call, "id": made})
        return {**reply, "tool_calls": fixed}

    def call_id(self, proposed: str, taken: set[str]) -> str:
        """The id under which a call of the next reply is stored: the model's own, unless it is empty or in use.

        Args:
            proposed: the id the model gave.
            taken: ids of this same reply, beside those of the history.
        """
        if proposed and proposed not in taken and proposed not in self._known_ids():
            return proposed
        return self._new_id(avoid=taken | self._known_ids())

    def _known_ids(self) -> set[str]:
        if self._ids is None:
            self._ids = {call["id"] for message in self.history.messages() for call in message.get("tool_calls", ())}
        return self._ids

    def _new_id(self, name: str = "call", avoid: set[str] | None = None) -> str:
        taken = self._known_ids() if avoid is None else avoid
        while True:
            self.synthetic += 1
            made = f"{name}_{self.synthetic}"
            if made not in taken:
                return made

    def _finish(self, answer: str | None, reason: Reason) -> Command:
        self.answer, self.reason, self.phase, self.turn = answer, reason, "done", None
        return self.command


def _shifted(facts: Mapping[str, Any], name: str, by: int) -> dict[str, Any]:
    """A copy in which the consultation number under `name`, if there is one, has moved."""
    number = facts.get(name)
    return {**facts, name: number + by} if isinstance(number, int) else dict(facts)


def _escaped(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A user's words, made harmless; parts that are not text pass as they are."""
    if isinstance(content, str):
        return escape(content)
    return [{**part, "text": escape(part["text"])} if part.get("type") == "text" else part for part in content]


def _checked(critique: Critique) -> Critique:
    """A user's own critic may hand over anything: texts become encodable, and `ok` without advice is malformed."""
    facts: dict[str, Any] = {name: clean(getattr(critique, name)) for name in ("analysis", "advice", "raw", "detail")}
    if critique.ok and not critique.advice.strip():
        facts |= {"status": "malformed", "detail": facts["detail"] or "the advice was empty"}
    return replace(critique, **facts)


NOT_RUN = "Not run yet: read the critic's advice first, then decide."
NONE_LEFT = "No consultations are left."
NOT_OFFERED = "A consultation cannot be asked for here."


def _tool_message(call_id: str, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _control_schema(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": CONTROLS[name],
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    }
