"""`attach(agent, critic)`: an agent of the OpenAI Agents SDK that may consult a critic while it works.

The critic sits in the agent's `Model`, the one place of the SDK that sees the whole history before each step and every
call before it runs. Consultations happen between the SDK's request and the answer it gets: they take none of its turns
and none of its tools run for them. The history the SDK passes in is the only state, together with a ledger that finds
earlier consultations again by its content, so runs, agents and sessions cannot be mixed up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from caddie_sdk.budget import Budget
from caddie_sdk.commands import Consult
from caddie_sdk.critic import Critic
from caddie_sdk.errors import ConfigError, MessageError, MissingExtra
from caddie_sdk.intervention import Intervention
from caddie_sdk.relay.adopt import Unadopted
from caddie_sdk.relay.flow import Relay
from caddie_sdk.relay.ledger import Ledger
from caddie_sdk.shells.consult import aconsult
from caddie_sdk.shells.terms import check_guards, named_critics
from caddie_sdk.shells.wrap import make_relay

try:
    from agents import (
        Agent,
        Handoff,
        Model,
        ModelProvider,
        ModelResponse,
        MultiProvider,
        custom_span,
        get_current_trace,
    )
    from agents import Usage as AgentsUsage
except ImportError as missing:
    raise MissingExtra("attach() for the OpenAI Agents SDK", "openai-agents") from missing

from caddie_sdk.shells.openai_agents_stream import Weaver
from caddie_sdk.shells.openai_agents_turn import Ask, Turn

Target = TypeVar("Target", bound="Agent[Any] | Model | ModelProvider")


def attach(
    target: Target,
    critic: Critic | None = None,
    *,
    feedback: Critic | None = None,
    protocol: Intervention | str = "self-call",
    budget: Budget | None = None,
    on_error: str = "continue",
    ledger: Ledger | str | Path | None = None,
) -> Target:
    """A copy of an agent whose model may consult a critic.

    The control tool is added to each request that leaves the choice of tools to the model, and withdrawn when no
    consultation is left. The SDK sees neither its calls nor the advice; hooks, tools, guardrails, sessions and
    `max_turns` mean what they meant before.

    Args:
        target: an `Agent`. Also a `Model` or a `ModelProvider`, for `RunConfig(model=...)` and
            `RunConfig(model_provider=...)`, which take the place of an agent's own model.
        critic: answers `call_critic`.
        feedback: answers `request_feedback`.
        protocol: when to consult; an `Intervention` or its text form.
        budget: limits; `max_steps` and `min_steps` are the SDK's business here (`max_turns`) and not looked at.
        on_error: `continue` goes on without advice when a consultation fails; `raise` lets ConsultationError out of
            the run.
        ledger: where turns with consultations are kept between requests: by default in memory (64 MiB), or the path
            of an SQLite file that outlives the process. Agents that hand a conversation over to each other see each
            other's advice when they share one.

    Raises:
        ConfigError: the target is none of these or has a critic already, or a setting is wrong.
        MissingExtra: openai-agents is not installed.
    """
    critics = named_critics(critic, feedback, "attach")
    relay = make_relay(critics, protocol=protocol, budget=budget, on_error=on_error, ledger=ledger)
    made: Any
    if isinstance(target, Agent):
        made = _attached(target, critics, relay)
    elif isinstance(target, Model):
        made = CriticModel(target, critics, relay)
    elif isinstance(target, ModelProvider):
        made = _CriticProvider(target, critics, relay)
    else:
        raise ConfigError(f"attach takes an Agent, a Model or a ModelProvider, not {type(target).__name__}")
    return made  # type: ignore[no-any-return]


def _attached(agent: Agent[Any], critics: Mapping[str, Critic], relay: Relay) -> Agent[Any]:
    _check_names(agent, critics, relay.terms.protocol)
    inner = agent.model if isinstance(agent.model, Model) else _Named(agent.model)
    made = agent.clone(model=CriticModel(inner, critics, relay))
    # The SDK derives defaults from the model's name, which the clone does not show any more.
    made.model_settings = agent.model_settings
    return made


def _check_names(agent: Agent[Any], critics: Mapping[str, Critic], rule: Intervention) -> None:
    names = [tool.name for tool in agent.tools]
    for name in critics:
        if name in names:
            raise ConfigError(f"agent {agent.name!r} has a tool named {name!r}, the name of a control tool; rename it")
    if agent.mcp_servers:
        return  # their tools are known only in a run
    names += [to.tool_name if isinstance(to, Handoff) else Handoff.default_tool_name(to) for to in agent.handoffs]
    check_guards(rule, names)


# ---------------------------------------------------------------------- what the SDK calls


class CriticModel(Model):
    """A model of the SDK with a critic at its side; `attach` makes it."""

    def __init__(self, inner: Model, critics: Mapping[str, Critic], relay: Relay) -> None:
        if isinstance(inner, CriticModel):
            raise ConfigError("this model has a critic already; attach to the agent or to the model, not to both")
        self.inner, self._critics, self._relay = inner, critics, relay

    def __getattr__(self, name: str) -> Any:
        # Whatever the SDK or an application asks a model beyond the interface, the model itself answers.
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    async def _cleanup_on_run_end(self, owner: object) -> None:
        await self.inner._cleanup_on_run_end(owner)

    async def close(self) -> None:
        """Close the model itself."""
        await self.inner.close()

    def get_retry_advice(self, request: Any) -> Any:
        """The model's own advice."""
        return self.inner.get_retry_advice(request)

    async def get_response(
        self, system_instructions: str | None, input: Any, *settings: Any, **more: Any
    ) -> ModelResponse:
        """The model's answer, after whatever it had to ask the critic."""
        ask = Ask.read(system_instructions, input, settings, more)
        turn = self._turn(ask)
        if turn is None:
            return await self.inner.get_response(*ask.positional(), **ask.server)
        answers: list[ModelResponse] = []
        with turn.exchange.kept_on_failure():
            while True:
                await self._consult(turn)
                sent = turn.request()
                answers.append(await self.inner.get_response(*sent.positional(), **sent.server))
                turn.replied(answers[-1])
                await self._consult(turn)
                if turn.exchange.done:
                    break
        output = turn.finish(answers[-1])
        self._relay.observer.finished(turn.exchange)
        if len(answers) == 1 and output == answers[-1].output:
            return answers[-1]
        spent = AgentsUsage()
        for answer in answers:
            spent.add(answer.usage)
        return replace(answers[-1], output=output, usage=spent)

    async def stream_response(
        self, system_instructions: str | None, input: Any, *settings: Any, **more: Any
    ) -> AsyncIterator[Any]:
        """The same as a stream: text as it arrives, without the calls of control tools."""
        ask = Ask.read(system_instructions, input, settings, more)
        turn = self._turn(ask)
        if turn is None:
            async for event in _events(self.inner, ask):
                yield event
            return
        weaver = Weaver(turn.controls, self._relay.terms.protocol.guards, quiet=turn.quiet)
        with turn.exchange.kept_on_failure():
            while True:
                await self._consult(turn)
                async for event in _events(self.inner, turn.request()):
                    for shown in weaver.feed(event):
                        yield shown
                if weaver.completed is None:
                    turn.exchange.abandon()
                    return  # the SDK finds out by itself, as without a critic
                answer = weaver.answer()
                turn.replied(answer)
                await self._consult(turn)
                if turn.exchange.done:
                    break
                weaver.begin()
        output = turn.finish(answer)
        self._relay.observer.finished(turn.exchange)
        for shown in weaver.end(output, turn.shown_calls):
            yield shown

    def _turn(self, ask: Ask) -> Turn | None:
        """The request as an exchange; None where it has to go on as it is."""
        try:
            return Turn(ask, self._relay)
        except (Unadopted, MessageError, ConfigError) as reason:
            self._relay.observer.unadopted(str(reason))
            return None

    async def _consult(self, turn: Turn) -> None:
        while isinstance(turn.exchange.command, Consult):
            state = turn.exchange.command.state
            off = turn.ask.tracing.is_disabled() or get_current_trace() is None
            # Names and numbers only: traces leave the process.
            facts = {"trigger": state.trigger, "step": state.step}
            with custom_span(f"caddie.{state.control}", facts, disabled=off) as span:
                critique = await aconsult(self._critics, state)
                span.span_data.data["status"] = critique.status
            turn.exchange.critic_replied(critique)


