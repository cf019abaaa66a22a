"""`CriticCapability`: an agent of pydantic-ai may consult a critic while it works."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

try:
    from pydantic_ai import Tool, ToolReturn
    from pydantic_ai import messages as said
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.toolsets import FunctionToolset
except ImportError as error:
    from caddie_sdk.errors import MissingExtra

    raise MissingExtra("CriticCapability", "pydantic-ai") from error

from caddie_sdk.budget import Budget
from caddie_sdk.commands import Consult, Finish
from caddie_sdk.config import CONTROLS
from caddie_sdk.critic import Critic
from caddie_sdk.critique import Critique
from caddie_sdk.history import Node
from caddie_sdk.intervention import Intervention
from caddie_sdk.messages import canonical
from caddie_sdk.relay.adopt import Adoption, Said, Unadopted, adopted, leading_system
from caddie_sdk.session import NONE_LEFT, NOT_OFFERED, Session
from caddie_sdk.shells.consult import aconsult
from caddie_sdk.shells.terms import agree, check_guards, named_critics
from caddie_sdk.usage import Usage

log = logging.getLogger("caddie.pydantic_ai")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass
class CriticCapability(AbstractCapability[Any]):
    """Lets an agent consult a critic: `Agent(model, capabilities=[CriticCapability(critic)])`.

    Attributes:
        critic: answers `call_critic`.
        feedback: answers `request_feedback`.
        protocol: when to consult; an `Intervention` or its text form (`self-call`, `guarded:refund`, ...).
        budget: limits; `max_steps` and `min_steps` mean nothing here.
        on_error: `continue` goes on without advice when a consultation fails; `raise` raises ConsultationError.
        seed: source of the protocol's randomness.
    """

    critic: Critic | None = None
    feedback: Critic | None = None
    protocol: Intervention | str = "self-call"
    budget: Budget = field(default_factory=Budget)
    on_error: str = "continue"
    seed: int = 0

    def __post_init__(self) -> None:
        self._critics = named_critics(self.critic, self.feedback, "CriticCapability")
        self._terms = agree(self._critics, self.protocol, self.budget, self.on_error)
        self._session: Session | None = None
        self._told: list[Any] = []
        self._answers: dict[str, ToolReturn[str]] = {}
        self._unasked: list[said.ToolCallPart] = []

    async def for_run(self, ctx: Any) -> CriticCapability:
        """A copy with a session of its own."""
        return replace(self)

    def get_toolset(self) -> FunctionToolset[Any]:
        """The control tools. Their calls are answered in `wrap_tool_execute`."""
        made = [Tool.from_schema(_stand_in, name, CONTROLS[name], _NO_ARGUMENTS) for name in self._critics]
        return FunctionToolset(made)

    async def wrap_tool_execute(self, ctx: Any, *, call: Any, tool_def: Any, args: Any, handler: Any) -> Any:
        """A call that the session has answered does not run: advice, refusals, guarded calls that wait."""
        return self._answers.get(call.tool_call_id) or await handler(args)

    async def wrap_model_request(self, ctx: Any, *, request_context: Any, handler: Any) -> said.ModelResponse:
        """Consult where the protocol wants it, ask the model, consult where it asks."""
        parameters = request_context.model_request_parameters
        own = [tool for tool in parameters.function_tools if tool.name not in self._critics]
        system = "\n\n".join(part.content for part in parameters.instruction_parts or ())
        session, mark = self._tell(request_context.messages, system, own)
        if session is None:
            return await handler(_offering(request_context, own))  # type: ignore[no-any-return]
        session.resume()
        await self._consult(session, mark)
        if self._unasked:
            # Advice that nobody called for: a call in the model's name, which is answered like its own.
            calls, self._unasked = self._unasked, []
            return said.ModelResponse(calls, model_name="caddie")
        offered = {tool["function"]["name"] for tool in session.controls_offered}
        tools = [tool for tool in parameters.function_tools if tool in own or tool.name in offered]
        response: said.ModelResponse = await handler(_offering(request_context, tools))
        mark = len(session.history.path())
        spent = Usage(response.usage.input_tokens, response.usage.output_tokens, response.usage.cache_read_tokens, 1)
        session.model_replied(next(_read(response)).message, spent)
        await self._consult(session, mark)
        if isinstance(ended := session.command, Finish) and response.tool_calls:
            return replace(response, parts=[said.TextPart(ended.answer or response.text or NONE_LEFT)])
        return _as_stored(response, session.history.path()[mark].message.get("tool_calls", ()))

    async def _consult(self, session: Session, mark: int) -> None:
        """Ask for as long as the session wants it. Notes what it answers, and advice that nobody called for."""
        while isinstance(command := session.command, Consult):
            session.critic_replied(await aconsult(self._critics, command.state))
        nodes = session.history.path()[mark:]
        own = [(n.message["tool_call_id"], n.message["content"], n.meta) for n in nodes if _is_answer(n)]
        own += [(c["id"], c["content"], c) for c in (session.turn or {"calls": ()})["calls"] if c["do"] != "run"]
        for call_id, content, facts in own:
            number = facts.get("consultation")
            critique = None if number is None else session.consultations[number]["critique"]
            self._answers[call_id] = ToolReturn(content, metadata=critique)
        asked = [call for node in nodes if node.kind == "request" for call in node.message["tool_calls"]]
        self._unasked += [said.ToolCallPart(call["function"]["name"], {}, call["id"]) for call in asked]

    def _tell(self, messages: list[Any], system: str, own: Sequence[Any]) -> tuple[Session | None, int]:
        """The run's session, told all messages; and where in its path begins what it was told just now."""
        before, told, self._told = self._session, self._told, list(messages)
        try:
            if before and told and len(told) <= len(messages) and told[-1] is messages[len(told) - 1]:
                session, mark = before, len(before.history.path())
                # What models say, the session knows already; and the words it answered calls with are its own.
                new = [item for message in messages[len(told) :] for item in _read(message)]
                new = [item for item in new if item.message.get("tool_call_id", "") not in self._answers]
                Adoption(session, [item for item in new if item.message["role"] != "assistant"]).tell()
            else:
                session = self._adopted(messages, system, own)
                session.uses = max(session.uses, before.uses if before else 0)
                mark = len(session.history.path())
            if session.phase != "model":
                raise Unadopted(f"the history ends where no model is to speak ({session.phase})")
        except Unadopted as reason:
            log.warning("no advice for this model call: %s", reason)
            self._session = None
            return None, 0
        self._session = session
        return session, mark

    def _adopted(self, messages: list[Any], system: str, own: Sequence[Any]) -> Session:
        """A session that has been told a history, earlier runs in it."""
        check_guards(self._terms.protocol, [tool.name for tool in own])
        items = [Said(canonical({"role": "system", "content": system}))] if system else []
        items += [item for message in messages for item in _read(message)]
        new = [*_read(messages[-1])]
        cut = max(len(items) - len(new), len(leading_system(items)))
        session = adopted(items[:cut], [_schema(tool) for tool in own], self._terms, self.seed)
        if session.phase == "model" and all(item.message["role"] != "tool" for item in new):
            session.stop("answer")  # an earlier run ended on an output tool
        Adoption(session, items[cut:]).tell()
        return session


