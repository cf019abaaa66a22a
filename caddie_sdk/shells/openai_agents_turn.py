"""One request of the OpenAI Agents SDK to a model, as an exchange with a session behind it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agents import FunctionTool, ModelResponse
from agents import Usage as AgentsUsage
from agents.models.fake_id import FAKE_RESPONSES_ID

from caddie_sdk.messages import Message, text_of
from caddie_sdk.relay.adopt import BETWEEN, Said, Terms, Unadopted, leading_system
from caddie_sdk.relay.exchange import Exchange
from caddie_sdk.relay.flow import Relay
from caddie_sdk.relay.items import assistant_turn, open_calls, read_items
from caddie_sdk.relay.ledger import Ledger, beside, chain, extend, fingerprint
from caddie_sdk.relay.responses import restate
from caddie_sdk.usage import Usage


@dataclass
class Ask:
    """One request of the SDK to a model, as `Model.get_response` takes it."""

    system: str | None
    input: Any
    settings: Any
    tools: list[Any]
    schema: Any
    handoffs: list[Any]
    tracing: Any
    server: dict[str, Any]

    @classmethod
    def read(cls, system: str | None, input: Any, settings: Sequence[Any], more: Mapping[str, Any]) -> Ask:
        """From the arguments of a call, the middle ones of which may come by position or by name."""
        names = ("model_settings", "tools", "output_schema", "handoffs", "tracing")
        given = dict(zip(names, settings, strict=False)) | dict(more)
        model_settings, tools, schema, handoffs, tracing = [given.pop(name) for name in names]
        return cls(system, input, model_settings, tools, schema, handoffs, tracing, given)

    def positional(self) -> tuple[Any, ...]:
        return self.system, self.input, self.settings, self.tools, self.schema, self.handoffs, self.tracing

    @property
    def asks(self) -> bool:
        """Whether the model may choose the control tool."""
        return self.settings.tool_choice in (None, "auto", "required")

    @property
    def kept_by_server(self) -> str:
        """Name of the history that the server keeps and `input` continues; empty where `input` is all of it."""
        return str(self.server.get("previous_response_id") or self.server.get("conversation_id") or "")


class Turn:
    """One request of the SDK, driven to an answer that the SDK is to see.

    Raises:
        Unadopted: the history has no reading as a trajectory.
    """

    def __init__(self, ask: Ask, relay: Relay) -> None:
        self.ask, self._ledger = ask, relay.ledger
        self.controls = relay.terms.controls
        self.quiet = ask.schema is not None and not ask.schema.is_plain_text()
        # Marked once: the ledger's view and the exchange go by the same.
        self._said = [replace(item, mark=item.mark or fingerprint(item.message)) for item in read_items(ask.input)]
        base = None
        if kept := ask.kept_by_server:
            key = beside(kept, "kept")
            base = self._ledger.get([key]).get(key)
            if base is None and "previous_response_id" in ask.server and ask.server["previous_response_id"]:
                raise Unadopted("the server keeps a history that did not come by here")
        # Instructions may change from step to step (the time of day in them is enough), so no key depends on them.
        terms, scope = _terms(ask, relay.terms), f"agents/{kept}"
        self._view = _View(relay.ledger, scope, self._said, ask.system or "")
        live = relay.live if self._view.told_apart else None
        self.exchange = Exchange(self._said, _schemas(ask), terms, self._view, scope, live, base)
        system = [ask.system or "", *(text_of(item.message) for item in leading_system(self._said))]
        session = self.exchange.session
        session.config = replace(session.config, system=BETWEEN.join(text for text in system if text))
        self.exchange.command = session.command
        self._start = self.exchange.known
        self._said_before: list[Any] = []
        self._latest: ModelResponse | None = None
        self.shown_calls: set[str] = set()

    def request(self) -> Ask:
        """What the model is asked now."""
        kinds: dict[str, str] = {}
        items = [item for node in self.exchange.nodes(self._start) for item in restate(*node, kinds)]
        server = dict(self.ask.server)
        if self._latest is not None and server.get("previous_response_id"):
            server["previous_response_id"] = self._latest.response_id
        offered = self.exchange.session.controls_offered if self.ask.asks else []
        tools = [*self.ask.tools, *(_control_tool(schema["function"]) for schema in offered)]
        return replace(self.ask, input=items, tools=tools, server=server)

    def replied(self, answer: ModelResponse) -> None:
        """The model answered."""
        if self._latest is not None and not self.quiet:
            self._said_before += [item for item in self._latest.output if item.type == "message"]
        self._latest = answer
        if self.ask.kept_by_server:
            self._start = len(self.exchange.session.history.path()) + 1
        items = _dumped(answer.output)
        if self.ask.settings.store is False:
            # A server that stores nothing knows a reasoning item only by its encrypted content.
            items = [item for item in items if item.get("type") != "reasoning" or item.get("encrypted_content")]
        self.exchange.replied(assistant_turn(items), items, _usage(answer.usage))

    def finish(self, answer: ModelResponse) -> list[Any]:
        """The output that the SDK sees, once the exchange is done. What it does not see is kept for later requests."""
        output = [*self._said_before, *self._own(answer.output)]
        visible = assistant_turn(_dumped(output))
        self._view.expect(self.exchange.keys[-1], visible)
        self.exchange.save(visible)
        kept = self.ask.server.get("conversation_id") or answer.response_id
        if kept and kept != FAKE_RESPONSES_ID and self._may_go_on():
            self._ledger.put(beside(kept, "kept"), self.exchange.session.dump())
        return output

    def _may_go_on(self) -> bool:
        """Whether a later request may continue this response by its id: at the end of a run, and wherever the SDK does
        not send the whole history, which its first request does not tell."""
        first = all(item.message["role"] != "assistant" for item in self._said)
        return bool(self.ask.kept_by_server) or first or self.exchange.session.phase == "done"

    def _own(self, output: Sequence[Any]) -> list[Any]:
        """The items of the model's last answer without the calls that are none of the SDK's business."""
        visible = {call["id"] for call in self.exchange.visible().get("tool_calls", ())}
        stored, written = iter(self.exchange.last_calls()), _dumped(output)
        calls, own = open_calls(written), []
        for item, dumped in zip(output, written, strict=True):
            if dumped not in calls:
                own.append(item)
                continue
            call_id = next(stored, {"id": ""})["id"]
            if call_id in visible:
                self.shown_calls.add(item.call_id)
                own.append(item if item.call_id == call_id else item.model_copy(update={"call_id": call_id}))
        return own


class _View:
    """The ledger, as one request may see it.

    A conversation that holds a call whose id no other can have is found under whatever instructions. One of plain words
    is found under the same instructions only: the critic may have read in others' what is nobody else's business.
    """

    def __init__(self, ledger: Ledger, scope: str, said: Sequence[Said], instructions: str) -> None:
        self._ledger = ledger
        self._salt = hashlib.sha256(instructions.encode("utf-8", "surrogatepass")).hexdigest()
        self._apart: set[str] = set()
        self.told_apart = False
        for key, item in zip(chain(scope, [item.mark for item in said]), said, strict=True):
            self._note(key, item.message)

    def expect(self, key: str, message: Message) -> None:
        """The history is about to grow by this message."""
        self._note(extend(key, message), message)

    def _note(self, key: str, message: Message) -> None:
        self.told_apart = self.told_apart or any(_UNIQUE.search(call["id"]) for call in message.get("tool_calls", ()))
        if self.told_apart:
            self._apart.add(key)

    def _place(self, key: str) -> str:
        return key if key in self._apart else beside(key, self._salt)

    def get(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        places = {self._place(key): key for key in keys}
        return {places[place]: entry for place, entry in self._ledger.get(list(places)).items()}

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        self._ledger.put(self._place(key), entry)

    def drop(self, key: str) -> None:
        self._ledger.drop(self._place(key))


_UNIQUE = re.compile(r"(?=[A-Za-z]*[0-9])[A-Za-z0-9]{9,}")
"""What makes a call's id one of its kind; some servers count (`call_1`, `functions.search:0`)."""


