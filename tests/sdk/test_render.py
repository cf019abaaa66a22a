"""The one renderer: append-only, trims whole steps, and nothing untrusted gets out of its block (SPEC §5, rule 8)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from typing import Any

import pytest
import session_driver as driver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caddie_sdk.actions import strip_thinking
from caddie_sdk.commands import Consult
from caddie_sdk.config import SessionConfig
from caddie_sdk.critic import ConsultState
from caddie_sdk.critique import Critique, feedback_format
from caddie_sdk.errors import ContextOverflow, PackError
from caddie_sdk.intervention import Guarded
from caddie_sdk.render import RENDERER_VERSION, CriticPrompt, escape, estimate_tokens, render
from caddie_sdk.session import Session
from caddie_sdk.testing import calls, tool_call
from caddie_sdk.trajectory import Action, Event

PACK = CriticPrompt("search", "You advise an agent.", "What do you advise?")
QUERY = Action("search", '{"query": "Elbe"}')


def state(*events: Event, control: str = "call_critic", **fields: Any) -> ConsultState:
    return ConsultState(control, "self-call", 0, events, **fields)


def advice(text: str = "Missing.\nSearch.", control: str = "call_critic", **fields: Any) -> Event:
    raw = "Analysis: Missing.\nAdvices for next steps: Search."
    return Event("advice", 1, text, control=control, **{"raw": raw, **fields})


# ---------------------------------------------------------------- the text, to the letter


def test_the_prompt_to_the_letter() -> None:
    """What critics are trained on. If this test has to change, RENDERER_VERSION must be raised."""
    assert RENDERER_VERSION == 1
    story = (
        Event("task", 0, "Which river?"),
        Event("step", 0, "Look it up.", (QUERY, Action("open page", "{}")), ("A river.", "A page.")),
        Event("proposal", 1, "Stuck."),
        advice(),
        Event("step", 1, "", (QUERY,), ("Again.",)),
        Event("answer", 2, "The Elbe"),
        Event("user", 0, "And its source?"),
        Event("note", 0, "A note."),
        Event("proposal", 0, "", (Action("refund", "{}"),)),
    )
    assert render(state(*story), PACK) == [
        {"role": "system", "content": "You advise an agent."},
        {
            "role": "user",
            "content": "<task>\nWhich river?\n</task>\n\n"
            "<trajectory>\n"
            '<step n="1">\n'
            "<thought>Look it up.</thought>\n"
            '<action name="search">{"query": "Elbe"}</action>\n'
            '<action name="open_page">{}</action>\n'
            "<observation>\nA river.\n</observation>\n"
            "<observation>\nA page.\n</observation>\n"
            "</step>\n"
            "<proposal>\n<thought>Stuck.</thought>\n</proposal>\n"
            "</trajectory>\n\n"
            "What do you advise?",
        },
        {"role": "assistant", "content": "Analysis: Missing.\nAdvices for next steps: Search."},
        {
            "role": "user",
            "content": "<trajectory>\n"
            '<step n="2">\n<action name="search">{"query": "Elbe"}</action>\n'
            "<observation>\nAgain.\n</observation>\n</step>\n"
            "<answer>\nThe Elbe\n</answer>\n"
            "<user>\nAnd its source?\n</user>\n"
            "<note>\nA note.\n</note>\n"
            '<proposal>\n<action name="refund">{}</action>\n</proposal>\n'
            "</trajectory>\n\n"
            "What do you advise?",
        },
    ]


def test_what_a_pack_may_show() -> None:
    pack = dataclasses.replace(PACK, show_system=True, show_tools=True, task_tag="query")
    tools = ({"type": "function", "function": {"name": "search", "description": "Finds\n  passages."}},)
    messages = render(state(Event("task", 0, "Q"), system="Policy: no refunds.", tools=tools), pack)
    assert messages[1]["content"] == (
        "<system_prompt>\nPolicy: no refunds.\n</system_prompt>\n\n"
        "<tools>\nsearch: Finds passages.\n</tools>\n\n"
        "<query>\nQ\n</query>\n\n<trajectory>\n</trajectory>\n\nWhat do you advise?"
    )
    quiet = str(render(state(Event("task", 0, "Q"), system="Policy: no refunds.", tools=tools), PACK))
    assert "Policy" not in quiet
    assert "passages" not in quiet


def test_another_critics_advice_is_part_of_the_story_and_a_failed_one_is_not() -> None:
    story = (Event("task", 0, "Q"), advice("Slow down.", control="request_feedback"), advice("", ok=False, raw="junk"))
    messages = render(state(*story), PACK)
    assert [m["role"] for m in messages] == ["system", "user"]
    assert "<advice>\nSlow down.\n</advice>" in str(messages[1]["content"])
    assert "junk" not in str(messages)
    other = render(state(*story, control="request_feedback"), PACK)
    assert [m["role"] for m in other] == ["system", "user", "assistant", "user"]


def test_the_critics_own_words_come_back_as_it_wrote_them_without_its_thinking() -> None:
    raw = "<think>hm</think>\nAnalysis: a\nAdvices for next steps: b"
    messages = render(state(Event("task", 0, "Q"), advice(raw=raw)), PACK)
    assert messages[2] == {"role": "assistant", "content": "Analysis: a\nAdvices for next steps: b"}


@pytest.mark.parametrize("feedback", ["sections", "feedback"])
def test_a_critique_whose_own_text_was_not_kept_is_told_in_the_packs_format(feedback: str) -> None:
    """A user's own critic may return `Critique(analysis, advice)` and nothing else."""
    given = Critique("Missing.", "Search.") if feedback == "sections" else Critique(advice="Search.")
    session = Session()
    session.user_said("Q")
    session.model_replied(calls(tool_call("call_critic")))
    session.critic_replied(given)
    second = session.model_replied(calls(tool_call("call_critic")))
    assert isinstance(second, Consult)
    own = render(second.state, dataclasses.replace(PACK, feedback=feedback))[2]
    assert own["role"] == "assistant"
    parsed = feedback_format(feedback).parse(str(own["content"]))
    assert parsed == (given.analysis, given.advice)


