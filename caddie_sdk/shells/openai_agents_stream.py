"""Several streams of a model of the OpenAI Agents SDK as one: calls of the control tools never show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents import ModelResponse
from agents import Usage as AgentsUsage

from caddie_sdk.relay.chat import add_usage

_OPENING = ("response.created", "response.in_progress", "response.queued")


@dataclass
class _Slot:
    """One output item of one upstream stream.

    Attributes:
        shown: index under which the SDK sees it; None while it is held back.
        waiting: its events so far, where it is held back.
    """

    item: Any = None
    held: bool = False
    shown: int | None = None
    waiting: list[Any] = field(default_factory=list)


class Weaver:
    """The visible stream of one request, over all the upstream streams that it takes.

    Args:
        controls: names of the control tools.
        holds: whether calls of a tool must wait until the whole turn is known (guarded tools).
        quiet: hold text back until its turn is over, and drop it if the turn is hidden.

    Attributes:
        completed: the last event of the upstream stream; None until it came.
    """

    def __init__(self, controls: Sequence[str], holds: Callable[[str], bool], *, quiet: bool) -> None:
        self._controls, self._holds, self._quiet = controls, holds, quiet
        self._count = self._number = 0
        self._usages: list[Any] = []
        self._first = True
        self._slots: dict[int, _Slot] = {}
        self._done: list[Any] = []
        self.completed: Any = None

    def begin(self) -> None:
        """Another upstream stream follows."""
        self._slots, self._done, self._first, self.completed = {}, [], False, None

    def feed(self, event: Any) -> Iterator[Any]:
        """What the SDK gets of one upstream event."""
        kind = event.type
        if kind == "response.completed":
            self.completed = event
            if event.response.usage is not None:
                self._usages.append(event.response.usage)
            return
        if kind in _OPENING:
            if self._first:
                yield self._numbered(event, response=event.response.model_copy(update=self._told(event.response)))
            return
        if kind == "response.output_item.done":
            self._done.append(event.item)
        index = getattr(event, "output_index", None)
        if index is None:
            yield self._numbered(event)
            return
        if kind == "response.output_item.added" or index not in self._slots:
            item = getattr(event, "item", None)
            self._slots[index] = _Slot(item, self._is_held(item))
        slot = self._slots[index]
        if slot.held:
            slot.item = getattr(event, "item", None) or slot.item
            slot.waiting.append(event)
        else:
            yield self._placed(slot, event)

    def answer(self) -> ModelResponse:
        """The upstream stream that has just completed, as an answer."""
        response = self.completed.response
        # Some servers leave the last event's output empty; the items came one by one then.
        return ModelResponse(
            output=list(response.output or self._done), usage=_spent(response), response_id=response.id
        )

    def end(self, output: Sequence[Any], shown_calls: set[str]) -> Iterator[Any]:
        """The rest: what was held back and is the SDK's after all, and the last event.

        Args:
            output: all items the SDK is to see.
            shown_calls: ids of its calls, as the model gave them.
        """
        for slot in self._slots.values():
            if slot.held and (getattr(slot.item, "type", "") != "function_call" or slot.item.call_id in shown_calls):
                for event in slot.waiting:
                    yield self._placed(slot, event)
        response = self.completed.response
        update = {"output": list(output), **self._told(response)}
        if len(self._usages) > 1:
            update["usage"] = _summed(self._usages)
        yield self._numbered(self.completed, response=response.model_copy(update=update))

    def _told(self, response: Any) -> dict[str, Any]:
        """What a response repeats of the request, as the SDK made that."""
        tools = getattr(response, "tools", None) or ()
        return {"tools": [tool for tool in tools if getattr(tool, "name", None) not in self._controls]}

    def _is_held(self, item: Any) -> bool:
        kind = getattr(item, "type", "")
        if kind == "function_call":
            return not item.name or item.name in self._controls or self._holds(item.name)
        return self._quiet and kind == "message"

    def _placed(self, slot: _Slot, event: Any) -> Any:
        if slot.shown is None:
            slot.shown, self._count = self._count, self._count + 1
        return self._numbered(event, output_index=slot.shown)

    def _numbered(self, event: Any, **update: Any) -> Any:
        self._number += 1
        return event.model_copy(update={**update, "sequence_number": self._number - 1})


def _summed(usages: Sequence[Any]) -> Any:
    """The usage of several requests as that of one, from which the SDK still learns how many there were."""
    total: Any = None
    for usage in usages:
        total = add_usage(total, usage.model_dump())
    summed = type(usages[-1]).construct(**total)  # not validated: servers leave out what they do not count
    object.__setattr__(summed, "_agents_sdk_request_usages", list(usages))
    return summed


def _spent(response: Any) -> AgentsUsage:
    usage = response.usage
    if usage is None:
        return AgentsUsage(requests=1)
    return AgentsUsage(
        requests=1,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.total_tokens,
        input_tokens_details=usage.input_tokens_details,
        output_tokens_details=usage.output_tokens_details,
    )