def _terms(ask: Ask, terms: Terms) -> Terms:
    """With a deadline for the critic that leaves the model time of its own, where the SDK limits a request's."""
    limit = getattr(ask.settings, "timeout", None)
    if limit is None or limit / 2 >= terms.budget.timeout:
        return terms
    return replace(terms, budget=replace(terms.budget, timeout=limit / 2))


def _schemas(ask: Ask) -> list[dict[str, Any]]:
    """What the agent can do, in chat form: its function tools, and agents it may hand over to."""
    functions = {
        tool.name: {"description": tool.description, "parameters": tool.params_json_schema}
        for tool in ask.tools
        if isinstance(tool, FunctionTool)
    }
    for handoff in ask.handoffs:
        functions[handoff.tool_name] = {
            "description": handoff.tool_description,
            "parameters": handoff.input_json_schema,
        }
    return [{"type": "function", "function": {"name": name, **facts}} for name, facts in functions.items()]


def _control_tool(function: Mapping[str, Any]) -> FunctionTool:
    return FunctionTool(
        name=function["name"],
        description=function["description"],
        params_json_schema=dict(function["parameters"]),
        on_invoke_tool=_never,
        strict_json_schema=False,
    )


async def _never(context: Any, arguments: str) -> str:
    raise AssertionError("a control tool is answered by the model it was offered to, never run")


def _dumped(output: Sequence[Any]) -> list[dict[str, Any]]:
    """Output items as they are sent back as input."""
    answer = ModelResponse(output=list(output), usage=AgentsUsage(), response_id=None)
    return [dict(item) for item in answer.to_input_items()]


def _usage(spent: Any) -> Usage:
    cached = getattr(spent.input_tokens_details, "cached_tokens", 0) or 0
    return Usage(spent.input_tokens, spent.output_tokens, cached, max(spent.requests, 1))
