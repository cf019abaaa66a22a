"""Action formats: how an agent writes what it does (SPEC §2).

Each format parses a reply into a `Turn`, describes the forms allowed now, and offers a GBNF grammar for
servers that take one. A format holds no state; what is allowed comes in as `Forms`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from caddie_sdk import gbnf
from caddie_sdk.errors import ConfigError
from caddie_sdk.messages import Message, clean, dump_json, parse_arguments, text_of


@dataclass(frozen=True, slots=True)
class Call:
    """One action that somebody has to carry out.

    Attributes:
        id: the tool call id; in the text formats, one the session makes up.
        name: tool or control name.
        arguments: the arguments object, or None when the model's text was not one.
        raw: the arguments as the model wrote them.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    raw: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a reply means: calls, or an answer, or a problem that the agent must be told."""

    calls: tuple[Call, ...] = ()
    answer: str | None = None
    thought: str = ""
    plan: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Forms:
    """What the agent may do now.

    Attributes:
        tools: (name, argument) of each tool; the argument is the one that text formats fill, None when the
            tool has no single required string.
        control: name of the control tool that the format's consultation tag stands for, None when withdrawn.
        answer: whether an answer is accepted.
        act: whether tools may be called.
    """

    tools: tuple[tuple[str, str | None], ...] = ()
    control: str | None = None
    answer: bool = True
    act: bool = True


class ActionFormat(Protocol):
    """One way of writing actions."""

    @property
    def name(self) -> str:
        """How it is asked for."""
        ...

    @property
    def native_tools(self) -> bool:
        """Whether tools travel in the request's `tools` list, and results as `tool` messages."""
        ...

    def parse(self, message: Message, tools: Mapping[str, str | None], control: str) -> Turn:
        """What the reply means. Never raises: what cannot be read becomes `Turn.problem`."""
        ...

    def describe(self, forms: Forms) -> str:
        """The allowed forms, in words for the agent."""
        ...

    def grammar(self, forms: Forms) -> str:
        """A GBNF grammar that admits the allowed forms and nothing else."""
        ...

    def check(self, tools: Mapping[str, str | None]) -> None:
        """Raise ConfigError when the format cannot express one of these tools."""
        ...


def strip_thinking(text: str) -> str:
    """Remove `<think>...</think>` blocks of reasoning models; an unclosed one hides everything after it."""
    kept, rest = [], text
    while rest:
        said, opened, rest = rest.partition("<think>")
        kept.append(said)
        if opened:
            rest = rest.partition("</think>")[2].lstrip()
    return "".join(kept).strip()


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """OpenAI function calling. Text without calls is the answer.

    For servers that do not parse tool calls, a reply that consists of `<tool_call>{...}</tool_call>` blocks is
    read as the calls it spells; `grammar()` produces exactly that form.
    """

    name: str = "tool-calls"
    native_tools: bool = True

    def parse(self, message: Message, tools: Mapping[str, str | None], control: str) -> Turn:
        text = strip_thinking(text_of(message))
        native = message.get("tool_calls")
        if native:
            calls = tuple(
                Call(c["id"], c["function"]["name"], parse_arguments(raw := c["function"]["arguments"]), raw)
                for c in native
            )
            return Turn(calls=calls, thought=text)
        if not text:
            return Turn(problem="The reply was empty. Call a tool or give the final answer.")
        if text.startswith(_OPEN) and text.endswith(_CLOSE):
            return Turn(problem=f'{_OPEN} must hold {{"name": ..., "arguments": {{...}}}}.')
        return Turn(answer=text)

    def describe(self, forms: Forms) -> str:
        names = [name for name, _ in forms.tools] if forms.act else []
        if forms.control:
            names.append(forms.control)
        parts = [f"call one of the tools {', '.join(names)}"] if names else []
        if forms.answer:
            parts.append("give the final answer as plain text")
        return ("You may " + ", or ".join(parts) + ".") if parts else "Nothing more can be done."

    def grammar(self, forms: Forms) -> str:
        return _tool_call_grammar(forms)

    def check(self, tools: Mapping[str, str | None]) -> None:
        return None


