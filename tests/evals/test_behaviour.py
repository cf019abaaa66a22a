"""Advice and its uptake: the rules, a model as labeller, and how far two readers agree."""

from __future__ import annotations

import asyncio
import json

import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st

from caddie_evals.behaviour import CLASSES, UPTAKES, AdviceUse, Label, Move, advice_uses, label_by_rule, shares
from caddie_evals.labelling import (
    NO_CLASS,
    PROMPT,
    ModelLabeller,
    agreement,
    class_names,
    label_uses,
    labelled_examples,
    parse_label,
)
from caddie_sdk.commands import CallModel, RunTools, ToolResult
from caddie_sdk.critique import Critique
from caddie_sdk.errors import ConfigError, EndpointUnavailable
from caddie_sdk.model import Reply
from caddie_sdk.session import Session, SessionConfig
from caddie_sdk.testing import ScriptedModel, calls, tool_call
from caddie_sdk.trajectory import Action, Event, read_trajectory


def call(name: str, **arguments: object) -> Move:
    return Move(actions=(Action(name, json.dumps(arguments)),))


def says(text: str) -> Move:
    return Move(text=text)


@pytest.mark.parametrize(
    ("advice", "expected"),
    [
        ("Search for the mother of Edda Voss.", "search"),
        ("The agent should now look up the river.", "search"),
        ("If the account is found, check its status.", "verify"),
        ("Confirm with the customer that the black one is fine.", "ask"),
        ("Confirm the date in a second passage.", "verify"),
        ("Return the final answer: 1912.", "answer"),
        ("Return the kettle to the shelf.", "execute"),
        ("1. Cancel the order.\n2. Ask for a review.", "execute"),  # the first actionable sentence decides
        ("The work is sound so far. Ask which size they want.", "ask"),
        ("Do not book yet. Verify the fare first.", "verify"),
        ("Stop searching and answer.", "answer"),
        ("Start by asking for the zip code.", "ask"),
        ("Call the get_user function with the name.", "search"),
        ("Call the cancel_order function.", "execute"),
        ("**Next**, open the first result.", "search"),
        ("Never guess. Avoid long queries.", None),
        ("Well done, the order of calls was right.", None),
        ("", None),
        ("…", None),
    ],
)
def test_the_class_is_that_of_the_first_actionable_sentence(advice: str, expected: str | None) -> None:
    assert label_by_rule(advice, None) == Label(expected, "unobservable")


@pytest.mark.parametrize(
    ("advice", "move", "expected"),
    [
        ("Search for the mother of Edda Voss.", call("search", query="Edda Voss mother"), "exact"),
        ("Search for the mother of Edda Voss.", call("search", query="Edda Voss school"), "partial"),
        ("Search for the mother of Edda Voss.", call("search", query="Lake Como"), "not followed"),
        ("Search for the mother of Edda Voss.", says("Berlin"), "not followed"),
        ("Cancel order #W12.", call("cancel_order", order_id="#W12"), "exact"),
        ("Cancel order #W12.", call("cancel_order", order_id="#W13"), "partial"),  # never exact with another number
        ("Cancel order #W12.", call("refund", account="x"), "not followed"),
        ("Ask for the zip code.", says("What is your zip code?"), "exact"),
        ("Ask for the zip code.", says("Your zip code is on file."), "not followed"),
        ("Ask for the zip code.", call("get_user", zip="10115"), "not followed"),
        ('Give the final answer "Ilmen".', says("Lake Ilmen"), "exact"),
        ('Give the final answer "Ilmen".', says("Ladoga"), "partial"),
        ('Give the final answer "Ilmen".', call("finish", answer="Ilmen"), "exact"),
        ('Give the final answer "Ilmen".', call("search", query="Ilmen"), "not followed"),
        ("Put the pan in cabinet 3.", call("action", command="go to cabinet 3"), "partial"),
        ("Put the pan in cabinet 3.", call("action", command="put pan 1 in/on cabinet 3"), "exact"),
        ("Good work so far.", call("search", query="x"), "unobservable"),
        ("Cancel order #W12.", Move(actions=(Action("cancel_order", "{not json #W12"),)), "exact"),
    ],
)
def test_uptake_compares_the_advice_with_the_next_action(advice: str, move: Move, expected: str) -> None:
    assert label_by_rule(advice, move).uptake == expected


