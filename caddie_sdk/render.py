"""Session to critic's prompt: the only renderer (SPEC §5). Serving, evals and training all call it.

The prompt is a chat: a first user message with the task and the trajectory, the critic's own earlier critiques
as assistant messages, and what happened since as further user messages. A later consultation's prompt
therefore begins with the earlier one, message for message, and prefix caches hit.

Everything that did not come from the pack is untrusted and escaped here, so that no tool output or user turn
can close a block of the transcript or pose as advice (SPEC §4, rule 8).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from caddie_sdk.actions import strip_thinking
from caddie_sdk.critic import ConsultState
from caddie_sdk.critique import feedback_format
from caddie_sdk.errors import ContextOverflow, PackError
from caddie_sdk.messages import Message
from caddie_sdk.trajectory import Event

RENDERER_VERSION = 1
"""Enters every pack hash. Any change to the text this module produces must raise it."""

ADVICE_LABEL = "Critic feedback:"

_BLOCKS = [
    "system_prompt",
    "tools",
    "tool",
    "task",
    "query",
    "user",
    "trajectory",
    "step",
    "thought",
    "action",
    "proposal",
    "observation",
    "advice",
    "answer",
    "note",
    "reason",
    "search",
    "critic",
    "think",
    "plan",
    "tool_call",
    "tool_response",
    "request_feedback",
    "feedback",
    "reflect",
    "backtrack",
    "information",
]
_TAG = re.compile(rf"<(?=\s*(?:/\s*)?(?:{'|'.join(_BLOCKS)})\b)", re.IGNORECASE)
# Chat templates are spelled in text, and servers read their marks wherever they stand: a passage with `<|im_end|>`
# would end the critic's turn.
_TEMPLATE = re.compile(r"<(?=[|｜]|/?s>|(?:start|end)_of_turn>|</?SYS>>)|\[(?=/?INST\])", re.IGNORECASE)
_NOT_NAME = re.compile(r"[^\w.-]")
_LABEL = re.compile(r"(critic\s+feedback)\s*:", re.IGNORECASE)


def escape(text: str) -> str:
    """Make text harmless inside a transcript.

    Reserved tags and the marks of chat templates lose their first character, the advice label its colon.

    All other text is unchanged, and escaping twice is escaping once.
    """
    if "<" in text:
        text = _TAG.sub("&lt;", text)
    if "<" in text or "[" in text:
        text = _TEMPLATE.sub(lambda mark: "&lt;" if mark[0] == "<" else "&#91;", text)
    return _LABEL.sub(r"\1&#58;", text)


@dataclass(frozen=True, slots=True)
class CriticPrompt:
    """The part of a critic pack that shapes the prompt.

    Attributes:
        name: the pack's name.
        system: the critic's system prompt, complete with the form of the answer.
        cue: closes each user message; one or two sentences that ask for the critique.
        feedback: name of the feedback format, `sections` or `feedback`.
        task_tag: name of the block around the task (`task`, or `query` as in CAFE).
        show_system: whether the critic sees the agent's system prompt (a policy, say).
        show_tools: whether it sees names and descriptions of the agent's tools.
        max_tokens: the pack's own limit on a critique, in tokens; None leaves it to the session's budget.
        max_input_tokens: the pack's own limit on the prompt, in tokens.
    """

    name: str
    system: str
    cue: str
    feedback: str = "sections"
    task_tag: str = "task"
    show_system: bool = False
    show_tools: bool = False
    max_tokens: int | None = None
    max_input_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.task_tag not in _BLOCKS:
            raise PackError(
                f"critic pack {self.name!r}: the task cannot stand in <{self.task_tag}>, which the renderer does not "
                "escape in untrusted text; use task or query"
            )

    @property
    def hash(self) -> str:
        """16 hex digits over everything that shapes a prompt, the renderer's version included."""
        facts = {"renderer": RENDERER_VERSION, **asdict(self)}
        # Limits bound what is asked for; they do not change what the critic was trained to read.
        del facts["max_tokens"], facts["max_input_tokens"]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def estimate_tokens(text: str) -> int:
    """A cautious guess without a tokenizer: three bytes a token (English runs near four)."""
    return math.ceil(len(text.encode("utf-8", "replace")) / 3)