@lru_cache(maxsize=256)
def _tool_call_grammar(forms: Forms) -> str:
    names = [name for name, _ in forms.tools] if forms.act else []
    if forms.control:
        names.append(forms.control)
    options = ["calls"] if names else []
    if forms.answer or not names:
        options.append("answer")
    rules = [f"root ::= {' | '.join(options)}", f"answer ::= {gbnf.line(400)}"]
    if names:
        rules += [
            r'calls ::= call ( "\n" call ){0,3}',
            'call ::= "<tool_call>" ' + gbnf.literal('{"name": ') + " name " + gbnf.literal(', "arguments": ')
            + ' object "}</tool_call>"',
            "name ::= " + " | ".join(gbnf.literal(dump_json(name)) for name in names),
            gbnf.JSON_RULES,
        ]  # fmt: skip
    return "\n".join(rules)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BETWEEN = re.compile(rf"{_CLOSE}\s*{_OPEN}")
"""A block ends where another one or nothing follows, so that an argument may mention the tag."""


def calls_in_text(message: Message) -> Message:
    """Turn a reply that consists of `<tool_call>` blocks alone into one with native tool calls.

    Anything else is returned as it is, so that a mere mention of the tag stays text.
    """
    if message.get("tool_calls"):
        return message
    text = strip_thinking(text_of(message))
    if not (text.startswith(_OPEN) and text.endswith(_CLOSE)):
        return message
    calls = []
    for block in _BETWEEN.split(text[len(_OPEN) : -len(_CLOSE)]):
        spelled = parse_arguments(block)
        if spelled is None or not isinstance(spelled.get("name"), str):
            return message
        arguments = spelled.get("arguments", {})
        raw = clean(arguments) if isinstance(arguments, str) else dump_json(arguments)
        calls.append({"id": "", "type": "function", "function": {"name": clean(spelled["name"]), "arguments": raw}})
    return {**message, "content": "", "tool_calls": calls}  # type: ignore[typeddict-item]


@dataclass(frozen=True, slots=True)
class Tags:
    """A text format of one `<thought>` block followed by one action tag."""

    name: str
    thought: str
    consult: str
    """The whole consultation form, as described and generated."""
    consult_pattern: str
    generic: bool
    """Tools are spelled as JSON inside `<tool_call>`; otherwise each tool has a tag of its own name."""
    plan: bool = False
    native_tools: bool = field(default=False, init=False)

    def parse(self, message: Message, tools: Mapping[str, str | None], control: str) -> Turn:
        text = text_of(message).strip()
        if self.thought != "think":
            text = strip_thinking(text)
        match = _pattern(self, tuple(tools)).fullmatch(text)
        if match is None:
            return Turn(problem="The reply is in none of the allowed forms.")
        thought = match["thought"].strip()
        if match["consult"] is not None and not control:
            return Turn(problem="There is no critic to ask here.", thought=thought)
        if match["consult"] is not None:
            return Turn(calls=(Call("", control, {}, "{}"),), thought=thought)
        tag, body = match["tag"], match["body"].strip()
        if not body:
            return Turn(problem=f"<{tag}> was empty.", thought=thought)
        if tag == "answer":
            return Turn(answer=body, thought=thought)
        if tag == "plan" and self.plan:
            return Turn(plan=body, thought=thought)
        if self.generic:
            return self._generic_call(body, thought)
        argument = tools[tag] or "input"
        return Turn(calls=(Call("", tag, {argument: body}, dump_json({argument: body})),), thought=thought)

    @staticmethod
    def _generic_call(body: str, thought: str) -> Turn:
        spelled = parse_arguments(body)
        if spelled is None or not isinstance(spelled.get("name"), str):
            return Turn(problem='<tool_call> must hold {"name": ..., "arguments": {...}}.', thought=thought)
        raw = dump_json(spelled.get("arguments", {}))
        return Turn(calls=(Call("", clean(spelled["name"]), parse_arguments(raw), raw),), thought=thought)

    def describe(self, forms: Forms) -> str:
        """The allowed forms, one a line."""
        thought = f"<{self.thought}>brief reasoning, at most 60 words</{self.thought}>"
        lines = [f"{thought} {form}" for form in self._forms(forms)]
        if not lines:
            return "Nothing more can be done."
        intro = "Reply in this form, with nothing outside the tags:" if len(lines) == 1 else (
            "Reply in exactly one of these forms, with nothing outside the tags:"
        )  # fmt: skip
        return "\n".join([intro, *lines])

    def _forms(self, forms: Forms) -> list[str]:
        result = []
        if forms.act:
            if self.plan:
                result.append("<plan>numbered research steps</plan>")
            if self.generic and forms.tools:
                names = " or ".join(f'"{name}"' for name, _ in forms.tools)
                result.append('<tool_call>{"name": ' + names + ', "arguments": {...}}</tool_call>')
            elif not self.generic:
                result += [f"<{name}>{(arg or 'input').replace('_', ' ')}</{name}>" for name, arg in forms.tools]
        if forms.control:
            result.append(self.consult)
        if forms.answer:
            result.append("<answer>short final answer only</answer>")
        return result

    def grammar(self, forms: Forms) -> str:
        return _tag_grammar(self, forms)

    def check(self, tools: Mapping[str, str | None]) -> None:
        reserved = {self.thought, "answer", "critic", "plan", "tool_call", "request_feedback", "feedback"}
        for name, argument in tools.items():
            if self.generic:
                continue
            if name in reserved or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
                raise ConfigError(f"action format {self.name!r}: a tool cannot be called {name!r}; rename it")
            if argument is None:
                raise ConfigError(
                    f"action format {self.name!r} writes one text per action, so tool {name!r} needs exactly one "
                    "required string argument; give it one, or use the format 'tool-calls'"
                )