async def _events(model: Model, ask: Ask) -> AsyncIterator[Any]:
    """A stream of the model, closed with whoever reads it."""
    stream = model.stream_response(*ask.positional(), **ask.server)
    try:
        async for event in stream:
            yield event
    finally:
        if (close := getattr(stream, "aclose", None)) is not None:
            await close()


class _Named(Model):
    """A model by its name, found when it is first asked, by the provider that runs use unless told otherwise."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._found: Model | None = None

    @property
    def found(self) -> Model:
        """The model."""
        if self._found is None:
            self._found = MultiProvider().get_model(self._name)
        return self._found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_name", "_found"):
            raise AttributeError(name)
        return getattr(self.found, name)

    async def _cleanup_on_run_end(self, owner: object) -> None:
        await self.found._cleanup_on_run_end(owner)

    async def close(self) -> None:
        if self._found is not None:
            await self._found.close()

    def get_retry_advice(self, request: Any) -> Any:
        return self.found.get_retry_advice(request)

    async def get_response(self, *args: Any, **more: Any) -> ModelResponse:
        return await self.found.get_response(*args, **more)

    def stream_response(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
        return self.found.stream_response(*args, **more)


class _CriticProvider(ModelProvider):
    """A provider whose models all have the critic."""

    def __init__(self, inner: ModelProvider, critics: Mapping[str, Critic], relay: Relay) -> None:
        self._inner, self._critics, self._relay = inner, critics, relay

    def get_model(self, model_name: str | None) -> Model:
        """The model of that name, with the critic."""
        return CriticModel(self._inner.get_model(model_name), self._critics, self._relay)

    async def aclose(self) -> None:
        """Close the provider itself."""
        await self._inner.aclose()


__all__ = ["CriticModel", "attach"]
