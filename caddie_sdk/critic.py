"""The Critic protocol, and the state a critic is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from caddie_sdk.critique import Critique
from caddie_sdk.trajectory import Event


@dataclass(frozen=True, slots=True)
class ConsultState:
    """What a consultation is about: the trajectory so far and the limits. JSON in, JSON out.

    Attributes:
        control: the control tool this consultation answers (`call_critic`, `request_feedback`).
        trigger: `self-call`, or the protocol that forced it (`windowed`, `guarded`, ...).
        step: index t of the agent's next step.
        events: the trajectory, oldest first.
        system: the agent's system prompt, without the format instructions the session adds.
        tools: the schemas of the agent's tools.
        remaining: consultations left after this one.
        max_tokens: longest critique, in tokens.
        max_input_tokens: longest prompt, in tokens; None leaves it to the server.
        timeout: seconds for the whole consultation, retries included.
    """

    control: str
    trigger: str
    step: int
    events: tuple[Event, ...]
    system: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    remaining: int = 0
    max_tokens: int = 512
    max_input_tokens: int | None = None
    timeout: float = 60.0

    def dump(self) -> dict[str, Any]:
        """Plain JSON."""
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["events"] = [event.dump() for event in self.events]
        data["tools"] = [dict(tool) for tool in self.tools]
        return data

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> ConsultState:
        """Read back from `dump()`."""
        events = tuple(Event.load(event) for event in data["events"])
        return cls(**{**data, "events": events, "tools": tuple(data["tools"])})


@runtime_checkable
class Critic(Protocol):
    """Anything that advises. Twins with the same meaning: implement both, or derive one from the other.

    Neither should raise for a failed consultation: return a `Critique` whose status says what happened. A
    critic that raises all the same is turned into status `failed` by the shells, and the agent goes on.
    """

    def critique(self, state: ConsultState) -> Critique:
        """Advise, blocking."""
        ...

    async def acritique(self, state: ConsultState) -> Critique:
        """Advise."""
        ...