@lru_cache(maxsize=256)
def _pattern(format: Tags, tools: tuple[str, ...]) -> re.Pattern[str]:
    tags = ["answer"]
    tags += ["plan"] if format.plan else []
    tags += ["tool_call"] if format.generic else list(tools)
    names = "|".join(re.escape(tag) for tag in tags)
    thought = format.thought
    # No control tag may hide inside a block: a reply that opens two actions is malformed, not half read.
    inner = rf"(?:(?!</?(?:{names}|{thought}|critic|request_feedback)\b).)*?"
    return re.compile(
        rf"<{thought}>(?P<thought>{inner})</{thought}>\s*"
        rf"(?:(?P<consult>{format.consult_pattern})|<(?P<tag>{names})>(?P<body>{inner})</(?P=tag)>)",
        re.DOTALL,
    )


@lru_cache(maxsize=256)
def _tag_grammar(format: Tags, forms: Forms) -> str:
    options, needs_json = [], False
    if forms.act:
        if format.plan:
            options.append(f'"<plan>" {gbnf.line(400)} "</plan>"')
        if format.generic and forms.tools:
            names = " | ".join(gbnf.literal(dump_json(name)) for name, _ in forms.tools)
            options.append(
                f'"<tool_call>" {gbnf.literal("{" + chr(34) + "name" + chr(34) + ": ")} ( {names} ) '
                f'{gbnf.literal(", " + chr(34) + "arguments" + chr(34) + ": ")} object "}}</tool_call>"'
            )
            needs_json = True
        elif not format.generic:
            options += [f'"<{name}>" {gbnf.line(100)} "</{name}>"' for name, _ in forms.tools]
    if forms.control:
        options.append(gbnf.literal(format.consult))
    if forms.answer or not options:
        options.append(f'"<answer>" {gbnf.line(80)} "</answer>"')
    root = f'root ::= "<{format.thought}>" {gbnf.line(200)} "</{format.thought}>" "\\n" ( {" | ".join(options)} )'
    return "\n".join([root, gbnf.JSON_RULES] if needs_json else [root])


CADDIE = Tags("caddie", "reason", "<critic/>", r"<critic\s*/>", generic=False)
CAFE = Tags(
    "cafe",
    "think",
    "<request_feedback></request_feedback>",
    r"<request_feedback>\s*</request_feedback>",
    generic=True,
    plan=True,
)

FORMATS: dict[str, ActionFormat] = {"tool-calls": ToolCalls(), "caddie": CADDIE, "cafe": CAFE}


def action_format(name: str) -> ActionFormat:
    """The action format of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(f"unknown action format {name!r}: choose one of {', '.join(FORMATS)}") from None


def single_argument(schema: Mapping[str, Any]) -> str | None:
    """The one required string argument of a tool schema, which text formats fill; None when there is none."""
    parameters = schema.get("function", {}).get("parameters") or {}
    required: Sequence[str] = parameters.get("required") or ()
    properties = parameters.get("properties") or {}
    if len(required) == 1 and (properties.get(required[0]) or {}).get("type") == "string":
        return required[0]
    return None
