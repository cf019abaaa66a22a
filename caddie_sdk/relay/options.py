"""What a caller may ask for one request: in headers, or in the extension field `caddie` of the body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from caddie_sdk.errors import ConfigError
from caddie_sdk.intervention import Intervention, Never, parse_protocol
from caddie_sdk.relay.adopt import Terms

HEADER = "x-caddie"
"""`X-Caddie: off`, or `X-Caddie-Protocol`, `X-Caddie-Max-Uses`, `X-Caddie-Advice`, `X-Caddie-Session`."""
_NAMES = ("enabled", "protocol", "max_uses", "advice", "session")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Options:
    """Choices for one request.

    Attributes:
        enabled: False passes the request on without new consultations; earlier advice stays in view.
        protocol: in place of the one configured.
        max_uses: consultations per user turn; never more than configured.
        advice: put the critiques' texts into the answer's extension field.
        session: name under which an MCP server beside the proxy finds this conversation.
    """

    enabled: bool = True
    protocol: Intervention | None = None
    max_uses: int | None = None
    advice: bool = False
    session: str = ""

    def apply(self, terms: Terms) -> Terms:
        """The terms of this request."""
        if not self.enabled:
            return replace(terms, protocol=Never())
        if self.protocol is not None:
            terms = replace(terms, protocol=self.protocol)
        if self.max_uses is not None:
            terms = replace(terms, budget=replace(terms.budget, max_uses=min(self.max_uses, terms.budget.max_uses)))
        return terms


_DEFAULT = Options()


def read_options(headers: Mapping[str, str], body: Mapping[str, Any]) -> Options:
    """The options of a request; the extension field wins over headers.

    Args:
        headers: with lower-case names.

    Raises:
        ConfigError: an option is unknown or has an impossible value.
    """
    field = body.get("caddie")
    if field is None and not any(name.startswith(HEADER) for name in headers):
        return _DEFAULT
    given: dict[str, Any] = {}
    if (switch := headers.get(HEADER)) is not None:
        given["enabled"] = switch
    for name in _NAMES[1:]:
        if (value := headers.get(f"{HEADER}-{name.replace('_', '-')}")) is not None:
            given[name] = value
    if field is not None and not isinstance(field, Mapping):
        raise ConfigError(f"the field 'caddie' must be an object with {', '.join(_NAMES)}, not {field!r}")
    given |= dict(field or {})
    if unknown := sorted(set(given) - set(_NAMES)):
        raise ConfigError(f"caddie option {unknown[0]!r} is not known: choose from {', '.join(_NAMES)}")
    return Options(**{name: _READ[name](name, value) for name, value in given.items()})


def _flag(name: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(f"caddie option {name!r} must be on or off, not {value!r}")


def _count(name: str, value: Any) -> int:
    try:
        count = int(value)
    except (OverflowError, TypeError, ValueError):
        count = -1
    if count < 0 or isinstance(value, bool):
        raise ConfigError(f"caddie option {name!r} must be a number from 0 on, not {value!r}")
    return count


def _protocol(name: str, value: Any) -> Intervention:
    return parse_protocol(str(value))


def _text(name: str, value: Any) -> str:
    return str(value)


_READ: dict[str, Any] = {
    "enabled": _flag,
    "protocol": _protocol,
    "max_uses": _count,
    "advice": _flag,
    "session": _text,
}
