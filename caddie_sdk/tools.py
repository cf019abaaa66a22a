"""What an agent acts with: a name, a JSON schema and a callable. Nothing else is needed to join in."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool the agent may call.

    Attributes:
        name: function name, as the model sees it.
        description: one or two sentences for the model.
        parameters: JSON schema of the arguments object.
        run: called with the arguments as keywords; sync or async; returns the text of the observation.
            A sync function runs in a worker thread, so it may block.
    """

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    run: Callable[..., Any] = field(default=lambda **_: "", repr=False, compare=False)

    def schema(self) -> dict[str, Any]:
        """The entry for the `tools` list of a chat-completions request."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    async def __call__(self, **arguments: Any) -> str:
        """Run the tool and return its observation as text."""
        if inspect.iscoroutinefunction(self.run):
            result = await self.run(**arguments)
        else:
            result = await asyncio.to_thread(_in_thread, self.run, arguments)
            if inspect.isawaitable(result):
                result = await result
        return result if isinstance(result, str) else str(result)


def _in_thread(run: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return run(**arguments)
    except StopIteration as error:
        # No future can carry a StopIteration: whoever waits for it would wait for ever.
        raise RuntimeError("the tool raised StopIteration") from error
