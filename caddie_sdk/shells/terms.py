"""What every way in is told, checked once: who stands behind the control tools, when to consult, what must wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from caddie_sdk.budget import Budget
from caddie_sdk.config import CALL_CRITIC, REQUEST_FEEDBACK, SessionConfig
from caddie_sdk.critic import Critic
from caddie_sdk.errors import ConfigError
from caddie_sdk.intervention import Intervention, parse_protocol
from caddie_sdk.relay.adopt import Terms


def named_critics(critic: Critic | None, feedback: Critic | None, who: str) -> dict[str, Critic]:
    """Control tool name to critic.

    Args:
        critic: answers `call_critic`.
        feedback: answers `request_feedback`.
        who: names the way in, for the error.

    Raises:
        ConfigError: both are None, or one is no critic.
    """
    given = ((CALL_CRITIC, critic), (REQUEST_FEEDBACK, feedback))
    critics = {name: one for name, one in given if one is not None}
    check_critics(critics)
    if not critics:
        raise ConfigError(f"{who} needs a critic, a feedback critic, or both")
    return critics


def check_critics(critics: Mapping[str, Critic]) -> None:
    """Raise ConfigError where something is no critic: a class, say, or an object without the twins."""
    for name, one in critics.items():
        if isinstance(one, type) or not isinstance(one, Critic):
            raise ConfigError(f"the critic behind {name} must have critique() and acritique(); got {one!r}")


def agree(critics: Mapping[str, Critic], protocol: Intervention | str, budget: Budget | None, on_error: str) -> Terms:
    """The terms under which these critics are consulted.

    Raises:
        ConfigError: a setting is wrong.
    """
    rule = parse_protocol(protocol) if isinstance(protocol, str) else protocol
    terms = Terms(rule, budget or Budget(), tuple(critics), on_error)
    SessionConfig(protocol=rule, controls=terms.controls, on_error=on_error)  # type: ignore[arg-type]  # it checks
    return terms


def check_guards(rule: Intervention, names: Sequence[str], hint: str = "") -> None:
    """Raise ConfigError where a guarded tool does not exist: a misspelt name would leave unguarded the very tool that
    somebody worried about."""
    for name in getattr(rule, "irreversible", ()):
        if name not in names:
            known = ", ".join(names) or "none"
            raise ConfigError(f"protocol: there is no tool {name!r} to guard; the tools are {known}{hint}")
