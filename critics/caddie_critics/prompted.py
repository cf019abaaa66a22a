"""A critic is a pack and something that completes a chat.

The one home of render -> call -> parse, and of what a failure means to the session (SPEC §4, rule 6): every
critic that asks a model derives from `BaseCritic` and only says where the model is.

| what happened                                             | status of the critique |
|-----------------------------------------------------------|------------------------|
| no server, 5xx or 429 to the end, an answer that is none  | `unavailable`          |
| no answer within the time allowed                         | `timeout`              |
| the server answered 4xx; the pack does not fit the model  | `refused`              |
| the prompt does not fit                                   | `context_overflow`     |
| the critic wrote something else than a critique           | `malformed`            |
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict, Unpack

from caddie_critics.checkpoint import PackSource, find_pack
from caddie_critics.packs import Pack
from caddie_sdk import _blocking
from caddie_sdk.critic import ConsultState
from caddie_sdk.critique import Critique, Status, parse_critique
from caddie_sdk.errors import ContextOverflow, EndpointError, EndpointRefused, EndpointTimeout, PackError
from caddie_sdk.messages import canonical, profile_for, text_of, wire
from caddie_sdk.model import Reply
from caddie_sdk.render import estimate_tokens, render


class Complete(Protocol):
    """Completes a chat: wire messages, sampling fields (`max_tokens`, `temperature`, ...), seconds allowed."""

    async def __call__(self, messages: list[dict[str, Any]], params: dict[str, Any], timeout: float) -> Reply:
        """One assistant message. Errors are those of `caddie_sdk.errors.EndpointError`."""
        ...


@dataclass(frozen=True, slots=True)
class Setup:
    """What one consultation works with.

    Attributes:
        pack: how the critic is asked.
        complete: who answers.
        model: the model's name where it is known; decides what its server needs on the wire.
        read: brings what the model wrote into the pack's feedback format, before it is parsed.
    """

    pack: Pack
    complete: Complete
    model: str = ""
    read: Callable[[str], str] = str


class Settings(TypedDict, total=False):
    """What every critic takes.

    Keys:
        temperature, top_p: of the critic; 1 unless given, as in training (SPEC §6). None leaves them to the server.
        seed: sent along when given.
        timeout: seconds for a whole consultation, where the session's own limit is longer.
        count: tokens of a text, for trimming the prompt to `max_input_tokens`; a cautious guess unless given.
    """

    temperature: float | None
    top_p: float | None
    seed: int | None
    timeout: float | None
    count: Callable[[str], int]


class BaseCritic(ABC):
    """A consultation from the state to the critique. A subclass says which pack and which model."""

    def __init__(
        self,
        *,
        temperature: float | None = 1.0,
        top_p: float | None = 1.0,
        seed: int | None = None,
        timeout: float | None = None,
        count: Callable[[str], int] = estimate_tokens,
    ) -> None:
        sampling = {"temperature": temperature, "top_p": top_p, "seed": seed}
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self._timeout = timeout
        self._count = count

    @abstractmethod
    async def _setup(self, timeout: float) -> Setup:
        """Pack and model for the next consultation; raises EndpointError or PackError when there are none."""

    def critique(self, state: ConsultState) -> Critique:
        """Blocking twin of `acritique`."""
        return _blocking.run(self.acritique(state))

    async def acritique(self, state: ConsultState) -> Critique:
        """Advise. A consultation that fails gives a critique whose status says how; see the module's table.

        `state.timeout` bounds the whole of it: finding out about the server, waiting, retries.
        """
        started = time.monotonic()
        seconds = state.timeout if self._timeout is None else min(state.timeout, self._timeout)
        try:
            async with asyncio.timeout(seconds):
                critique = await self._consult(state, started + seconds)
        except TimeoutError:
            critique = Critique(status="timeout", detail=f"no critique within {seconds:g} s")
        except (EndpointError, PackError) as error:
            critique = Critique(status=_status(error), detail=" ".join(str(error).split()))
        return replace(critique, seconds=round(time.monotonic() - started, 4))

    async def _consult(self, state: ConsultState, deadline: float) -> Critique:
        setup = await self._setup(_left(deadline))
        prompt = setup.pack.prompt
        messages = wire(render(state, prompt, count=self._count), profile_for(setup.model))
        limit = min(state.max_tokens, prompt.max_tokens or state.max_tokens)
        reply = await setup.complete(messages, {**self._sampling, "max_tokens": limit}, _left(deadline))
        text = setup.read(text_of(canonical(reply.message)))
        critique = parse_critique(text, setup.pack.form, usage=reply.usage, model=reply.model or setup.model)
        if not reply.truncated:
            return critique
        # Judged as it stands: a critique may be complete in form and still have lost its last words.
        cut = f"cut off at {limit} tokens"
        return replace(critique, detail=f"{critique.detail}; {cut}" if critique.detail else cut)


class PromptedCritic(BaseCritic):
    """A pack and a function that completes a chat, as a critic.

        async def complete(messages, params, timeout):
            return Reply({"role": "assistant", "content": await my_model(messages, **params)})

        critic = PromptedCritic("general", complete)

    Args:
        pack: a pack, a built-in pack's name, or the path of a pack or a checkpoint.
        complete: asks the model; see `Complete`.
        model: the model's name, for the record.
        settings: see `Settings`.

    Raises:
        PackError: there is no such pack, or it is unusable.
    """

    def __init__(self, pack: PackSource, complete: Complete, *, model: str = "", **settings: Unpack[Settings]) -> None:
        super().__init__(**settings)
        self._fixed = Setup(find_pack(pack), complete, model)

    @property
    def pack(self) -> Pack:
        """How the critic is asked."""
        return self._fixed.pack

    async def _setup(self, timeout: float) -> Setup:
        return self._fixed


def _left(deadline: float) -> float:
    """Seconds left, so that whoever is called does not begin to wait for what would come too late."""
    return max(deadline - time.monotonic(), 0.001)


def _status(error: EndpointError | PackError) -> Status:
    match error:
        case ContextOverflow():
            return "context_overflow"
        case EndpointTimeout():
            return "timeout"
        case EndpointRefused() | PackError():
            return "refused"
        case _:
            return "unavailable"