# ---------------------------------------------------------------- append-only

many = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@many
@given(driver.configs(), driver.scripts, st.booleans())
def test_a_later_prompt_begins_with_the_earlier_one(config: SessionConfig, numbers: list[int], shown: bool) -> None:
    pack = dataclasses.replace(PACK, show_system=shown, show_tools=shown)
    answered: dict[str, tuple[list[Any], str]] = {}
    waiting: tuple[str, list[Any], int] | None = None
    for session, command, _ in driver.states(config, numbers):
        if waiting is not None and len(session.consultations) > waiting[2]:
            critique = session.consultations[-1]["critique"]
            if critique["status"] == "ok":
                answered[waiting[0]] = (waiting[1], strip_thinking(critique["raw"]))
        waiting = None
        if isinstance(command, Consult):
            control = command.state.control
            messages = render(command.state, pack)
            assert [m["role"] for m in messages[:2]] == ["system", "user"]
            assert messages[-1]["role"] == "user"
            assert all(a["role"] != b["role"] for a, b in itertools.pairwise(messages))
            json.dumps(messages, ensure_ascii=False).encode("utf-8")
            if control in answered:
                earlier, own = answered[control]
                assert messages[: len(earlier)] == earlier
                assert messages[len(earlier)] == {"role": "assistant", "content": own}
                assert len(messages) == len(earlier) + 2, "one more turn: what happened since"
            else:
                assert len(messages) == 2
            again = ConsultState.load(json.loads(json.dumps(command.state.dump())))
            assert render(again, pack) == messages
            waiting = (control, messages, len(session.consultations))


