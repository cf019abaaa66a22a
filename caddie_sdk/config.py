"""What does not change during a session: tools, formats, protocol, limits, and the control tools on offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from caddie_sdk.actions import action_format, single_argument
from caddie_sdk.budget import Budget
from caddie_sdk.errors import ConfigError
from caddie_sdk.intervention import Intervention, SelfCall, parse_protocol
from caddie_sdk.messages import Message, canonical, profile

CALL_CRITIC, REQUEST_FEEDBACK = "call_critic", "request_feedback"

CONTROLS: dict[str, str] = {
    CALL_CRITIC: (
        "Ask an independent critic to review the work so far. It reads the same conversation as you do and answers "
        "with an analysis and advice for the next steps. It takes no question. Worth calling when evidence is "
        "missing or contradictory, when actions repeat without progress, or before committing to an answer or to "
        "an action that cannot be undone."
    ),
    REQUEST_FEEDBACK: (
        "Step back and review your own work so far in the role of a critic. It takes no question and answers with "
        "feedback on the plan and the latest steps. Worth calling when stuck, repetitive or unsure what to do next."
    ),
}
"""The control tools and what the agent is told about each."""


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What does not change during a session. Plain JSON through `dump()`.

    Attributes:
        tools: schemas of the agent's tools, in OpenAI form.
        system: the agent's system prompt; text formats add the allowed forms to it.
        examples: user and assistant turns of a worked example, shown to the agent before the task; very small models
            need one. Critics do not see them.
        format: action format: `tool-calls`, `caddie` or `cafe`.
        protocol: when to consult.
        budget: limits.
        controls: control tools on offer, best first; forced consultations go to the first.
        profile: what the agent's server needs on the wire (`compatible`, `openai`, `reasoning`, `no-system`).
        on_error: `continue` goes on without advice when a consultation fails; `raise` raises ConsultationError.
        seed: source of all randomness in the protocol.
        caller_owned: the tools belong to somebody outside, who runs them and owns the turn: calls go out as the model
            wrote them, whatever they name and hold, and any reply without calls ends the turn (SPEC §4, rule 4).
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    system: str = ""
    examples: tuple[Message, ...] = ()
    format: str = "tool-calls"
    protocol: Intervention = field(default_factory=SelfCall)
    budget: Budget = field(default_factory=Budget)
    controls: tuple[str, ...] = (CALL_CRITIC,)
    profile: str = "compatible"
    on_error: Literal["continue", "raise"] = "continue"
    seed: int = 0
    caller_owned: bool = False

    def __post_init__(self) -> None:
        form = action_format(self.format)
        profile(self.profile)
        if any(
            example.get("role") not in ("user", "assistant") or "tool_calls" in example for example in self.examples
        ):
            raise ConfigError("examples: only user and assistant messages with text can be shown")
        names = [tool_name(tool) for tool in self.tools]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"tools: the name {duplicates[0]!r} is used twice; every tool needs its own name")
        if len(set(self.controls)) != len(self.controls):
            raise ConfigError(f"controls: {', '.join(self.controls)} names a control tool twice")
        for control in self.controls:
            if control not in CONTROLS:
                raise ConfigError(f"unknown control tool {control!r}: choose from {', '.join(CONTROLS)}")
            if control in names:
                raise ConfigError(f"a tool is named {control!r}, which is the name of a control tool; rename it")
        if self.on_error not in ("continue", "raise"):
            raise ConfigError(f"on_error must be 'continue' or 'raise', not {self.on_error!r}")
        if self.caller_owned and not form.native_tools:
            raise ConfigError(f"caller_owned: the action format {self.format!r} has no tool calls to hand out")
        form.check({name: single_argument(tool) for name, tool in zip(names, self.tools, strict=True)})

    def dump(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "tools": [dict(tool) for tool in self.tools],
            "system": self.system,
            "examples": list(self.examples),
            "format": self.format,
            "protocol": self.protocol.spec,
            "budget": self.budget.dump(),
            "controls": list(self.controls),
            "profile": self.profile,
            "on_error": self.on_error,
            "seed": self.seed,
            "caller_owned": self.caller_owned,
        }

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> SessionConfig:
        """Read back from `dump()`."""
        return cls(
            **{
                **data,
                "tools": tuple(data["tools"]),
                "examples": tuple(canonical(example) for example in data.get("examples", ())),
                "controls": tuple(data["controls"]),
                "protocol": parse_protocol(data["protocol"]),
                "budget": Budget(**data["budget"]),
            }
        )


def tool_name(schema: Mapping[str, Any]) -> str:
    name = (schema.get("function") or {}).get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError("tools: every entry needs the form {'type': 'function', 'function': {'name': ...}}")
    return name