def render(
    state: ConsultState, prompt: CriticPrompt, *, count: Callable[[str], int] = estimate_tokens
) -> list[Message]:
    """The critic's prompt for a consultation.

    Args:
        state: what the consultation is about.
        prompt: how the pack wants it told.
        count: tokens of a text, for trimming; pass the server's tokenizer where it is at hand.

    Returns:
        Chat messages in canonical form, ending with a user message.

    Raises:
        ContextOverflow: not even the task and the latest step fit `max_input_tokens`.
    """
    limit = _smaller(state.max_input_tokens, prompt.max_input_tokens)
    messages = _messages(state, prompt, state.events)
    if limit is None or _size(messages, count) <= limit:
        return messages
    for events in _trimmed(state.events):
        messages = _messages(state, prompt, events)
        if _size(messages, count) <= limit:
            return messages
    raise ContextOverflow(
        f"the critic's prompt needs about {_size(messages, count)} tokens with all but the latest step left out, "
        f"and max_input_tokens is {limit}"
    )


def _smaller(first: int | None, second: int | None) -> int | None:
    values = [value for value in (first, second) if value is not None]
    return min(values) if values else None


def _size(messages: Iterable[Message], count: Callable[[str], int]) -> int:
    # Four tokens of chat template around each message is what common templates spend.
    return sum(count(str(message["content"])) + 4 for message in messages)


def _trimmed(events: tuple[Event, ...]) -> Iterable[tuple[Event, ...]]:
    """Ever shorter tellings: whole steps go, oldest first; tasks, answers, advice and the latest step stay."""
    units = _units(events)
    order = list(dict.fromkeys(unit for unit in units if unit is not None))
    whole = [unit for event, unit in zip(events, units, strict=True) if unit and event.kind in ("step", "outcome")]
    latest = order.index(whole[-1]) if whole else len(order) - 1
    for gone in range(1, latest + 1):
        dropped = set(order[:gone])
        kept: list[Event] = []
        noted = False
        for event, unit in zip(events, units, strict=True):
            if unit not in dropped:
                kept.append(event)
            elif not noted:
                kept.append(Event("note", event.step, f"{gone} earlier steps are left out here."))
                noted = True
        yield tuple(kept)


def _units(events: Iterable[Event]) -> list[tuple[int, int] | None]:
    """(trajectory, step) of each event that trimming may drop, None of those it must keep."""
    units: list[tuple[int, int] | None] = []
    trajectory = 0
    for event in events:
        trajectory += event.kind in ("task", "user")
        droppable = event.kind in ("step", "proposal", "outcome", "note")
        units.append((trajectory, event.step) if droppable else None)
    return units


def _messages(state: ConsultState, prompt: CriticPrompt, events: Sequence[Event]) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": prompt.system}]
    preface, lines = _preface(state, prompt), list[str]()
    form = feedback_format(prompt.feedback)

    def close() -> None:
        body = "\n".join(["<trajectory>", *lines, "</trajectory>"])
        messages.append({"role": "user", "content": "\n\n".join([*preface, body, prompt.cue])})

    for event in events:
        if event.kind == "task":
            preface.append(_block(prompt.task_tag, event.text))
        elif event.kind == "advice" and event.control == state.control:
            if not event.ok:
                continue
            close()
            own = strip_thinking(event.raw) or form.render("", event.text)
            messages.append({"role": "assistant", "content": own})
            preface, lines = [], []
        else:
            lines += _lines(event)
    close()
    return messages


def _preface(state: ConsultState, prompt: CriticPrompt) -> list[str]:
    parts = []
    if prompt.show_system and state.system:
        parts.append(_block("system_prompt", state.system))
    if prompt.show_tools and state.tools:
        parts.append("\n".join(["<tools>", *(_tool_line(tool) for tool in state.tools), "</tools>"]))
    return parts


def _tool_line(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", {})
    return escape(f"{function.get('name', '')}: {' '.join(str(function.get('description', '')).split())}")


def _block(tag: str, text: str, attributes: str = "") -> str:
    return f"<{tag}{attributes}>\n{escape(text)}\n</{tag}>"


def _lines(event: Event) -> list[str]:
    match event.kind:
        case "step":
            return [f'<step n="{event.step + 1}">', *_acts(event), *_observations(event), "</step>"]
        case "proposal":
            acts = _acts(event)
            return ["<proposal>", *acts, "</proposal>"] if acts else []
        case "outcome":
            return [f'<step n="{event.step + 1}">', *_observations(event), "</step>"]
        case "advice":
            return [_block("advice", event.text)] if event.ok else []
        case _:
            return [_block(event.kind, event.text)]


def _acts(event: Event) -> list[str]:
    lines = [f"<thought>{escape(event.text)}</thought>"] if event.text else []
    return lines + [
        f'<action name="{_NOT_NAME.sub("_", a.name)}">{escape(a.arguments)}</action>' for a in event.actions
    ]


def _observations(event: Event) -> list[str]:
    return [f"<observation>\n{escape(text)}\n</observation>" for text in event.observations]
