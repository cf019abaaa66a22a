"""Intervention protocols: when the critic is consulted (Caddie paper §2.1; SPEC §2).

A protocol is asked at two moments: before the agent's action at step t, and before tools run. It keeps no
state; everything random is drawn from the session's seed, so that a restored session decides the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from caddie_sdk.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a trajectory stands.

    Attributes:
        seed: the session's seed.
        trajectory: number of the trajectory in its session, from 0.
        step: number of the agent's next step, t.
        repeats: how many times in a row the latest action was taken.
    """

    seed: int
    trajectory: int
    step: int
    repeats: int = 0

    def rng(self, *salt: object) -> random.Random:
        """A generator that depends on the place, not on the order of calls."""
        return random.Random("/".join(str(part) for part in (self.seed, self.trajectory, *salt)))


class Intervention(Protocol):
    """Decides when to consult."""

    @property
    def self_call(self) -> bool:
        """Whether the agent itself may ask (the control tool is offered)."""
        ...

    @property
    def spec(self) -> str:
        """The text form, which `parse_protocol` reads back."""
        ...

    def before_step(self, moment: Moment) -> bool:
        """Whether to consult before the agent acts."""
        ...

    def guards(self, tool: str) -> bool:
        """Whether a call of this tool must wait for advice."""
        ...


@dataclass(frozen=True, slots=True)
class Never:
    """No consultations at all: the control arm."""

    self_call: bool = False
    spec: str = "off"

    def before_step(self, moment: Moment) -> bool:
        return False

    def guards(self, tool: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class SelfCall:
    """The agent decides, through the control tool. The default."""

    self_call: bool = True
    spec: str = "self-call"

    def before_step(self, moment: Moment) -> bool:
        return False

    def guards(self, tool: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Windowed:
    """Consult once, at a step drawn uniformly from {k_min..k_max}, if the episode reaches it."""

    k_min: int
    k_max: int

    def __post_init__(self) -> None:
        if not 0 <= self.k_min <= self.k_max:
            raise ConfigError(f"windowed protocol: need 0 <= k_min <= k_max, got {self.k_min}..{self.k_max}")

    @property
    def self_call(self) -> bool:
        return False

    @property
    def spec(self) -> str:
        return f"fixed:{self.k_min}" if self.k_min == self.k_max else f"windowed:{self.k_min}-{self.k_max}"

    def step(self, moment: Moment) -> int:
        """The step k of this trajectory."""
        return moment.rng("window").randint(self.k_min, self.k_max)

    def before_step(self, moment: Moment) -> bool:
        return moment.step == self.step(moment)

    def guards(self, tool: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Consult before each of several fixed steps. One fixed step is `Windowed(k, k)`."""

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.steps or any(step < 0 for step in self.steps):
            raise ConfigError(f"scheduled protocol: need one or more steps from 0 on, got {self.steps}")

    @property
    def self_call(self) -> bool:
        return False

    @property
    def spec(self) -> str:
        return f"fixed:{','.join(str(step) for step in self.steps)}"

    def before_step(self, moment: Moment) -> bool:
        return moment.step in self.steps

    def guards(self, tool: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Probabilistic:
    """Consult before each step with probability alpha, independently."""

    alpha: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"probabilistic protocol: alpha must lie in [0, 1], got {self.alpha}")

    @property
    def self_call(self) -> bool:
        return False

    @property
    def spec(self) -> str:
        return f"probabilistic:{float(self.alpha)!r}"

    def before_step(self, moment: Moment) -> bool:
        return moment.rng("step", moment.step).random() < self.alpha

    def guards(self, tool: str) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Guarded:
    """Consult before irreversible tools, and after the same action was taken `repeats` times in a row.

    A guarded call waits until the agent has read advice that is newer than its latest step; a critic that
    cannot be consulted any more never blocks it.
    """

    irreversible: tuple[str, ...] = ()
    repeats: int = 3
    self_call: bool = True

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"guarded protocol: repeats must be at least 1, got {self.repeats}")

    @property
    def spec(self) -> str:
        names = ",".join(self.irreversible)
        return f"guarded:{names};repeats={self.repeats};self_call={'yes' if self.self_call else 'no'}"

    def before_step(self, moment: Moment) -> bool:
        return moment.repeats >= self.repeats

    def guards(self, tool: str) -> bool:
        return tool in self.irreversible


_FORMS = (
    "off, self-call, fixed:K[,K], windowed:MIN-MAX, probabilistic:ALPHA, guarded:TOOL,TOOL;repeats=N;self_call=yes|no"
)


def parse_protocol(text: str) -> Intervention:
    """Read a protocol from its text form, as the command line takes it.

    Raises:
        ConfigError: the text is none of the known forms.
    """
    name, _, rest = text.strip().partition(":")
    try:
        match name:
            case "off" | "none":
                return Never()
            case "self-call":
                return SelfCall()
            case "fixed":
                steps = tuple(int(step) for step in rest.split(","))
                return Windowed(steps[0], steps[0]) if len(steps) == 1 else Scheduled(steps)
            case "windowed":
                low, high = rest.split("-")
                return Windowed(int(low), int(high))
            case "probabilistic":
                return Probabilistic(float(rest))
            case "guarded":
                return _parse_guarded(rest)
    except ValueError:
        pass
    raise ConfigError(f"unknown intervention protocol {text!r}: use one of {_FORMS}")


def _parse_guarded(rest: str) -> Guarded:
    names, *options = rest.split(";")
    known: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in ("repeats", "self_call") or (key == "self_call" and value not in ("yes", "no")):
            raise ValueError(option)
        known[key] = value
    return Guarded(
        irreversible=tuple(name.strip() for name in names.split(",") if name.strip()),
        repeats=int(known.get("repeats", "3")),
        self_call=known.get("self_call", "yes") == "yes",
    )
