"""One scripted model gives the same trajectory through every shell (SPEC §4).

A new shell joins with one line in `SHELLS`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from parity_cases import CASES, TOOLS, Case

from caddie_sdk import CaddieError, Session, arun, create_caddie_agent, run
from caddie_sdk.messages import canonical
from caddie_sdk.testing import ScriptedModel, check_wire

# ------------------------------------------------------------------ what is compared


@dataclass
class Outcome:
    """All that a caller can see of a run."""

    answers: list[str | None] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    transcript: list[dict[str, Any]] = field(default_factory=list)
    consultations: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    wire: list[list[dict[str, Any]]] = field(default_factory=list)
    offered: list[tuple[list[str], str]] = field(default_factory=list)
    error: str = ""

    def finish(self, session: Session) -> Outcome:
        self.session = timeless(session.dump())
        self.transcript = [dict(message) for message in session.transcript()]
        self.consultations = timeless(session.consultations)
        self.usage = {"agent": session.usage.dump(), "critic": session.critic_usage.dump()}
        return self


def timeless(value: Any) -> Any:
    """A copy without the wall times."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key != "seconds"}
    return [timeless(item) for item in value] if isinstance(value, list | tuple) else value


def saw(model: ScriptedModel, outcome: Outcome) -> None:
    for call in model.seen:
        outcome.wire.append(call.messages)
        outcome.offered.append(([tool["function"]["name"] for tool in call.tools], call.tool_choice))


# ------------------------------------------------------------------ the shells

Drive = Callable[[Session, str, Any, Case, dict[str, Any]], Any]


def loop_shell(drive: Drive) -> Callable[[Case], Outcome]:
    def shell(case: Case) -> Outcome:
        session, model, critics, outcome = (
            Session(case.config()),
            ScriptedModel(case.replies),
            case.critics(),
            Outcome(),
        )
        for turn in case.turns:
            try:
                finish = drive(session, turn, model, case, critics)
            except CaddieError as error:
                outcome.error = type(error).__name__
                break
            outcome.answers.append(finish.answer)
            outcome.reasons.append(finish.reason)
        saw(model, outcome)
        return outcome.finish(session)

    return shell


Call = Callable[[Any, Any, Any], dict[str, Any]]


def graph_shell(call: Call, langchain: bool = False) -> Callable[[Case], Outcome]:
    def shell(case: Case) -> Outcome:
        model: Any = FakeChat(script=list(case.replies)) if langchain else ScriptedModel(case.replies)
        critics, outcome = case.critics(), Outcome()
        agent = create_caddie_agent(
            model,
            TOOLS,
            critic=critics.get("call_critic"),
            feedback=critics.get("request_feedback"),
            system=case.system,
            examples=case.examples,
            protocol=case.protocol,
            action_format=case.format,
            budget=case.budget,
            on_error=case.on_error,
            seed=case.seed,
            checkpointer=InMemorySaver(),
        )
        thread = {"configurable": {"thread_id": "1"}}
        for turn in case.turns:
            try:
                output = call(agent, {"messages": turn}, thread)
            except CaddieError as error:
                outcome.error = type(error).__name__
                break
            outcome.answers.append(output["answer"])
            outcome.reasons.append(output["reason"])
        outcome.finish(Session.load(agent.get_state(thread).values["session"]))
        if not outcome.error:
            # What invoke returns is what the session holds.
            assert output["messages"] == outcome.transcript
            assert timeless(output["consultations"]) == outcome.consultations
            assert output["usage"] == outcome.usage
        saw(model, outcome) if not langchain else model.saw(outcome)
        return outcome

    return shell


def last_of_stream(agent: Any, said: Any, thread: Any) -> dict[str, Any]:
    return list(agent.stream(said, thread, stream_mode="values"))[-1]  # type: ignore[no-any-return]


async def last_of_astream(agent: Any, said: Any, thread: Any) -> dict[str, Any]:
    return [values async for values in agent.astream(said, thread, stream_mode="values")][-1]


SHELLS: dict[str, Callable[[Case], Outcome]] = {
    "run": loop_shell(lambda session, turn, model, case, critics: run(session, turn, model, TOOLS, critics)),
    "arun": loop_shell(lambda *a: asyncio.run(arun(a[0], a[1], a[2], TOOLS, a[4]))),
    "invoke": graph_shell(lambda agent, said, thread: agent.invoke(said, thread)),
    "ainvoke": graph_shell(lambda agent, said, thread: asyncio.run(agent.ainvoke(said, thread))),
    "stream": graph_shell(last_of_stream),
    "astream": graph_shell(lambda *a: asyncio.run(last_of_astream(*a))),
    "langchain invoke": graph_shell(lambda agent, said, thread: agent.invoke(said, thread), langchain=True),
    "langchain ainvoke": graph_shell(lambda agent, said, thread: asyncio.run(agent.ainvoke(said, thread)), True),
}
REFERENCE = "arun"