def _is_answer(node: Node) -> bool:
    """Whether a tool result is the session's own word."""
    return node.kind == "advice" or (node.message["role"] == "tool" and bool(node.meta.get("control")))


def _read(message: Any) -> Iterator[Said]:
    """A message as a session is told it."""
    if isinstance(message, said.ModelResponse):
        calls = [
            {"id": call.tool_call_id, "function": {"name": call.tool_name, "arguments": call.args_as_json_str()}}
            for call in message.tool_calls
        ]
        yield Said(canonical({"role": "assistant", "content": message.text, "tool_calls": calls}))
        return
    for part in message.parts:
        if isinstance(part, said.SystemPromptPart):
            yield Said(canonical({"role": "system", "content": part.content}))
        elif isinstance(part, said.UserPromptPart):
            content = [part.content] if isinstance(part.content, str) else part.content
            parts = [one if isinstance(one, str) else {"type": getattr(one, "kind", "file")} for one in content]
            yield Said(canonical({"role": "user", "content": parts}))
        elif isinstance(part, said.ToolReturnPart):
            plain = {"role": "tool", "tool_call_id": part.tool_call_id, "content": part.model_response_str()}
            critique = Critique.load(part.metadata) if part.tool_name in CONTROLS and part.metadata else None
            yield Said(canonical(plain), (), critique)
        elif isinstance(part, said.RetryPromptPart):
            role = {"role": "tool", "tool_call_id": part.tool_call_id} if part.tool_name else {"role": "user"}
            yield Said(canonical({**role, "content": part.model_response()}))


def _as_stored(response: said.ModelResponse, calls: Iterable[Any]) -> said.ModelResponse:
    """With the ids that the session gave to its calls. Control calls take no arguments, so they get none."""
    ids = iter([call["id"] for call in calls])

    def stored(part: Any) -> Any:
        if not isinstance(part, said.ToolCallPart):
            return part
        changes: Any = {"args": {}} if part.tool_name in CONTROLS else {}
        return replace(part, tool_call_id=next(ids), **changes)

    return replace(response, parts=[stored(part) for part in response.parts])


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters_json_schema}
    return {"type": "function", "function": function}


def _offering(request_context: Any, tools: list[Any]) -> Any:
    parameters = replace(request_context.model_request_parameters, function_tools=tools)
    return replace(request_context, model_request_parameters=parameters)


async def _stand_in(**_: Any) -> str:
    return NOT_OFFERED