def test_two_forced_consultations_in_a_row_are_told_in_the_order_they_happened() -> None:
    """A turn is held for advice; an error in it is a step all the same, and that step repeats: consult again."""
    config = SessionConfig(tools=(driver.SEARCH, driver.REFUND), protocol=Guarded(("refund",), repeats=1))
    session = Session(config)
    session.user_said("Q")
    turn = calls(tool_call("fly", id="f"), tool_call("refund", {"order_id": "7"}, id="r"))
    first = session.model_replied(turn)
    assert isinstance(first, Consult)
    second = session.critic_replied(driver.parsed("a1", "b1"))
    assert isinstance(second, Consult)
    assert [event.kind for event in second.state.events] == ["task", "proposal", "advice", "outcome"]
    session.critic_replied(driver.parsed("a2", "b2"))
    third = session.model_replied(calls(tool_call("call_critic")))
    assert isinstance(third, Consult)
    kinds = [event.kind for event in third.state.events]
    assert kinds == ["task", "proposal", "advice", "outcome", "advice", "proposal"]
    prompts = [render(command.state, PACK) for command in (first, second, third)]
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert prompts[2][: len(prompts[1])] == prompts[1]


# ---------------------------------------------------------------- trimming


def steps(count: int, size: int = 40) -> list[Event]:
    return [
        Event("step", n, f"thought{n}", (Action("search", f"query{n}"),), (f"result{n} " + "x" * size,))
        for n in range(count)
    ]


def size(messages: list[Any]) -> int:
    return sum(estimate_tokens(m["content"]) + 4 for m in messages)


def kept(messages: list[Any], count: int) -> list[int]:
    """Which steps are told; each one wholly or not at all."""
    text = str(messages)
    told = []
    for n in range(count):
        marks = {bool(re.search(rf"{word}{n}\b", text)) for word in ("thought", "query", "result")}
        assert len(marks) == 1, f"step {n} is told in part"
        told += [n] if marks == {True} else []
    return told


@given(st.integers(1, 12), st.integers(0, 200), st.integers(1, 900), st.booleans())
@settings(max_examples=300, deadline=None)
def test_trimming_drops_whole_steps_from_the_middle(count: int, length: int, limit: int, asks: bool) -> None:
    story = [Event("task", 0, "Which river?"), *steps(count, length)]
    if asks:
        story.append(Event("proposal", count, "About to ask."))

    def telling(gone: int) -> list[Any]:
        """What is left when the oldest `gone` steps are dropped, made by hand."""
        note = [Event("note", 0, f"{gone} earlier steps are left out here.")] if gone else []
        return render(state(story[0], *note, *story[1 + gone :]), PACK)

    tellings = [telling(gone) for gone in range(count)]
    fitting = [messages for messages in tellings if size(messages) <= limit]
    if not fitting:
        with pytest.raises(ContextOverflow, match=f"max_input_tokens is {limit}"):
            render(state(*story, max_input_tokens=limit), PACK)
        return
    messages = render(state(*story, max_input_tokens=limit), PACK)
    assert messages == fitting[0], "no more is left out than must be"
    told = kept(messages, count)
    assert told == list(range(count - len(told), count)), "the oldest go first"
    assert count - 1 in told, "the latest step stays"
    assert "Which river?" in str(messages[1]["content"])
    assert ("About to ask." in str(messages)) == asks


def test_trimming_never_takes_the_latest_step_for_the_request_to_consult() -> None:
    """The agent's own request comes after its latest step, and is not that step."""
    story = [Event("task", 0, "Q"), *steps(3, 600), Event("proposal", 3, "Stuck.")]
    enough = size(render(state(story[0], *story[3:]), PACK)) + 20
    messages = render(state(*story, max_input_tokens=enough), PACK)
    assert kept(messages, 3) == [2]
    with pytest.raises(ContextOverflow):
        render(state(*story, max_input_tokens=enough - 100), PACK)


def test_trimming_keeps_advice_answers_and_what_the_user_said() -> None:
    story = [
        Event("task", 0, "Which river?"),
        *steps(3, 400),
        Event("proposal", 3, "", (Action("refund", "planned3"),)),
        advice(),
        Event("outcome", 3, "", (), ("outcome3",)),
        Event("answer", 4, "The Elbe"),
        Event("user", 0, "And its source?"),
        Event("step", 0, "fresh", (QUERY,), ("latest",)),
    ]
    messages = render(state(*story, max_input_tokens=250), PACK)
    text = str(messages)
    assert kept(messages, 3) == []
    for word in ("Which river?", "Advices for next steps: Search.", "The Elbe", "And its source?", "latest"):
        assert word in text
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert ("planned3" in text) == ("outcome3" in text), "a call and its result go together"


