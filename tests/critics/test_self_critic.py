"""SelfCritic and PromptedCritic: any model in the critic's role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from caddie_critics.packs import load_pack
from caddie_critics.prompted import PromptedCritic
from caddie_critics.self_critic import SelfCritic
from caddie_sdk.commands import CallModel
from caddie_sdk.config import REQUEST_FEEDBACK, SessionConfig
from caddie_sdk.critic import ConsultState, Critic
from caddie_sdk.critique import FEEDBACK, SECTIONS
from caddie_sdk.endpoint import ChatEndpoint
from caddie_sdk.errors import (
    ContextOverflow,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    EndpointUnavailable,
    PackError,
)
from caddie_sdk.model import Reply
from caddie_sdk.render import render
from caddie_sdk.session import Session
from caddie_sdk.shells.loop import arun
from caddie_sdk.testing import ScriptedModel, calls, tool_call
from caddie_sdk.usage import Usage

MakeState = Callable[..., ConsultState]
GOOD = "<feedback>The plan skips the river.</feedback>"


# ------------------------------------------------------------------ the agent's own model


async def test_any_chat_model_reviews_its_own_work(consult_state: MakeState) -> None:
    model, state = ScriptedModel([GOOD], usage=Usage(9, 4, 0, 1)), consult_state()
    critic = SelfCritic(model)
    critique = await critic.acritique(state)
    assert isinstance(critic, Critic)
    assert (critique.status, critique.analysis, critique.advice) == ("ok", "", "The plan skips the river.")
    assert (critique.raw, critique.usage, critique.model) == (GOOD, Usage(9, 4, 0, 1), "scripted")
    [call] = model.seen
    assert (call.messages, call.tools) == (render(state, load_pack("feedback").prompt), [])
    assert call.grammar == FEEDBACK.grammar


def test_the_blocking_twin_means_the_same(consult_state: MakeState) -> None:
    assert SelfCritic(ScriptedModel([GOOD])).critique(consult_state()).advice == "The plan skips the river."


@pytest.mark.parametrize(("takes", "sent"), [("llama.cpp", True), (None, False)])
def test_an_endpoint_gets_limits_sampling_and_the_grammar_it_takes(
    server: Any, consult_state: MakeState, takes: str | None, sent: bool
) -> None:
    server.script = [server.answer(GOOD)]
    agent = ChatEndpoint(server.url, grammar=takes, params={"temperature": 0.0, "extra_body": {"min_p": 0.1}})
    critique = SelfCritic(agent, seed=3).critique(consult_state(max_tokens=77))
    assert critique.ok
    [body] = server.chats
    assert (body["max_tokens"], body["temperature"], body["top_p"], body["seed"]) == (77, 1.0, 1.0, 3)
    assert (body.get("grammar") == FEEDBACK.grammar) == sent
    assert body["min_p"] == 0.1, "the agent's own fields stay"


def test_the_family_of_the_model_decides_the_wire_before_the_first_call(server: Any, consult_state: MakeState) -> None:
    server.listing = [{"id": "gemma-3-1b", "object": "model", "owned_by": "x"}]
    server.script = [server.answer(GOOD)]
    assert SelfCritic(ChatEndpoint(server.url)).critique(consult_state()).ok
    assert [message["role"] for message in server.chats[0]["messages"]] == ["user"]


async def test_the_deadline_holds_for_a_model_that_never_answers(consult_state: MakeState) -> None:
    class Stuck:
        cancelled = False

        def complete(self, call: CallModel) -> Reply:
            raise AssertionError("the async twin is used")

        async def acomplete(self, call: CallModel) -> Reply:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            raise AssertionError

    model = Stuck()
    critique = await SelfCritic(model).acritique(consult_state(timeout=0.1))
    assert (critique.status, critique.detail) == ("timeout", "no critique within 0.1 s")
    assert model.cancelled


async def test_one_model_in_two_roles_through_a_whole_session() -> None:
    """CAFE's set-up: the agent asks, the same model reviews, and its second review begins with the first."""
    seen: list[list[dict[str, Any]]] = []

    def play(call: CallModel) -> Any:
        if call.messages[0]["content"] == load_pack("feedback").prompt.system:
            seen.append(call.messages)
            return f"<feedback>Review {len(seen)}.</feedback>"
        reviews = sum(message["role"] == "tool" for message in call.messages)
        return calls(tool_call(REQUEST_FEEDBACK)) if reviews < 2 else "42"

    model = ScriptedModel(play)
    session = Session(SessionConfig(controls=(REQUEST_FEEDBACK,)))
    finish = await arun(session, "How many?", model, critics={REQUEST_FEEDBACK: SelfCritic(model)})
    assert (finish.answer, len(seen)) == ("42", 2)
    assert seen[1][:2] == seen[0]
    assert seen[1][2] == {"role": "assistant", "content": "<feedback>Review 1.</feedback>"}


# ------------------------------------------------------------------ any function


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EndpointUnavailable("down"), "unavailable"),
        (EndpointTimeout("slow"), "timeout"),
        (EndpointRefused("no"), "refused"),
        (ContextOverflow("long"), "context_overflow"),
        (EndpointError("odd\nindeed"), "unavailable"),
        (PackError("other pack"), "refused"),
        (TimeoutError(), "timeout"),
    ],
)
async def test_every_error_has_its_status(consult_state: MakeState, error: Exception, status: str) -> None:
    async def complete(messages: list[dict[str, Any]], params: dict[str, Any], timeout: float) -> Reply:
        raise error

    critique = await PromptedCritic("general", complete).acritique(consult_state())
    assert critique.status == status
    assert str(error).replace("\n", " ") in critique.detail


async def test_a_bug_in_the_users_function_is_not_hidden(consult_state: MakeState) -> None:
    async def complete(messages: list[dict[str, Any]], params: dict[str, Any], timeout: float) -> Reply:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await PromptedCritic("general", complete).acritique(consult_state())


async def test_a_function_gets_prompt_limits_and_the_time_allowed(consult_state: MakeState) -> None:
    got: list[Any] = []

    async def complete(messages: list[dict[str, Any]], params: dict[str, Any], timeout: float) -> Reply:
        got.extend([messages, params, timeout])
        return Reply({"role": "assistant", "content": SECTIONS.render("a", "b")})

    pack, state = load_pack("household"), consult_state(timeout=9.0)
    critic = PromptedCritic(pack, complete, model="mine", temperature=0.5)
    critique = await critic.acritique(state)
    assert critic.pack is pack
    assert (critique.text, critique.model) == ("Analysis: a\nAdvices for next steps: b", "mine")
    assert got[:2] == [render(state, pack.prompt), {"temperature": 0.5, "top_p": 1.0, "max_tokens": 512}]
    assert 8 < got[2] <= 9


async def test_content_in_parts_is_read(consult_state: MakeState) -> None:
    async def complete(messages: list[dict[str, Any]], params: dict[str, Any], timeout: float) -> Reply:
        parts = [{"type": "text", "text": "Analysis: a"}, {"type": "text", "text": "Advices for next steps: b"}]
        return Reply({"role": "assistant", "content": parts})

    assert (await PromptedCritic("search", complete).acritique(consult_state())).advice == "b"
