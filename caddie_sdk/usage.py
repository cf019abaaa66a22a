"""Tokens spent, with cached ones apart (SPEC §6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and calls of one or several model calls. Adds up with `+`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    calls: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.calls + other.calls,
        )

    def dump(self) -> dict[str, int]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Usage:
        """Read back from `dump()`; unknown and missing fields are tolerated."""
        return cls(**{name: _count(data.get(name)) for name in cls.__dataclass_fields__})

    @classmethod
    def from_openai(cls, usage: Any) -> Usage:
        """From the `usage` of a chat completion or a response (mapping or object); None counts as one call."""
        if usage is None:
            return cls(calls=1)
        data: Mapping[str, Any] = usage if isinstance(usage, Mapping) else usage.model_dump()
        details = data.get("prompt_tokens_details") or data.get("input_tokens_details") or {}
        return cls(
            prompt_tokens=_count(data.get("prompt_tokens", data.get("input_tokens"))),
            completion_tokens=_count(data.get("completion_tokens", data.get("output_tokens"))),
            cached_tokens=_count(details.get("cached_tokens")),
            calls=1,
        )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