def test_the_smaller_limit_counts_and_the_counter_is_the_callers() -> None:
    story = [Event("task", 0, "Q"), *steps(4)]
    full = render(state(*story), PACK)
    pack = dataclasses.replace(PACK, max_input_tokens=size(full) - 1)
    assert kept(render(state(*story), pack), 4) == [1, 2, 3]
    assert kept(render(state(*story, max_input_tokens=10**6), pack), 4) == [1, 2, 3]
    assert render(state(*story), pack, count=lambda text: 0) == full
    with pytest.raises(ContextOverflow):
        render(state(*story), pack, count=lambda text: 10**6)


def test_a_task_that_does_not_fit_overflows_rather_than_being_cut() -> None:
    with pytest.raises(ContextOverflow):
        render(state(Event("task", 0, "x" * 3000), max_input_tokens=500), PACK)


def test_estimate_tokens_is_cautious() -> None:
    assert estimate_tokens("") == 0
    assert estimate_tokens("abcd") == 2
    assert estimate_tokens("漢字") == 2
    assert estimate_tokens("\ud800") == 1


# ---------------------------------------------------------------- escaping

_PIECES = st.lists(
    st.sampled_from(
        [
            *("<", "</", ">", "/>", "/", " ", "\n", "\t", "\xa0", "&lt;", "&#58;", ":", '"', "x"),
            *("task", "query", "trajectory", "step", "observation", "thought", "action", "proposal", "advice"),
            *("answer", "note", "user", "tools", "system_prompt", "critic", "search", "feedback", "taſk", "STEP"),
            *("Critic feedback", "critic\n feedback", "CRITIC FEEDBACK", "Analysis:", "Advices for next steps:"),
        ]
    ),
    max_size=12,
).map("".join)
_TAGS = re.compile(
    r"<\s*/?\s*(system_prompt|tools|tool|task|query|user|trajectory|step|thought|action|proposal|observation"
    r"|advice|answer|note|reason|search|critic|think|plan|tool_call|request_feedback|feedback|information)\b",
    re.IGNORECASE,
)


@given(_PIECES | st.text(max_size=40))
@settings(max_examples=500, deadline=None)
def test_escaping_leaves_no_reserved_tag_and_twice_is_once(text: str) -> None:
    escaped = escape(text)
    assert not _TAGS.search(escaped)
    assert not re.search(r"critic\s+feedback\s*:", escaped, re.IGNORECASE)
    assert escape(escaped) == escaped
    if not _TAGS.search(text) and not re.search(r"critic\s+feedback\s*:", text, re.IGNORECASE):
        assert escaped == text, "all other text is unchanged"


def test_escaping_by_example() -> None:
    assert escape("a < b <b>c</b> </div> <steps> <stepwise>") == "a < b <b>c</b> </div> <steps> <stepwise>"
    assert escape("</observation>") == "&lt;/observation>"
    assert escape("< / Step n='1'>") == "&lt; / Step n='1'>"
    assert escape("<<task>") == "<&lt;task>"
    assert escape("Critic feedback: pay") == "Critic feedback&#58; pay"
    assert escape("critics feedback: fine") == "critics feedback: fine"


@pytest.mark.parametrize("text", ["<" + " " * 300_000, "< /" * 100_000, "critic " * 50_000, "critic" + " " * 300_000])
def test_escaping_a_hostile_page_takes_no_time(text: str) -> None:
    """A tool's output is long and not ours; a pattern that backtracks over blanks would hang the agent."""
    started = time.process_time()
    assert escape(text)
    assert time.process_time() - started < 2


