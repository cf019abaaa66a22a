"""The rules behind `behaviour`: verbs tell what an advice asks for, shared words whether an action does it.

Everything here is English, and data before code: the tables say what counts as what.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from caddie_sdk.trajectory import Action

AdviceClass: TypeAlias = Literal["answer", "search", "verify", "ask", "execute"]
Uptake: TypeAlias = Literal["exact", "partial", "not followed", "unobservable"]


@dataclass(frozen=True, slots=True)
class Move:
    """What an agent did next: calls of its tools, or words (an answer, a message to the user).

    Attributes:
        actions: the calls of one step.
        text: the words, where there are no calls.
    """

    actions: tuple[Action, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an advice asks for first.

    Attributes:
        advice_class: the kind of act.
        verb: the word that says so, lower-case.
        target: what the act is about, as written.
        context: the advice from there on; it may name places where to look.
    """

    advice_class: AdviceClass
    verb: str
    target: str
    context: str = ""


# ------------------------------------------------------------------ what an advice asks for

_VERBS: dict[AdviceClass, str] = {
    "answer": "answer conclude finalize finalise finish commit submit give provide state report present output tell "
    "inform explain respond reply say apologize decline deny refuse notify summarize offer",
    "search": "search query look find identify locate investigate explore retrieve browse read determine discover "
    "research list focus gather fetch rephrase reformulate refine narrow broaden consult",
    "verify": "verify check confirm validate cross-check cross-reference double-check recheck make ensure compare "
    "review reread re-read re-examine reexamine examine inspect calculate recalculate compute test",
    "ask": "ask clarify inquire prompt request obtain seek wait",
    "execute": "call invoke run execute perform proceed process cancel update modify change issue refund book exchange "
    "transfer apply upgrade downgrade add remove delete create send pay charge take pick grab put place go move walk "
    "head turn switch toggle heat cool clean rinse wash slice drop open close click use return set start complete "
    "carry escalate get try visit bring leave unlock",
}
_CLASS_OF: dict[str, AdviceClass] = {verb: name for name, verbs in _VERBS.items() for verb in verbs.split()}

_USER = r"\b(?:with|from) the (?:user|customer|passenger|client|caller)\b"
_PAGE = r"\b(?:result|page|link|article|site|website|source|document|url)s?\b"
_READS = r"get|search|find|list|look\w*|query|retrieve|read|browse|fetch|view"
_EXCEPTIONS: tuple[tuple[str, str, AdviceClass], ...] = (
    # verb, what stands after it, class: where the object decides. The first that fits counts.
    ("verify|check|confirm|validate|ensure|make|find|clarify|get", _USER, "ask"),
    ("get|obtain|seek|wait|request", r"\b(?:consent|confirmation|approval|permission|agreement)\b", "ask"),
    (
        "submit|process|complete|finalize",
        r"\b(?:request|order|form|change|claim|booking|payment|exchange)\b",
        "execute",
    ),
    ("return|complete|get", r"\b(?:final|answer|response)\b", "answer"),
    ("close|end", r"\b(?:conversation|chat|dialogue)\b", "answer"),
    ("use|try|run|start|perform|add|change", r"\b(?:query|queries|search|searches|keywords?|terms?)\b", "search"),
    ("open|click|visit|go|use", _PAGE, "search"),
    ("get|obtain|seek|request", r"\b(?:details?|list|information|status|history|record|account|evidence)\b", "search"),
    ("check", r"\bfor (?:an?|another|any)\b", "search"),
    ("call|invoke|use|run|execute", rf"^(?:the )?\W?(?:{_READS})(?:_|\b)", "search"),
    ("call|invoke|use|run|execute", r"^(?:the )?\W?(?:calculat|check|verify|valid)", "verify"),
)

