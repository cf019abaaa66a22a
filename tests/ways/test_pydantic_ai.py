"""`CriticCapability` in agents of pydantic-ai, with the openai model class against a scripted server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolReturnPart,
)
from pydantic_ai.models import ModelRequestContext, ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from upstream import Scripted, Upstream

from caddie_sdk import Budget, Critique
from caddie_sdk.errors import ConfigError, ConsultationError
from caddie_sdk.shells.pydantic_ai import CriticCapability
from caddie_sdk.testing import ScriptedCritic, calls, tool_call

Upstreams = Callable[..., Upstream]
CRITIC = tool_call("call_critic")
PAID: list[str] = []


def search(query: str) -> str:
    """Search the archive."""
    return f"found: {query}"


def refund(order: str) -> str:
    """Pay an order back."""
    PAID.append(order)
    return f"refunded {order}"


@pytest.fixture(autouse=True)
def nothing_paid() -> None:
    PAID.clear()


def look(query: str = "Ada", id: str = "") -> dict[str, Any]:
    return tool_call("search", {"query": query}, id)


def pay() -> dict[str, Any]:
    return tool_call("refund", {"order": "7"})


def advisor() -> ScriptedCritic:
    return ScriptedCritic(lambda state: (f"step {state.step}, {state.trigger}", f"{state.remaining} left"))


class Bot:
    """An agent, its server and its critic."""

    def __init__(self, upstream: Upstream, critic: Any = None, **settings: Any) -> None:
        self.upstream, self.critic = upstream, critic or advisor()
        ours = {k: settings.pop(k) for k in ("protocol", "budget", "on_error", "feedback", "seed") if k in settings}
        model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=upstream.url, api_key="k"))
        capability = CriticCapability(self.critic, **ours)
        self.agent: Any = Agent(model, tools=[search, refund], capabilities=[capability], **settings)

    def offered(self) -> list[bool]:
        return ["call_critic" in [t["function"]["name"] for t in r.body["tools"]] for r in self.upstream.requests]


@pytest.fixture
def bot(upstreams: Upstreams) -> Callable[..., Bot]:
    return lambda script, critic=None, **settings: Bot(upstreams(script, strict=True), critic, **settings)


def sketch(result: Any) -> list[Any]:
    """Who said what, in short."""
    told: list[Any] = []
    for message in result.all_messages():
        if isinstance(message, ModelResponse) and message.tool_calls:
            told.append([call.tool_name for call in message.tool_calls])
            continue
        for part in message.parts:
            text = str(part.content).split("\n")[0]
            told.append((part.tool_name, text) if part.part_kind == "tool-return" else text)
    return told


ADVICE = ("call_critic", "Critic feedback:")
HELD = ("refund", "Not run yet: read the critic's advice first, then decide.")


def test_a_mixed_turn(bot: Callable[..., Bot]) -> None:
    one = bot([calls(look("a", "c1"), tool_call("call_critic", id="c2"), look("b", "c3")), "Paris"])
    result = one.agent.run_sync("Where?")
    assert sketch(result) == [
        "Where?", ["search", "call_critic", "search"], ("search", "found: a"), ADVICE, ("search", "found: b"), "Paris",
    ]  # fmt: skip
    advice = result.all_messages()[2].parts[1]
    assert advice.content == (
        "Critic feedback:\nAnalysis: step 0, self-call\nAdvices for next steps: 2 left\n\nConsultations left: 2."
    )
    assert Critique.load(advice.metadata).advice == "2 left"
    sent = one.upstream.requests[1].body["messages"]
    assert [message.get("tool_call_id") for message in sent[-3:]] == ["c1", "c2", "c3"]


@pytest.mark.parametrize("way", ["run", "stream"])
def test_the_control_tool_goes_when_the_budget_is_used_up(bot: Callable[..., Bot], way: str) -> None:
    one = bot([calls(CRITIC), calls(CRITIC), "Paris it is"], budget=Budget(max_uses=1))

    async def stream() -> tuple[str, Any]:
        async with one.agent.run_stream("Where?") as result:
            return "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)]), result

    if way == "run":
        result = one.agent.run_sync("Where?")
        answer = result.output
    else:
        answer, result = asyncio.run(stream())
    assert answer == "Paris it is"
    assert sketch(result)[1:5] == [
        ["call_critic"], ADVICE, ["call_critic"], ("call_critic", "No consultations are left."),
    ]  # fmt: skip
    assert one.offered() == [True, False, False]
    assert len(one.critic.seen) == 1


def test_guarded_calls_wait_for_advice(bot: Callable[..., Bot]) -> None:
    one = bot([calls(pay()), calls(pay()), "Done"], protocol="guarded:refund")
    assert sketch(one.agent.run_sync("Pay!")) == [
        "Pay!", ["refund"], HELD, ["call_critic"], ADVICE, ["refund"], ("refund", "refunded 7"), "Done",
    ]  # fmt: skip
    assert PAID == ["7"]


def test_a_guarded_call_beside_others(bot: Callable[..., Bot]) -> None:
    one = bot([calls(look("a"), pay()), calls(pay()), "Done"], protocol="guarded:refund")
    assert sketch(one.agent.run_sync("Pay!"))[1:6] == [
        ["search", "refund"], ("search", "found: a"), HELD, ["call_critic"], ADVICE,
    ]  # fmt: skip
    assert PAID == ["7"]
    assert [state.trigger for state in one.critic.seen] == ["guarded"]


@pytest.mark.parametrize(
    ("protocol", "steps"),
    [("fixed:0", [0]), ("fixed:1,2", [1, 2]), ("probabilistic:1", [0, 1, 2]), ("guarded:;repeats=2", [2])],
)
def test_a_protocol_brings_the_critic(bot: Callable[..., Bot], protocol: str, steps: list[int]) -> None:
    one = bot([calls(look()), calls(look()), "Paris"], protocol=protocol)
    result = one.agent.run_sync("Where?")
    assert [state.step for state in one.critic.seen] == steps
    assert sketch(result).count(ADVICE) == len(steps)
    assert result.output == "Paris"


@pytest.mark.parametrize("where", ["instructions", "system_prompt"])
def test_the_critic_reads_what_the_agent_reads(bot: Callable[..., Bot], where: str) -> None:
    one = bot([calls(look()), calls(CRITIC), "Paris"], **{where: "Be careful."})
    one.agent.run_sync(["Where?", "Exactly?"])
    (state,) = one.critic.seen
    assert state.system == "Be careful."
    assert [event.kind for event in state.events] == ["task", "step", "proposal"]
    assert state.events[0].text == "Where?\nExactly?"
    assert {schema["function"]["name"] for schema in state.tools} == {"search", "refund"}


class Town(BaseModel):
    """Where somebody was born."""

    name: str


@pytest.mark.parametrize("kind", [str, Town])
def test_the_next_run_of_a_conversation(bot: Callable[..., Bot], kind: Any) -> None:
    """Stored as JSON between the runs; each run has its own consultations, the critic sees all of them."""
    last: Any = "Paris" if kind is str else calls(tool_call("final_result", {"name": "Paris"}))
    one = bot([calls(CRITIC), last] * 2, budget=Budget(max_uses=1), output_type=kind)
    first = one.agent.run_sync("Ada?")
    history = ModelMessagesTypeAdapter.validate_json(first.all_messages_json())
    second = one.agent.run_sync("Bob?", message_history=history)
    assert second.output == ("Paris" if kind is str else Town(name="Paris"))
    assert one.offered() == [True, False, True, False]
    assert [event.kind for event in one.critic.seen[1].events].count("advice") == 1


def test_many_runs_at_once(upstreams: Upstreams) -> None:
    def script(body: dict[str, Any]) -> Any:
        name = next(message["content"] for message in body["messages"] if message["role"] == "user")
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if not results:
            return calls(look(name), CRITIC)
        assert f"about {name}\n" in results[1]
        return f"answer {name}"

    critic = ScriptedCritic(lambda state: (f"about {state.events[0].text}", "go on"))
    one = Bot(upstreams(script, strict=True), critic)

    async def all_at_once() -> list[str]:
        return [r.output for r in await asyncio.gather(*(one.agent.run(f"n{number}") for number in range(24)))]

    assert asyncio.run(all_at_once()) == [f"answer n{number}" for number in range(24)]


def test_a_critic_that_fails_stops_nobody(bot: Callable[..., Bot]) -> None:
    down = ScriptedCritic(lambda state: RuntimeError("a bug"))
    one = bot([calls(pay()), calls(pay()), "Done"], down, protocol="guarded:refund")
    result = one.agent.run_sync("Pay!")
    assert "none this time (failed)" in str(result.all_messages())
    assert PAID == ["7"]


def test_a_failed_consultation_raises_when_asked_to(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC)], ScriptedCritic(lambda state: RuntimeError("a bug")), on_error="raise")
    with pytest.raises(ConsultationError, match="failed"):
        one.agent.run_sync("Where?")


def test_an_agent_that_only_asks_comes_to_an_end(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC)] * 4, budget=Budget(max_uses=1, max_rejections=2))
    assert one.agent.run_sync("Where?").output == "No consultations are left."
    assert len(one.critic.seen) == 1


def test_ids_used_twice_and_arguments_nobody_asked_for(bot: Callable[..., Bot]) -> None:
    first = calls(look("a", "x"), tool_call("call_critic", {"question": "why"}, "y"))
    one = bot(
        [Scripted(first, keep_ids=True), Scripted(calls(look("b", "x"), {**CRITIC, "id": "y"}), keep_ids=True), "Paris"]
    )
    result = one.agent.run_sync("Where?")
    assert sketch(result).count(ADVICE) == 2
    ids = [call.tool_call_id for m in result.all_messages() if isinstance(m, ModelResponse) for call in m.tool_calls]
    assert len(set(ids)) == 4


async def test_a_history_without_a_reading_passes_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """A result that no call is waiting for. Agents repair such histories, so the hook is called by hand."""
    capability = CriticCapability(advisor(), protocol="fixed:0")
    stray = ModelRequest([ToolReturnPart("search", "found", "zz")])
    tools = [ToolDefinition(name="search"), ToolDefinition(name="call_critic")]
    request = ModelRequestContext(
        model=TestModel(),
        messages=[stray],
        model_settings=None,
        model_request_parameters=ModelRequestParameters(function_tools=tools),
    )
    sent: list[Any] = []

    async def answer(context: Any) -> ModelResponse:
        sent.append(context.model_request_parameters.function_tools)
        return ModelResponse([TextPart("Paris")])

    response = await capability.wrap_model_request(None, request_context=request, handler=answer)
    assert response.text == "Paris"
    assert [[tool.name for tool in offered] for offered in sent] == [["search"]]
    assert "no advice for this model call" in caplog.text


def test_settings_that_are_wrong() -> None:
    with pytest.raises(ConfigError, match="needs a critic"):
        CriticCapability()
    with pytest.raises(ConfigError, match="must have critique\\(\\) and acritique"):
        CriticCapability("http://here")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown intervention protocol"):
        CriticCapability(advisor(), protocol="sometimes")


def test_a_guard_for_a_tool_that_is_not_there(bot: Callable[..., Bot]) -> None:
    one = bot(["Paris"], protocol="guarded:refnud")
    with pytest.raises(ConfigError, match="no tool 'refnud' to guard; the tools are search, refund"):
        one.agent.run_sync("Where?")
    assert one.upstream.requests == []


def test_without_pydantic_ai_one_line_says_what_to_install() -> None:
    program = "import sys; sys.modules['pydantic_ai'] = None\nimport caddie_sdk.shells.pydantic_ai"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "pip install 'caddie-sdk[pydantic-ai]'" in ran.stderr
