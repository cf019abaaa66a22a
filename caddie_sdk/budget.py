"""How often, how long and how much a critic may be consulted (SPEC §4, rule 5)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from caddie_sdk.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a session. The defaults are the paper's.

    Attributes:
        max_uses: consultations per trajectory (one user turn worked on to its answer).
        session_max_uses: consultations over all trajectories of a session; None means no limit.
        max_tokens: length of one critique, in tokens.
        max_input_tokens: length of the critic's prompt, in tokens; None leaves it to the critic's server.
        timeout: seconds one consultation may take, retries included.
        max_steps: agent steps per trajectory; None means no limit. Consultations are not steps.
        min_steps: steps before an answer is accepted (MuSiQue attached asks for three searches).
        max_rejections: replies in a row that are no legal action before the trajectory ends; 0 ends it at
            the first, as in the paper's evaluation.
    """

    max_uses: int = 3
    session_max_uses: int | None = None
    max_tokens: int = 512
    max_input_tokens: int | None = None
    timeout: float = 60.0
    max_steps: int | None = None
    min_steps: int = 0
    max_rejections: int = 3

    def __post_init__(self) -> None:
        for name in ("max_uses", "min_steps", "max_rejections"):
            if getattr(self, name) < 0:
                raise ConfigError(f"budget: {name} must not be negative")
        for name in ("max_tokens", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"budget: {name} must be positive")
        for name in ("session_max_uses", "max_input_tokens", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"budget: {name} must not be negative; leave it out for no limit")
        if self.max_steps is not None and self.min_steps > self.max_steps:
            raise ConfigError(
                f"budget: min_steps {self.min_steps} exceeds max_steps {self.max_steps}, so no answer could be accepted"
            )

    def remaining(self, uses: int, session_uses: int) -> int:
        """Consultations left, given those of this trajectory and of the whole session."""
        left = self.max_uses - uses
        if self.session_max_uses is not None:
            left = min(left, self.session_max_uses - session_uses)
        return max(left, 0)

    def dump(self) -> dict[str, Any]:
        """Plain JSON; `Budget(**budget.dump())` restores it."""
        return asdict(self)