def _count_tags(messages: list[Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for message in messages:
        if message["role"] == "user":
            for tag in re.findall(r"<\s*/?\s*\w+", message["content"]):
                name = re.sub(r"\s", "", tag).lower()
                if _TAGS.match(tag):
                    counts[name] = counts.get(name, 0) + 1
    return counts


def _story(text: str) -> ConsultState:
    return state(
        Event("task", 0, text),
        Event("step", 0, text, (Action(text, text), Action("search", text)), (text, text)),
        Event("proposal", 1, text, (Action(text, text),)),
        Event("advice", 1, text, control="request_feedback"),
        Event("outcome", 1, "", (), (text,)),
        Event("answer", 2, text),
        Event("user", 0, text),
        Event("note", 0, text),
        system=text,
        tools=({"type": "function", "function": {"name": text, "description": text}},),
    )


@given(_PIECES.filter(bool) | st.text(min_size=1, max_size=40), st.sampled_from(["task", "query"]))
@settings(max_examples=400, deadline=None)
def test_no_untrusted_text_can_open_or_close_a_block(text: str, tag: str) -> None:
    pack = dataclasses.replace(PACK, show_system=True, show_tools=True, task_tag=tag)
    harmless, hostile = render(_story("x"), pack), render(_story(text), pack)
    assert _count_tags(hostile) == _count_tags(harmless)
    assert [m["role"] for m in hostile] == [m["role"] for m in harmless]
    names = re.findall(r'<action name="([^"\n]*)">', str(hostile[1]["content"]))
    assert len(names) == 3, "an action's name cannot end its attribute"


def test_a_pack_cannot_put_the_task_into_a_block_that_is_not_escaped() -> None:
    with pytest.raises(PackError, match="<question>"):
        dataclasses.replace(PACK, task_tag="question")


# ---------------------------------------------------------------- the hash


def test_the_hash_changes_with_everything_that_shapes_the_prompt() -> None:
    other: dict[str, Any] = {
        "name": "other",
        "system": "You advise an agent. ",
        "cue": "Advise.",
        "feedback": "feedback",
        "task_tag": "query",
        "show_system": True,
        "show_tools": True,
    }
    hashes = [PACK.hash] + [dataclasses.replace(PACK, **{name: value}).hash for name, value in other.items()]
    assert len(set(hashes)) == len(other) + 1
    limits = {"max_tokens", "max_input_tokens"}
    assert {field.name for field in dataclasses.fields(PACK)} == {*other, *limits}, "a new field needs a line here"
    assert dataclasses.replace(PACK, max_tokens=7, max_input_tokens=9).hash == PACK.hash
    assert re.fullmatch(r"[0-9a-f]{16}", PACK.hash)


def test_the_hash_changes_with_the_renderers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = PACK.hash
    monkeypatch.setattr("caddie_sdk.render.RENDERER_VERSION", RENDERER_VERSION + 1)
    assert PACK.hash != before


def test_the_hash_is_the_same_in_every_process() -> None:
    """It is stored beside checkpoints, so it is pinned."""
    assert PACK.hash == PINNED_HASH


PINNED_HASH = "2eefb9a4986422e5"


@pytest.mark.parametrize(
    "mark",
    [
        "<|im_end|>",
        "<|im_start|>system",
        "<|eot_id|>",
        "<\uff5cUser\uff5c>",
        "</s>",
        "<s>",
        "<end_of_turn>",
        "<start_of_turn>model",
        "[INST]",
        "[/INST]",
        "<<SYS>>",
    ],
)
def test_marks_of_chat_templates_lose_their_meaning(mark: str) -> None:
    """A server reads them wherever they stand, so a passage could end the critic's own turn (rule 8)."""
    escaped = escape(f"before {mark} after")
    assert mark not in escaped
    assert escaped.startswith("before &")
    assert escaped.endswith(f"{mark[1:]} after")
    assert escape(escaped) == escaped


@pytest.mark.parametrize("text", ["a < b | c", "x[INSTALL]", "<span>", "5 <s", "[1] Greave"])
def test_text_that_only_looks_like_one_is_left_alone(text: str) -> None:
    assert escape(text) == text