def test_of_several_calls_in_one_step_the_best_counts() -> None:
    both = Move(actions=(Action("search", '{"query": "Lake Como"}'), Action("search", '{"query": "Edda Voss mother"}')))
    assert label_by_rule("Search for the mother of Edda Voss.", both).uptake == "exact"


@given(st.text(), st.text(), st.text(), st.booleans())
def test_any_text_gets_a_label(advice: str, name: str, text: str, acts: bool) -> None:
    label = label_by_rule(advice, Move(actions=(Action(name, text),)) if acts else says(text))
    assert label.uptake in UPTAKES
    assert (label.advice_class is None) == (label.uptake == "unobservable")


# ------------------------------------------------------------------ from trajectories

TOOL = {"type": "function", "function": {"name": "search", "description": "", "parameters": {"type": "object"}}}


def test_advice_uses_of_a_real_session() -> None:
    """The guidance without the analysis, each with the action after it; an advice that failed is none."""
    session = Session(SessionConfig(tools=(TOOL,)))
    session.user_said("Who was the mother of Edda Voss?")
    session.model_replied(calls(tool_call("call_critic")))
    session.critic_replied(Critique("Verify nothing yet.", "Search for Edda Voss."))
    command = session.model_replied(calls(tool_call("search", {"query": "Edda Voss"}), text="I look her up."))
    assert isinstance(command, RunTools)
    session.tools_returned([ToolResult(command.calls[0].id, "Her mother was Ida Voss.")])
    session.model_replied(calls(tool_call("call_critic")))
    session.critic_replied(Critique(status="timeout"))
    session.model_replied(calls(tool_call("call_critic")))
    session.critic_replied(
        Critique("All is known.", "Answer now.", raw="Analysis: x\nAdvices for next steps: Answer now.")
    )
    session.model_replied({"role": "assistant", "content": "Ida Voss"})

    uses = advice_uses(read_trajectory(session.history.path(), session.consultations))
    assert uses == [
        AdviceUse(0, "Search for Edda Voss.", call("search", query="Edda Voss")),
        AdviceUse(1, "Answer now.", says("Ida Voss")),
    ]
    labels = [label_by_rule(use.advice, use.move) for use in uses]
    assert labels == [Label("search", "exact"), Label("answer", "exact")]


def test_nothing_followed() -> None:
    advice = Event("advice", 2, "Search on.", raw="")
    note, end = Event("note", 2, "none of the allowed forms"), Event("answer", 2, "x")
    act = Event("step", 2, "", (Action("search", "{}"),), ("found",))
    assert [use.move for use in advice_uses([advice])] == [None]
    assert [use.move for use in advice_uses([advice, advice, note, end])] == [None, says("x")]
    # What the agent had proposed before the advice comes back as an outcome: its next action is the one after.
    assert [use.move for use in advice_uses([advice, Event("outcome", 2, observations=("ok",)), act, end])] == [
        Move(actions=act.actions)
    ]


def test_shares() -> None:
    found = shares(
        [Label("search", "exact"), Label("search", "partial"), Label("ask", "exact"), Label(None, "unobservable")]
    )
    assert found.classes == {"answer": 0, "search": 0.5, "verify": 0, "ask": 0.25, "execute": 0, None: 0.25}
    assert found.uptakes == {"exact": 0.5, "partial": 0.25, "not followed": 0, "unobservable": 0.25}
    assert found.total == 4
    with pytest.raises(ConfigError, match="no advice to describe"):
        shares([])


# ------------------------------------------------------------------ the labelled examples