_BULLET = re.compile(r"^[\s\-•*>]*(?:\d+[.)])?\s*")
_SPLIT = re.compile(r"\n+|(?<=[.!?;:])[\"”’')]*\s+")
_FILLER = re.compile(
    r"^(?:(?:first|next|then|now|please|instead|also|so|and|but|therefore|finally|immediately|specifically|"
    r"simply|just|only then|carefully|briefly|at this point|the agent|you|it)\b[,:]?\s*)+",
    re.IGNORECASE,
)
_SUBORDINATE = re.compile(
    r"^(?:since|because|if|once|when|before|after|given|as|now that|while|instead of|rather than|with|for|to)\b"
    r"[^,]*,\s*",
    re.IGNORECASE,
)
_FORBIDDEN = re.compile(r"^(?:do not|don't|never|avoid|stop|refrain|no need|cease)\b", re.IGNORECASE)
_IDLE = re.compile(r"^(?:keep (?:going|on|it up)|carry on|continue|proceed|go ahead)\W*$", re.IGNORECASE)
_STOP_AND = re.compile(r"^stop\b.*?\b(?:and|then)\s+", re.IGNORECASE)
_MODAL = re.compile(
    r"\b(?:should|must|needs? to|has to|have to|is to|time to|ready to|safe to|best to|better to|proceed to|try to|"
    r"let's|can|could)\s+(?:(?:be to|now|first|next|then|also|just|immediately|instead)\s+)*([a-z][a-z-]*)\b\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)
_VERB = re.compile(r"^([a-z][a-z-]*)\b\s*(.*)", re.IGNORECASE | re.DOTALL)
_BY_DOING = re.compile(r"^(?:start|begin|continue|keep|consider|try|proceed)\s+(?:by|with|to)?\s*", re.IGNORECASE)
_NOUN = re.compile(
    r"\b(?:another|one more|a further|a new|a targeted|a narrower) (?:search|query)\b\s*(.*)", re.DOTALL | re.IGNORECASE
)


def read_advice(advice: str) -> Reading | None:
    """What the first actionable sentence of an advice asks for; None where no sentence asks for anything."""
    clauses = list(_clauses(advice))
    for index, clause in enumerate(clauses):
        if reading := _read_clause(clause):
            return replace(reading, context=" ".join(clauses[index:]))
    return None


def _clauses(advice: str) -> Iterator[str]:
    for piece in _SPLIT.split(advice):
        clause = _BULLET.sub("", piece.replace("**", "").replace("`", "")).strip()
        if clause:
            yield clause


def _read_clause(clause: str) -> Reading | None:
    clause = _FILLER.sub("", _SUBORDINATE.sub("", _FILLER.sub("", clause)))
    if _IDLE.match(clause):
        return None
    if _FORBIDDEN.match(clause):
        if not _STOP_AND.match(clause):
            return None
        clause = _STOP_AND.sub("", clause)
    # "Start by asking" asks; "start the dishwasher" starts.
    doing = _VERB.match(_BY_DOING.sub("", clause))
    found = _classified(doing[1], doing[2]) if doing else None
    head = _VERB.match(clause)
    if head and not found:
        found = _classified(head[1], head[2])
    if not found and (modal := _MODAL.search(clause)):
        found = _classified(modal[1], modal[2])
    if not found and (noun := _NOUN.search(clause)):
        found = _classified("search", noun[1])
    return found


def _classified(word: str, rest: str) -> Reading | None:
    verb = _base(word.lower())
    if verb not in _CLASS_OF:
        return None
    if verb == "proceed" and (inner := re.match(r"to\s+([a-z-]+)\b\s*(.*)", rest, re.IGNORECASE | re.DOTALL)):
        return _classified(inner[1], inner[2]) or Reading("execute", verb, rest)
    for verbs, after, name in _EXCEPTIONS:
        if verb in verbs.split("|") and re.search(after, rest, re.IGNORECASE):
            return Reading(name, verb, rest)
    return Reading(_CLASS_OF[verb], verb, rest)


def _base(word: str) -> str:
    """The verb of a gerund that is in the tables ("searching"), else the word itself."""
    if not word.endswith("ing"):
        return word
    stem = word[:-3]
    return next((form for form in (stem, stem + "e", stem[:-1]) if form in _CLASS_OF), word)


# ------------------------------------------------------------------ whether an action does it

_SAME_ACT = (
    {"take", "pick", "grab", "get"},
    {"put", "place", "move", "drop", "leave"},
    {"go", "move", "walk", "head", "return", "visit"},
    {"turn", "use", "switch", "toggle"},
    {"update", "modify", "change"},
    {"issue", "refund", "process"},
    {"clean", "rinse", "wash"},
    {"book", "reserve"},
)
_ANY_ACT = frozenset({"call", "invoke", "run", "execute", "perform", "proceed", "process", "apply", "complete", "set"})
_WAYS = frozenset({"go", "open", "walk", "move"})
_READ_MOVES = re.compile(
    rf"^(?:{_READS}|open|click|visit|scroll|check|verify|calculate|inspect|examine|inventory|go|web|wiki)",
    re.IGNORECASE,
)
_COMMAND_TOOLS = frozenset({"action", "act", "step", "command", "execute", "do"})
_FINISHERS = frozenset({"answer", "finish", "submit", "final_answer", "respond"})
_TELLS = frozenset({"tell", "inform", "explain", "notify", "offer", "say", "decline", "deny", "refuse"})
_END_OF_TARGET = re.compile(
    r"\b(?:because|since|so that|in order to|before|rather than|instead of|as the|as it)\b|[,;]\s*(?:then|and|not|"
    rf"which|as|but|so)\b|\band (?:then )?(?=(?:{'|'.join(sorted(_CLASS_OF))})\b)|[.;]\s|$",
    re.IGNORECASE,
)
_HEAD = re.compile(r"\b(?:of|that|which|who|whom|whose|where|on|in|at|from|by|for|with|to)\b", re.IGNORECASE)
"""What ends the first words of a target, which say what is looked for."""
_QUOTED = re.compile(r"[\"“]([^\"“”]+)[\"”]")
_TOKEN = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_ORDINALS = ("second", "third", "fourth", "fifth", "sixth")
_NUMBERS = {word: str(number) for number, word in enumerate(_ONES, 1)}
_NUMBERS |= {word: str(number) for number, word in enumerate(_ORDINALS, 2)}
_NOISE_WORDS = """
    a an the of in on at to for with by from and or is are was were be been it its this that these those what which who
    whom whose when where how why whether if as not no now only same other rather than then there their his her out up
    about into whole full exact agent user customer passenger final answer function tool parameter parameters argument
    id
"""
_NOISE = frozenset(_NOISE_WORDS.split())


def read_uptake(reading: Reading | None, move: Move | None) -> Uptake:
    """How far a move does what an advice asks for; of several calls in one step, the best counts."""
    if reading is None or move is None:
        return "unobservable"
    if not move.actions:
        return _uptake_of_words(reading, move.text)
    found = [_uptake_of_call(reading, action) for action in move.actions]
    ranks: tuple[Uptake, ...] = ("exact", "partial")
    return next((rank for rank in ranks if rank in found), "not followed")


def _uptake_of_words(reading: Reading, text: str) -> Uptake:
    question = "?" in text or re.search(r"\bplease (?:confirm|provide|tell|share|reply)\b", text, re.IGNORECASE)
    wanted, said = _keys(_target(reading)), _keys(text)
    if reading.advice_class == "ask":
        if not question:
            return "not followed"
        return _degree(wanted, said, enough=1 / 3)
    if reading.advice_class != "answer":
        return "not followed"
    quoted = [_keys(quote) for quote in _QUOTED.findall(reading.target)]
    if quoted and not any(quote <= said for quote in quoted):
        return "partial"
    if reading.verb in _TELLS and not quoted:
        return _degree(wanted, said, enough=1 / 3)
    return "exact" if "?" not in text else "not followed"


def _uptake_of_call(reading: Reading, action: Action) -> Uptake:
    arguments = " ".join(_values(action.arguments))
    if action.name in _FINISHERS:
        return _uptake_of_words(reading, arguments)
    done = arguments if action.name in _COMMAND_TOOLS else f"{action.name.replace('_', ' ')} {arguments}"
    if reading.advice_class in ("answer", "ask"):
        return "not followed"
    if reading.advice_class == "execute":
        return _uptake_of_act(reading, done)
    return _uptake_of_reading(reading, done) if _READ_MOVES.match(done) else "not followed"


def _uptake_of_reading(reading: Reading, done: str) -> Uptake:
    """Whether a look or a query looks for what was advised."""
    target = _target(reading)
    wanted, made = _keys(target), _keys(done, but=_READ_MOVES)
    if not wanted or not made:
        return "exact"
    if done.split(maxsplit=1)[0].lower() in _WAYS and len(made & _keys(reading.context)) >= len(made) / 2:
        return "exact"  # the way to a place that the advice names
    shared = wanted & made
    if not shared:
        return "not followed"
    much = len(shared) / len(wanted) >= 0.5 or (len(shared) / len(made) >= 0.5 and len(shared) > 1)
    if named := _named(target):
        return "exact" if much and named & made else "partial"
    head = next((keys for part in _HEAD.split(target) if (keys := _keys(part))), wanted)
    return "exact" if much and (reading.advice_class == "verify" or head & made) else "partial"


def _uptake_of_act(reading: Reading, done: str) -> Uptake:
    target = _target(reading)
    wanted, made = _keys(target.replace("_", " ")), _keys(done)
    act = re.match(r"[a-z]+", done.lower())
    acts = {reading.verb}.union(*(group for group in _SAME_ACT if reading.verb in group))
    if reading.verb in _ANY_ACT or (act and act[0] in acts) or any(_stem(word) in made for word in acts):
        return _degree(wanted, made, enough=0.6, named=_named(target))
    return "partial" if act and act[0] in _WAYS and wanted & made else "not followed"


def _degree(wanted: set[str], done: set[str], *, enough: float, named: frozenset[str] = frozenset()) -> Uptake:
    """By the share of the wanted words that were done.

    `enough` of them make it exact, unless something `named` (a number, an identifier) is missing. Advice without a
    target is met by any act of its kind.
    """
    if not wanted:
        return "exact"
    shared = wanted & done
    if not shared:
        return "not followed"
    return "exact" if len(shared) / len(wanted) >= enough and named <= done else "partial"


def _target(reading: Reading) -> str:
    """What the act is about, without reasons and later acts; quoted text is never cut."""
    end = _END_OF_TARGET.search(re.sub(_QUOTED, lambda quote: "x" * len(quote[0]), reading.target))
    return reading.target[: end.start()] if end else reading.target


def _keys(text: str, but: re.Pattern[str] | None = None) -> set[str]:
    """The words that matter, in a form in which variants meet."""
    words = [word.lower() for word in _TOKEN.findall(text.replace("_", " "))]
    if but and words and but.match(words[0]):
        words = words[1:]
    return {_NUMBERS.get(word) or _stem(word) for word in words if word not in _NOISE}


def _named(text: str) -> frozenset[str]:
    """Words with a digit (identifiers, numbers, dates): what must not be changed."""
    return frozenset(key for key in _keys(text) if any(char.isdigit() for char in key))


def _stem(word: str) -> str:
    """A crude stem: no possessive or plural s, six letters; words with digits stay whole."""
    if any(char.isdigit() for char in word):
        return word
    word = re.sub(r"['’]s?$", "", word)
    return (word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word)[:6]


def _values(arguments: str) -> Iterator[str]:
    """The values in a call's arguments as text; arguments that are no JSON count as they are."""
    try:
        yield from _leaves(json.loads(arguments))
    except (ValueError, RecursionError):
        yield arguments


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield str(value)
