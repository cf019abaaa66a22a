"""The agent's model behind a session: one call in, one assistant message out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from caddie_sdk.commands import CallModel
from caddie_sdk.messages import Message
from caddie_sdk.usage import Usage


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered.

    Attributes:
        message: the assistant message, in any form `messages.canonical` reads.
        usage: tokens spent.
        model: the model's name, as the server tells it.
        truncated: whether the server cut the reply at the token limit.
    """

    message: Message
    usage: Usage = field(default_factory=lambda: Usage(calls=1))
    model: str = ""
    truncated: bool = False


@runtime_checkable
class ChatModel(Protocol):
    """Anything that continues a chat. Errors are those of `caddie_sdk.errors.EndpointError`."""

    def complete(self, call: CallModel) -> Reply:
        """Continue the chat, blocking."""
        ...

    async def acomplete(self, call: CallModel) -> Reply:
        """Continue the chat."""
        ...