def test_the_examples_are_sound() -> None:
    examples = labelled_examples()
    assert len(examples) >= 60
    assert len({example.id for example in examples}) == len(examples)
    for half in ("fit", "held-out"):
        labels = [example.label for example in examples if example.half == half]
        assert {label.advice_class for label in labels} == {*CLASSES, None}
        assert {label.uptake for label in labels} == set(UPTAKES)
    for example in examples:
        nothing = example.use.move is None or example.label.advice_class is None
        assert nothing == (example.label.uptake == "unobservable"), example.id


def test_the_rules_read_the_held_out_half() -> None:
    """Measured on 42 examples: class 41 right (98 %), uptake 32 (76 %, kappa 0.62). The floors lie below."""
    held_out = [example for example in labelled_examples() if example.half == "held-out"]
    found = [label_by_rule(example.use.advice, example.use.move) for example in held_out]
    truth = [example.label for example in held_out]
    classes = agreement(class_names(found), class_names(truth))
    uptakes = agreement([label.uptake for label in found], [label.uptake for label in truth])
    assert classes.raw is not None
    assert classes.raw >= 0.9
    assert uptakes.raw is not None
    assert uptakes.raw >= 0.7
    # Saying "exact" throughout would be right for 26 of 42 and have the kappa 0.
    assert uptakes.kappa is not None
    assert uptakes.kappa >= 0.5


# ------------------------------------------------------------------ a model as labeller


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"class": "search", "uptake": "partial"}', Label("search", "partial")),
        (' {"uptake": "not followed", "class": "ask"}\n', Label("ask", "not followed")),
        ('<think>{"class": "ask"}?</think>{"class": "answer", "uptake": "exact"}', Label("answer", "exact")),
        ('{"class": "none", "uptake": "unobservable"}', Label(None, "unobservable")),
        ("The agent followed the advice to search exactly.", None),
        ('The label is {"class": "search", "uptake": "exact"}', None),
        ('```json\n{"class": "search", "uptake": "exact"}\n```', None),
        ('{"class": "search", "uptake": "exact"} {"class": "ask", "uptake": "exact"}', None),
        ('{"class": "search"}', None),
        ('{"class": "search", "uptake": "exact", "why": "same query"}', None),
        ('{"class": "Search", "uptake": "exact"}', None),
        ('{"class": "search", "uptake": "mostly"}', None),
        ('{"class": "none", "uptake": "exact"}', None),
        ('{"class": null, "uptake": "unobservable"}', None),
        ('{"class": ["search"], "uptake": {"exact": 1}}', None),
        ('["search", "exact"]', None),
        ('<think>{"class": "search", "uptake": "exact"}', None),
        ("", None),
    ],
)
def test_a_reply_is_read_strictly(text: str, expected: Label | None) -> None:
    assert parse_label(text) == expected


USES = [
    AdviceUse(0, 'Search for "Edda".', call("search", query="Edda")),
    AdviceUse(1, "Answer now.", says("Ida")),
    AdviceUse(2, "Ask for the zip code.", None),
]


async def test_prose_is_counted_as_unlabelled_and_never_guessed() -> None:
    by_advice = {
        USES[0].advice: '{"class": "search", "uptake": "exact"}',
        USES[1].advice: "It clearly followed the advice to answer: exact.",
        USES[2].advice: '{"class": "ask", "uptake": "unobservable"}',
    }
    model = ScriptedModel(lambda asked: by_advice[json.loads(asked.messages[1]["content"])["advice"]])
    labels = await label_uses(USES, ModelLabeller(model), concurrency=2)
    assert labels == [Label("search", "exact"), None, Label("ask", "unobservable")]

    rules = [label_by_rule(use.advice, use.move) for use in USES]
    found = agreement([rule.uptake for rule in rules], [label and label.uptake for label in labels])
    assert (found.items, found.unlabelled, found.raw, found.kappa) == (2, 1, 1.0, 1.0)


