"""Every error Caddie raises on purpose, in one tree.

CaddieError
├── ConfigError                 a setting is wrong: unknown protocol, pack, field, missing extra
│   └── MissingExtra            an optional package is absent; the message names the install command
├── MessageError                a chat message that cannot be brought into canonical form
├── SessionError                an event that the session's state does not allow, or a bad dump
├── DataError                   a data file has a bad line; names file, line and field
├── EndpointError               a model server did not give a usable answer; names its URL
│   ├── EndpointUnavailable     no connection, 5xx, or 429 after the last retry
│   ├── EndpointTimeout         no answer within the time allowed
│   ├── ContextOverflow         the prompt does not fit the model's context
│   └── EndpointRefused         the server answered 4xx: unknown model, bad key, bad request
├── ConsultationError           a consultation failed and `on_error="raise"` was asked for
├── PackError                   a critic pack is incomplete, or does not match the checkpoint
│   └── PackMismatch            the checkpoint was trained with another pack or renderer
└── ServeError                  a checkpoint could not be served
"""

from __future__ import annotations


class CaddieError(Exception):
    """Base of every error raised on purpose. Its text is one message a user can act on."""


class ConfigError(CaddieError):
    """A setting is wrong."""


class MissingExtra(ConfigError):
    """An optional dependency is not installed."""

    def __init__(self, feature: str, extra: str, hint: str | None = None) -> None:
        command = hint or f"pip install 'caddie-sdk[{extra}]'"
        super().__init__(f"{feature} needs a package that is not installed. Run: {command}")
        self.extra = extra


class MessageError(CaddieError):
    """A chat message cannot be brought into canonical form."""


class SessionError(CaddieError):
    """The session's state does not allow this event, or a dump cannot be loaded."""


class DataError(CaddieError):
    """A line of a data file is unusable."""

    def __init__(self, path: str, line: int, field: str, problem: str) -> None:
        super().__init__(f"{path}, line {line}, field {field!r}: {problem}")
        self.path, self.line, self.field, self.problem = path, line, field, problem


class EndpointError(CaddieError):
    """A model server did not give a usable answer.

    Attributes:
        url: the server's base URL.
        retry_after: seconds the server asked us to wait, when it said so.
    """

    def __init__(self, message: str, *, url: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.url = url
        self.retry_after = retry_after


class EndpointUnavailable(EndpointError):
    """No connection, a 5xx answer, or 429 after the last retry."""


class EndpointTimeout(EndpointError):
    """No answer within the time allowed."""


class ContextOverflow(EndpointError):
    """The prompt does not fit the model's context window."""


class EndpointRefused(EndpointError):
    """The server answered 4xx: unknown model, bad key, bad request."""


class ConsultationError(CaddieError):
    """A consultation failed and the session was told to raise rather than go on."""


class PackError(CaddieError):
    """A critic pack is incomplete or contradicts itself."""


class PackMismatch(PackError):
    """A checkpoint carries another pack hash than the pack at hand."""


class ServeError(CaddieError):
    """A checkpoint could not be served."""