class FakeChat(BaseChatModel):
    """A LangChain chat model that replays a script."""

    script: list[Any]
    seen: list[tuple[list[BaseMessage], dict[str, Any]]] = []  # noqa: RUF012 - pydantic copies it

    @property
    def _llm_type(self) -> str:
        return "fake"

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Any:
        return self.bind(tools=list(tools), **({"tool_choice": tool_choice} if tool_choice else {}))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        self.seen.append((messages, kwargs))
        said = self.script.pop(0)
        if isinstance(said, BaseException):
            raise said
        message = canonical({"role": "assistant", "content": said} if isinstance(said, str) else said)
        parsed, broken = [], []
        for call in message.get("tool_calls", ()):
            name, text = call["function"]["name"], call["function"]["arguments"]
            try:
                parsed.append({"name": name, "args": json.loads(text), "id": call["id"]})
            except ValueError as error:
                broken.append({"name": name, "args": text, "id": call["id"], "error": str(error)})
        usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
        answer = AIMessage(message["content"], tool_calls=parsed, invalid_tool_calls=broken, usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=answer)])

    def saw(self, outcome: Outcome) -> None:
        for messages, kwargs in self.seen:
            outcome.wire.append(convert_to_openai_messages(messages))
            names = [tool["function"]["name"] for tool in kwargs.get("tools", ())]
            outcome.offered.append((names, kwargs.get("tool_choice") or "auto"))


# ------------------------------------------------------------------ the tests


@cache
def reference(number: int) -> Outcome:
    return SHELLS[REFERENCE](CASES[number])


@pytest.fixture(params=range(len(CASES)), ids=[case.name for case in CASES])
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_case_tells_what_it_should(number: int) -> None:
    case, outcome = CASES[number], reference(number)
    assert outcome.answers == list(case.answers)
    assert outcome.reasons == list(case.reasons)
    assert outcome.error == case.error
    assert tuple(record["critique"]["status"] for record in outcome.consultations) == case.statuses
    text, at = "\n".join(str(message["content"]) for message in outcome.transcript), 0
    for expected in case.tells:
        assert expected in text[at:], f"{expected!r} is not told, or not there, in:\n{text}"
        at = text.index(expected, at) + len(expected)
    for messages in outcome.wire:
        check_wire(messages)


def test_shell_agrees_with_the_loop(shell: str, number: int) -> None:
    case = CASES[number]
    if case.native_only and shell.startswith("langchain"):
        pytest.skip("a LangChain model cannot say this")
    expected, outcome = reference(number), SHELLS[shell](case)
    assert outcome.transcript == expected.transcript
    assert outcome.consultations == expected.consultations
    assert (outcome.answers, outcome.reasons, outcome.error) == (expected.answers, expected.reasons, expected.error)
    assert outcome.usage == expected.usage
    assert outcome.offered == expected.offered
    assert spoken(outcome.wire) == spoken(expected.wire)
    assert outcome.session == expected.session


def spoken(wire: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Wire copies, with the two ways of saying 'no text' made one (LangChain knows only the empty string)."""
    return [[{**message, "content": message["content"] or ""} for message in messages] for messages in wire]


def test_table_covers_every_shell_phase_and_status() -> None:
    """The table would prove little if nothing in it was rejected, consulted, refused or stopped."""
    outcomes = [reference(number) for number in range(len(CASES))]
    reasons = {reason for outcome in outcomes for reason in outcome.reasons}
    assert reasons == {"answer", "max_steps", "malformed", "stuck", "context_overflow"}
    triggers = {record["trigger"] for outcome in outcomes for record in outcome.consultations}
    assert triggers == {"self-call", "guarded", "fixed", "windowed", "probabilistic"}
    kinds = {node["kind"] for outcome in outcomes for node in outcome.session["history"]["nodes"]}
    assert kinds == {"system", "task", "action", "observation", "advice", "request", "notice"}


def test_comparison_notices_a_difference() -> None:
    """A shell that loses one word of advice is found out."""
    number = next(n for n, case in enumerate(CASES) if case.name == "tool-calls: only the critic")
    changed = SHELLS["run"](replace(CASES[number], system="You are careless."))
    assert changed.session != reference(number).session
    assert changed.wire != reference(number).wire