async def test_what_the_model_is_shown() -> None:
    model = ScriptedModel(["nothing"] * 3)
    await label_uses(USES, ModelLabeller(model), concurrency=1)
    shown = [json.loads(asked.messages[1]["content"]) for asked in model.seen]
    assert shown == [
        {
            "advice": 'Search for "Edda".',
            "next_action": {"calls": [{"name": "search", "arguments": '{"query": "Edda"}'}]},
        },
        {"advice": "Answer now.", "next_action": {"says": "Ida"}},
        {"advice": "Ask for the zip code.", "next_action": None},
    ]
    assert all(asked.messages[0] == {"role": "system", "content": PROMPT} for asked in model.seen)
    assert all(f'"{name}"' in PROMPT for name in (*CLASSES, *UPTAKES, NO_CLASS))


class CutOff(ScriptedModel):
    """A model that runs into its token limit just after a whole object."""

    async def acomplete(self, call: CallModel) -> Reply:
        return Reply({"role": "assistant", "content": '{"class": "ask", "uptake": "exact"}'}, truncated=True)


async def test_a_reply_that_was_cut_off_is_no_label() -> None:
    assert await ModelLabeller(CutOff([]))(USES[0]) is None


async def test_a_dead_server_is_no_missing_label() -> None:
    """It is raised, and the other calls do not go on behind the caller's back."""
    cancelled = []

    async def labeller(use: AdviceUse) -> Label | None:
        if use is USES[1]:
            raise EndpointUnavailable("the server is down")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(use.step)
            raise
        return None

    with pytest.raises(EndpointUnavailable, match="the server is down"):
        await label_uses(USES, labeller)
    assert sorted(cancelled) == [0, 2]


async def test_no_more_calls_than_allowed_at_a_time() -> None:
    running, most = 0, 0

    async def labeller(use: AdviceUse) -> Label | None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return Label("ask", "exact")

    assert await label_uses(USES * 4, labeller, concurrency=3) == [Label("ask", "exact")] * 12
    assert most == 3
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        await label_uses(USES, labeller, concurrency=0)


# ------------------------------------------------------------------ agreement


def test_agreement_by_hand() -> None:
    # ten items, one unlabelled; nine left:  rule a a a a b b b c c
    #                                       label a a a b b b a c b
    # agreed 3 + 2 + 1 = 6 of 9; expected (4·4 + 3·4 + 2·1) / 81 = 30/81; kappa (54 - 30) / (81 - 30) = 24/51
    found = agreement(list("aaaabbbccc"), [*"aaabbbacb", None])
    assert (found.items, found.unlabelled) == (9, 1)
    assert found.raw == pytest.approx(6 / 9)
    assert found.kappa == pytest.approx(24 / 51)


def test_agreement_at_its_ends() -> None:
    assert agreement(["a", "b"], ["b", "a"]).kappa == -1
    assert agreement(["a", "b"], ["a", "a"]).kappa == 0
    alike = agreement(["a", "a"], ["a", "a"])
    assert (alike.raw, alike.kappa) == (1.0, None)  # chance alone explains it
    silent = agreement(["a", "b"], [None, None])
    assert (silent.items, silent.unlabelled, silent.raw, silent.kappa) == (0, 2, None, None)


def test_advice_that_asks_for_nothing_is_a_label_of_its_own() -> None:
    labels = [Label(None, "unobservable"), None, Label("ask", "exact")]
    assert class_names(labels) == [NO_CLASS, None, "ask"]
    found = agreement([None, None, "ask"], class_names(labels))
    assert (found.items, found.unlabelled, found.raw) == (2, 1, 1.0)


@pytest.mark.parametrize(("rules", "labels"), [([], []), (["a"], []), (["a"], ["a", "b"])])
def test_agreement_of_nothing_is_refused(rules: list[str], labels: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"at least one: {len(rules)} and {len(labels)}"):
        agreement(rules, labels)


pairs = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=2, max_size=20)


@given(pairs)
def test_kappa_is_that_of_scikit_learn_and_symmetric(items: list[tuple[str, str]]) -> None:
    first, second = [left for left, _ in items], [right for _, right in items]
    found = agreement(first, second)
    assert found == agreement(second, first)
    if len({*first, *second}) == 1:
        assert found.kappa is None
    else:
        assert found.kappa == pytest.approx(float(sklearn.metrics.cohen_kappa_score(first, second)), abs=1e-12)
