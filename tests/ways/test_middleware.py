"""`CriticMiddleware` in agents of `create_agent`, with a real chat model against a scripted server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelRetryMiddleware,
    SummarizationMiddleware,
    ToolRetryMiddleware,
    dynamic_prompt,
    wrap_model_call,
)
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import BaseModel
from upstream import Scripted, Upstream, failure

from caddie_sdk import Budget, CriticMiddleware, Critique, Guarded, Session
from caddie_sdk.critic import ConsultState
from caddie_sdk.errors import ConfigError, ConsultationError
from caddie_sdk.testing import ScriptedCritic, calls, tool_call

Upstreams = Callable[..., Upstream]
WAYS = ["invoke", "ainvoke", "stream", "astream"]
ASK, CRITIC = {"messages": [("user", "Where was Ada born?")]}, tool_call("call_critic")
THREAD: Any = {"configurable": {"thread_id": "1"}}


@tool
def search(query: str) -> str:
    """Search the archive."""
    return f"found: {query}"


@tool
def refund(order: str) -> str:
    """Pay an order back."""
    PAID.append(order)
    return f"refunded {order}"


PAID: list[str] = []


@pytest.fixture(autouse=True)
def nothing_paid() -> None:
    PAID.clear()


def look(query: str = "Ada", id: str = "") -> dict[str, Any]:
    return tool_call("search", {"query": query}, id)


def pay(id: str = "") -> dict[str, Any]:
    return tool_call("refund", {"order": "7"}, id)


def advisor() -> ScriptedCritic:
    return ScriptedCritic(lambda state: (f"step {state.step}, {state.trigger}", f"{state.remaining} left"))


class Bot:
    """An agent, its server and its critic."""

    def __init__(self, upstream: Upstream, critic: Any = None, **settings: Any) -> None:
        self.upstream, self.critic = upstream, critic or advisor()
        ours = ("protocol", "budget", "on_error", "seed", "feedback")
        self.middleware = CriticMiddleware(self.critic, **{k: settings.pop(k) for k in ours if k in settings})
        before, after = settings.pop("before", []), settings.pop("after", [])
        self.model = ChatOpenAI(
            base_url=upstream.url, api_key="k", model="m", max_retries=0, streaming=settings.pop("streaming", False)
        )
        self.agent: Any = create_agent(
            self.model,
            settings.pop("tools", [search, refund]),
            middleware=[*before, self.middleware, *after],
            **{"checkpointer": InMemorySaver(), **settings},
        )

    def say(self, said: Any = ASK, thread: Any = None) -> list[Any]:
        said = {"messages": [("user", said)]} if isinstance(said, str) else said
        return self.agent.invoke(said, thread or THREAD)["messages"]  # type: ignore[no-any-return]

    def session(self, thread: Any = None) -> Session:
        return Session.load(self.agent.get_state(thread or THREAD).values["caddie"]["session"])

    def offered(self) -> list[bool]:
        return ["call_critic" in [t["function"]["name"] for t in r.body["tools"]] for r in self.upstream.requests]


@pytest.fixture
def bot(upstreams: Upstreams) -> Callable[..., Bot]:
    return lambda script, critic=None, **settings: Bot(upstreams(script, strict=True), critic, **settings)


def sketch(messages: list[Any]) -> list[Any]:
    """Who said what, in short."""
    told = []
    for message in messages:
        if isinstance(message, ToolMessage):
            told.append((message.name, str(message.content).split("\n")[0]))
        elif isinstance(message, AIMessage) and message.tool_calls:
            told.append([call["name"] for call in message.tool_calls])
        else:
            told.append(message.text)
    return told


ADVICE = ("call_critic", "Critic feedback:")
HELD = ("refund", "Not run yet: read the critic's advice first, then decide.")


# ---------------------------------------------------------------------- what it does


@pytest.mark.parametrize("way", WAYS)
def test_a_mixed_turn(bot: Callable[..., Bot], way: str) -> None:
    """Advice first, the other tools in the same turn, results on the wire in the order of the calls."""
    script = [calls(look("a", "c1"), tool_call("call_critic", id="c2"), look("b", "c3")), "Paris"]
    one = bot(script, streaming="stream" in way)

    async def last() -> Any:
        return [state async for state in one.agent.astream(ASK, THREAD, stream_mode="values")][-1]

    if way == "invoke":
        state = one.agent.invoke(ASK, THREAD)
    elif way == "stream":
        state = list(one.agent.stream(ASK, THREAD, stream_mode="values"))[-1]
    else:
        state = asyncio.run(one.agent.ainvoke(ASK, THREAD) if way == "ainvoke" else last())
    assert sketch(state["messages"]) == [
        "Where was Ada born?",
        ["search", "call_critic", "search"],
        ADVICE,
        ("search", "found: a"),
        ("search", "found: b"),
        "Paris",
    ]
    advice = state["messages"][2]
    assert advice.content == (
        "Critic feedback:\nAnalysis: step 0, self-call\nAdvices for next steps: 2 left\n\nConsultations left: 2."
    )
    critique = Critique.load(advice.artifact)
    assert (critique.status, critique.analysis, critique.advice) == ("ok", "step 0, self-call", "2 left")
    sent = one.upstream.requests[1].body["messages"]
    assert [message.get("tool_call_id") for message in sent[2:]] == ["c1", "c2", "c3"]
    assert ("caddie" in state) == ("stream" in way)  # streams of values show all of the state
    assert one.session().answer == "Paris"


def test_the_control_tool_goes_when_the_budget_is_used_up(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC), calls(CRITIC), calls(CRITIC), "Paris", "Lyon"], budget=Budget(max_uses=2))
    messages = one.say()
    assert [m.content.split("\n")[-1] for m in messages if isinstance(m, ToolMessage)] == [
        "Consultations left: 1.",
        "No consultations are left. Only an action or an answer is possible.",
        "No consultations are left.",
    ]
    assert len(one.critic.seen) == 2
    one.say("And Bob?")
    assert one.offered() == [True, True, False, False, True]  # a new user turn has a budget of its own


def test_guarded_calls_wait_for_advice(bot: Callable[..., Bot]) -> None:
    one = bot([calls(pay()), calls(pay()), "Done"], protocol=Guarded(irreversible=("refund",)))
    assert sketch(one.say()) == [
        "Where was Ada born?", ["refund"], HELD, ["call_critic"], ADVICE, ["refund"], ("refund", "refunded 7"), "Done",
    ]  # fmt: skip
    assert PAID == ["7"]
    assert [state.trigger for state in one.critic.seen] == ["guarded"]


def test_a_guarded_call_beside_others(bot: Callable[..., Bot]) -> None:
    """The others run in the same turn; the advice comes after their results."""
    one = bot([calls(look("a"), pay(), look("b")), calls(pay()), "Done"], protocol="guarded:refund")
    assert sketch(one.say()) == [
        "Where was Ada born?", ["search", "refund", "search"], HELD, ("search", "found: a"), ("search", "found: b"),
        ["call_critic"], ADVICE, ["refund"], ("refund", "refunded 7"), "Done",
    ]  # fmt: skip
    assert PAID == ["7"]


def test_repeats_bring_the_critic(bot: Callable[..., Bot]) -> None:
    one = bot([calls(look())] * 3 + ["Paris"], protocol=Guarded(repeats=2, self_call=False))
    told = sketch(one.say())
    assert told[5:7] == [["call_critic"], ADVICE]
    assert [state.step for state in one.critic.seen] == [2, 3]
    assert one.offered() == [False] * 4


@pytest.mark.parametrize(
    ("protocol", "steps"),
    [("fixed:0", [0]), ("fixed:1,2", [1, 2]), ("windowed:1-1", [1]), ("probabilistic:1", [0, 1, 2])],
)
def test_a_protocol_brings_the_critic(bot: Callable[..., Bot], protocol: str, steps: list[int]) -> None:
    one = bot([calls(look()), calls(look("b")), "Paris"], protocol=protocol)
    messages = one.say()
    assert [state.step for state in one.critic.seen] == steps
    assert sketch(messages).count(ADVICE) == len(steps)
    assert messages[-1].text == "Paris"


def test_two_critics(bot: Callable[..., Bot]) -> None:
    feedback = ScriptedCritic([("", "think again")])
    one = bot([calls(CRITIC, tool_call("request_feedback")), "Paris"], feedback=feedback)
    assert [name for name, _ in sketch(one.say())[2:4]] == ["call_critic", "request_feedback"]
    assert (len(one.critic.seen), len(feedback.seen)) == (1, 1)


def test_an_agent_without_tools_comes_back_after_advice(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC), "Paris"], tools=[])
    assert sketch(one.say()) == ["Where was Ada born?", ["call_critic"], ADVICE, "Paris"]


def test_an_agent_that_only_asks_comes_to_an_end(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC)] * 4, budget=Budget(max_uses=1, max_rejections=2))
    assert one.say()[-1].text == "No consultations are left."
    assert one.session().reason == "stuck"
    assert len(one.critic.seen) == 1


def test_when_to_end_is_for_langchain_to_say(bot: Callable[..., Bot]) -> None:
    one = bot([calls(look()), calls(look("b")), "Paris"], budget=Budget(max_steps=1))
    assert one.say()[-1].text == "Paris"
    one = bot(["Paris"], budget=Budget(min_steps=3))
    assert sketch(one.say()) == ["Where was Ada born?", "Paris"]


def test_the_critic_reads_what_the_agent_reads(bot: Callable[..., Bot]) -> None:
    one = bot([calls(look()), calls(CRITIC), "Paris"], system_prompt="Be careful.")
    one.say()
    (state,) = one.critic.seen
    assert state.system == "Be careful."
    assert [event.kind for event in state.events] == ["task", "step", "proposal"]
    assert {schema["function"]["name"] for schema in state.tools} == {"search", "refund"}


def test_a_system_message_in_the_thread_is_the_systems(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC), "Paris"])
    one.say({"messages": [("system", "Be brief."), ("user", "Where?")]})
    assert one.critic.seen[0].system == "Be brief."


def test_a_prompt_that_changes(bot: Callable[..., Bot]) -> None:
    """The critic is told the present one."""
    number = iter(range(9))

    @dynamic_prompt
    def prompt(request: Any) -> str:
        return f"Prompt {next(number)}"

    one = bot([calls(look()), calls(CRITIC), "Paris"], before=[prompt])
    one.say()
    assert one.critic.seen[0].system == "Prompt 1"
    assert one.session().step == 1


def test_consultations_are_told_to_whoever_streams(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC), "Paris"])
    (event,) = one.agent.stream(ASK, THREAD, stream_mode="custom")
    assert (event["event"], event["control"], event["critique"]["status"]) == ("consultation", "call_critic", "ok")


def test_tokens_are_streamed(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC), "Paris it is, and nothing else"], streaming=True)
    pieces = [piece for piece, _ in one.agent.stream(ASK, THREAD, stream_mode="messages")]
    texts = [piece.text for piece in pieces if piece.type == "AIMessageChunk" and piece.text]
    assert len(texts) > 3
    assert "".join(texts) == "Paris it is, and nothing else"
    assert [piece.name for piece in pieces if isinstance(piece, ToolMessage)] == ["call_critic"]


def test_usage_adds_up(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC), "Paris"])
    one.say()
    assert (one.session().usage.prompt_tokens, one.session().usage.calls) == (200, 2)


# ---------------------------------------------------------------------- what models get wrong


def test_ids_that_are_missing_or_used_twice(bot: Callable[..., Bot], upstreams: Upstreams) -> None:
    odd = [
        Scripted(calls(look("a", "x"), {**CRITIC, "id": "x"}, look("b", "y")), keep_ids=True),
        Scripted(calls(look("c", "x"), look("d", "y")), keep_ids=True),
        "Paris",
    ]
    one = bot(odd)
    messages = one.say()
    ids = [call["id"] for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]
    assert len(set(ids)) == len(ids) == 5
    assert sorted(ids) == sorted(message.tool_call_id for message in messages if isinstance(message, ToolMessage))
    one.upstream.raise_if_unused()


def test_broken_arguments_of_the_control_tool_are_none(bot: Callable[..., Bot]) -> None:
    one = bot([calls(tool_call("call_critic", '{"question": "wh')), "Paris"])
    assert sketch(one.say()) == ["Where was Ada born?", ["call_critic"], ADVICE, "Paris"]


def test_broken_arguments_beside_the_control_tool(bot: Callable[..., Bot]) -> None:
    """LangChain answers what it could not parse, in the next model call; the session hears of it."""
    one = bot([calls(tool_call("search", '{"query": "A', "a"), CRITIC), calls(CRITIC), "Paris"])
    messages = one.say()
    assert messages[-1].text == "Paris"
    assert "malformed or truncated" in str([message.content for message in messages])
    assert one.session().step == 1
    assert [state.step for state in one.critic.seen] == [0, 1]


# ---------------------------------------------------------------------- when the critic fails


class Slow:
    def critique(self, state: ConsultState) -> Critique:
        time.sleep(20)
        return Critique("late", "late")

    async def acritique(self, state: ConsultState) -> Critique:
        await asyncio.sleep(20)
        return Critique("late", "late")


FAILING = {
    "unavailable": lambda: ScriptedCritic(lambda state: Critique(status="unavailable", detail="down")),
    "failed": lambda: ScriptedCritic(lambda state: RuntimeError("a bug")),
    "timeout": Slow,
}


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
@pytest.mark.parametrize("status", FAILING)
def test_a_critic_that_fails_stops_nobody(bot: Callable[..., Bot], status: str, how: str) -> None:
    one = bot(
        [calls(pay()), calls(pay()), "Done"], FAILING[status](), protocol="guarded:refund", budget=Budget(timeout=0.1)
    )
    started = time.monotonic()
    state = one.agent.invoke(ASK, THREAD) if how == "invoke" else asyncio.run(one.agent.ainvoke(ASK, THREAD))
    assert time.monotonic() - started < 10
    (advice,) = [message for message in state["messages"] if getattr(message, "name", "") == "call_critic"]
    assert f"none this time ({status})" in advice.content
    assert advice.artifact["status"] == status
    assert PAID == ["7"]


def test_a_failed_consultation_raises_when_asked_to(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC)], FAILING["unavailable"](), on_error="raise")
    with pytest.raises(ConsultationError, match="unavailable"):
        one.say()


def test_a_consultation_is_kept_when_the_model_fails_after_it(bot: Callable[..., Bot]) -> None:
    one = bot([failure(500), "Paris"], protocol="fixed:0")
    with pytest.raises(Exception, match="scripted failure"):
        one.say()
    assert one.agent.invoke(None, THREAD)["messages"][-1].text == "Paris"
    assert len(one.critic.seen) == 1


# ---------------------------------------------------------------------- threads


def test_a_thread_goes_on_in_another_process(tmp_path: Path, upstreams: Upstreams) -> None:
    upstream = upstreams([calls(look()), calls(CRITIC), "Paris", calls(CRITIC), "Lyon"], strict=True)
    program = """
import sys
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.sqlite import SqliteSaver
from caddie_sdk import Budget, CriticMiddleware, Session
from caddie_sdk.testing import ScriptedCritic

@tool
def search(query: str) -> str:
    "Search."
    return "found"

critic = ScriptedCritic([("Fine.", "Go on.")])
with SqliteSaver.from_conn_string(sys.argv[1]) as saver:
    agent = create_agent(
        ChatOpenAI(base_url=sys.argv[2], api_key="k", model="m", max_retries=0), [search], checkpointer=saver,
        middleware=[CriticMiddleware(critic, budget=Budget(session_max_uses=2))],
    )
    thread = {"configurable": {"thread_id": "1"}}
    said = {"messages": [("user", sys.argv[3])]}
    print(agent.invoke(said, thread)["messages"][-1].text)
    session = Session.load(agent.get_state(thread).values["caddie"]["session"])
    print(session.trajectory, session.session_uses, session.remaining, [e.kind for e in critic.seen[0].events])
"""
    told = []
    for question in ("Where was Ada born?", "And Bob?"):
        command = [sys.executable, "-c", program, str(tmp_path / "threads.db"), upstream.url, question]
        told.append(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines())
    assert told[0] == ["Paris", "0 1 1 ['task', 'step', 'proposal']"]
    assert told[1] == ["Lyon", "1 2 0 ['task', 'step', 'proposal', 'advice', 'answer', 'user', 'proposal']"]


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_many_threads_at_once(upstreams: Upstreams, how: str) -> None:
    """Nothing of one conversation shows in another."""

    def script(body: dict[str, Any]) -> Any:
        name = body["messages"][0]["content"]
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if len(results) == 0:
            return calls(look(f"{name}-1"), CRITIC, look(f"{name}-2"))
        assert len(results) == 3
        assert f"found: {name}-1" in results[0]
        assert f"about {name}" in results[1]
        return f"answer {name}"

    critic = ScriptedCritic(lambda state: (f"about {state.events[0].text}", "go on"))
    one = Bot(upstreams(script, strict=True), critic)
    names = [f"n{number}" for number in range(24)]
    found: dict[str, str] = {}

    def ask(name: str) -> None:
        found[name] = one.say(name, {"configurable": {"thread_id": name}})[-1].text

    async def all_at_once() -> None:
        threads: list[Any] = [{"configurable": {"thread_id": name}} for name in names]
        said: list[Any] = [{"messages": [("user", name)]} for name in names]
        states = await asyncio.gather(*(one.agent.ainvoke(*pair) for pair in zip(said, threads, strict=True)))
        found.update({name: state["messages"][-1].text for name, state in zip(names, states, strict=True)})

    if how == "threads":
        workers = [threading.Thread(target=ask, args=(name,)) for name in names]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
    else:
        asyncio.run(all_at_once())
    assert found == {name: f"answer {name}" for name in names}


def test_without_a_checkpointer_the_history_is_read_anew(bot: Callable[..., Bot]) -> None:
    """The caller keeps the messages; consultations in them count, by their artifacts."""
    one = bot([calls(CRITIC), "Paris", calls(CRITIC), "Lyon"], checkpointer=None, budget=Budget(session_max_uses=2))
    messages = one.agent.invoke(ASK)["messages"]
    messages = one.agent.invoke({"messages": [*messages, ("user", "And Bob?")]})["messages"]
    assert messages[-1].text == "Lyon"
    kinds = [event.kind for event in one.critic.seen[1].events]
    assert kinds == ["task", "proposal", "advice", "answer", "user", "proposal"]
    assert messages[-2].content.endswith("No consultations are left. Only an action or an answer is possible.")


# ---------------------------------------------------------------------- histories that others change


class Shorten(AgentMiddleware[Any, Any, Any]):
    """Cuts the thread before each model call, down to the task and the last turn."""

    def before_model(self, state: Any, runtime: Any) -> Any:
        turns = [at for at, message in enumerate(state["messages"]) if isinstance(message, AIMessage)]
        return {"messages": [RemoveMessage(m.id) for m in state["messages"][1 : turns[-1]]]} if turns else None


def test_a_shortened_thread_keeps_its_counts(bot: Callable[..., Bot]) -> None:
    script = [calls(CRITIC), calls(look("a")), calls(CRITIC), calls(look("b")), calls(look("c")), "Paris"]
    one = bot(script, budget=Budget(max_uses=2), before=[Shorten()])
    assert one.say()[-1].text == "Paris"
    assert one.offered() == [True, True, True, False, False, False]
    assert [state.step for state in one.critic.seen] == [0, 1]
    assert (one.session().step, one.session().uses) == (3, 2)
    assert len(one.session().transcript()) < 6  # the critic's view is as short as the agent's


def test_a_schedule_holds_in_a_shortened_thread(bot: Callable[..., Bot]) -> None:
    one = bot([calls(look(str(n))) for n in range(5)] + ["Paris"], protocol="fixed:1,3", before=[Shorten()])
    one.say()
    assert [state.step for state in one.critic.seen] == [1, 3]


def test_a_guard_holds_in_a_shortened_thread(bot: Callable[..., Bot]) -> None:
    script = [calls(look("a"), pay()), calls(pay()), calls(pay()), "Done"]
    one = bot(script, protocol="guarded:refund", before=[Shorten()])
    assert one.say()[-1].text == "Done"
    assert PAID == ["7"]  # held, run, and held again, because a step was taken since the advice
    assert [state.step for state in one.critic.seen] == [0, 2]


def test_advice_that_an_edit_swallowed_frees_no_guarded_call(bot: Callable[..., Bot]) -> None:
    """The advice waits for the tools of its turn; the thread is edited then, before anybody could read it."""

    class Redact(AgentMiddleware[Any, Any, Any]):
        def before_model(self, state: Any, runtime: Any) -> Any:
            first, last = state["messages"][0], state["messages"][-1]
            return {"messages": [HumanMessage("***", id=first.id)]} if last.text == "found: a" else None

    script = [calls(look("a"), pay()), calls(pay()), calls(pay()), "Done"]
    one = bot(script, protocol="guarded:refund", before=[Redact()])
    told = sketch(one.say())
    assert told.count(HELD) == 2
    assert told.index(ADVICE) < told.index(("refund", "refunded 7"))
    assert PAID == ["7"]


def test_summaries(upstreams: Upstreams) -> None:
    replies = iter([calls(CRITIC), calls(look("a")), calls(look("b")), "Paris"])

    def script(body: dict[str, Any]) -> Any:
        return next(replies) if body.get("tools") else "It was all about Ada."

    upstream = upstreams(script, strict=True)
    model = ChatOpenAI(base_url=upstream.url, api_key="k", model="m", max_retries=0)
    summary = SummarizationMiddleware(model, trigger=("messages", 5), keep=("messages", 2))
    one = Bot(upstream, budget=Budget(max_uses=1), before=[summary])
    messages = one.say()
    assert "It was all about Ada." in messages[0].text
    assert messages[-1].text == "Paris"
    assert len(one.critic.seen) == 1
    asked = [request.body for request in upstream.requests if request.body.get("tools")]
    names = [[tool["function"]["name"] for tool in body["tools"]] for body in asked]
    assert ["call_critic" in offered for offered in names] == [True, False, False, False]
    assert (one.session().step, one.session().uses) == (2, 1)


def test_an_edited_thread_is_read_anew(bot: Callable[..., Bot]) -> None:
    one = bot([calls(look("a")), "Paris", calls(CRITIC), "Lyon"])
    messages = one.say()
    edited = messages[2].model_copy(update={"content": "found: a very different thing"})
    one.agent.update_state(THREAD, {"messages": [edited]})
    one.say("And Bob?")
    assert "a very different thing" in str(one.critic.seen[0].events)
    assert "found: a'" not in str(one.critic.seen[0].events)


def test_a_thread_left_in_the_middle_of_a_turn(upstreams: Upstreams, caplog: pytest.LogCaptureFixture) -> None:
    """A call that was never answered: the last user turn is all that can be told, and it is."""
    one = Bot(upstreams([calls(CRITIC), "Paris"]))
    broken = [HumanMessage("Where?"), AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "a"}])]
    messages = one.say({"messages": [*broken, HumanMessage("And Bob?")]})
    assert messages[-1].text == "Paris"
    assert [event.text for event in one.critic.seen[0].events] == ["And Bob?", ""]
    assert not caplog.records


def test_messages_without_a_reading_pass_as_they_are(upstreams: Upstreams, caplog: pytest.LogCaptureFixture) -> None:
    one = Bot(upstreams(["Paris", calls(CRITIC), "Lyon"]), protocol="fixed:0")
    messages = one.say({"messages": [HumanMessage("Where?"), AIMessage("Somewhere.")]})
    assert messages[-1].text == "Paris"
    assert "no reading as a trajectory" in caplog.text
    assert one.critic.seen == []
    assert one.say("And Bob?")[-1].text == "Lyon"
    assert len(one.critic.seen) == 1


def test_a_session_of_another_version_is_read_anew(bot: Callable[..., Bot], caplog: pytest.LogCaptureFixture) -> None:
    one = bot([calls(look()), "Paris", calls(CRITIC), "Lyon"])
    one.say()
    one.agent.update_state(THREAD, {"caddie": {"session": {"version": 0}, "count": 0, "digest": "", "last": ""}})
    assert one.say("And Bob?")[-1].text == "Lyon"
    assert "read anew from its messages: not a session dump of version" in caplog.text
    assert [event.kind for event in one.critic.seen[0].events] == ["task", "step", "answer", "user", "proposal"]


# ---------------------------------------------------------------------- beside other middleware


def hitl(**decisions: Any) -> HumanInTheLoopMiddleware[Any, Any, Any]:
    return HumanInTheLoopMiddleware({"refund": True}, **decisions)


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_human_is_asked_after_the_critic(bot: Callable[..., Bot], place: str) -> None:
    script = [calls(look("a"), pay()), calls(pay()), "Done"]
    one = bot(script, protocol="guarded:refund", **{place: [hitl(interrupt_mode="per_call")]})
    paused = one.agent.invoke(ASK, THREAD)
    (question,) = paused["__interrupt__"]
    assert question.value["name"] == "refund"
    assert sketch(paused["messages"])[-2:] == [ADVICE, ["refund"]]
    assert PAID == []
    done = one.agent.invoke(Command(resume={"type": "approve"}), THREAD)
    assert done["messages"][-1].text == "Done"
    assert PAID == ["7"]
    assert len(one.critic.seen) == 1
    assert one.session().step == 2


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("decision", ["approve", "edit", "reject"])
def test_a_human_who_decides_on_a_whole_turn(bot: Callable[..., Bot], place: str, decision: str) -> None:
    one = bot([calls(CRITIC, pay(), look("a")), "Done", calls(CRITIC), "Bye"], **{place: [hitl()]})
    paused = one.agent.invoke(ASK, THREAD)
    assert [request["name"] for request in paused["__interrupt__"][0].value["action_requests"]] == ["refund"]
    answer: dict[str, Any] = {"type": decision}
    if decision == "edit":
        answer["edited_action"] = {"name": "refund", "args": {"order": "8"}}
    done = one.agent.invoke(Command(resume={"decisions": [answer]}), THREAD)
    assert done["messages"][-1].text == "Done"
    assert {"approve": ["7"], "edit": ["8"], "reject": []}[decision] == PAID
    assert one.say("And now?")[-1].text == "Bye"
    told = str(one.critic.seen[1].events)
    assert {"approve": "refunded 7", "edit": "refunded 8", "reject": "rejected"}[decision] in told
    assert (one.session().trajectory, one.session().session_uses) == (1, 2)


def test_tools_that_are_tried_again(bot: Callable[..., Bot]) -> None:
    tries = iter([True, False])

    @tool
    def shaky(query: str) -> str:
        """Fails once."""
        if next(tries):
            raise OSError("try again")
        return "found"

    retry = ToolRetryMiddleware(max_retries=2, initial_delay=0, jitter=False)
    one = bot([calls(tool_call("shaky", {"query": "a"}), CRITIC), "Paris"], tools=[shaky], after=[retry])
    assert sketch(one.say())[2:4] == [ADVICE, ("shaky", "found")]


def test_model_calls_that_are_tried_again_ask_the_critic_once(bot: Callable[..., Bot]) -> None:
    retry = ModelRetryMiddleware(max_retries=3, initial_delay=0, jitter=False)
    script = [failure(500), calls(look()), failure(500), failure(500), "Paris"]
    one = bot(script, protocol="fixed:0,1", before=[retry])
    assert one.say()[-1].text == "Paris"
    assert len(one.critic.seen) == 2
    assert one.session().step == 1


class Town(BaseModel):
    """Where somebody was born."""

    name: str


def test_structured_answers(bot: Callable[..., Bot]) -> None:
    town = calls(tool_call("Town", {"name": "Paris"}))
    one = bot([calls(CRITIC), town, calls(CRITIC), town], response_format=ToolStrategy(Town), budget=Budget(max_uses=1))
    for trajectory in (0, 1):
        state = one.agent.invoke(ASK, THREAD)
        assert state["structured_response"] == Town(name="Paris")
        assert (one.session().trajectory, one.session().phase) == (trajectory, "done")
    assert len(one.critic.seen) == 2


def test_tools_that_an_outer_middleware_copies(bot: Callable[..., Bot]) -> None:
    @wrap_model_call
    def copies(request: Any, handler: Any) -> Any:
        return handler(request.override(tools=[one.model_copy() for one in request.tools]))

    one = bot([calls(CRITIC), "Paris"], before=[copies])
    assert sketch(one.say()) == ["Where was Ada born?", ["call_critic"], ADVICE, "Paris"]
    assert [tool["function"]["name"] for tool in one.upstream.requests[0].body["tools"]] == [
        "search", "refund", "call_critic",
    ]  # fmt: skip


@pytest.mark.parametrize("kept", [True, False])
def test_a_tool_whose_result_is_the_answer(bot: Callable[..., Bot], kept: bool) -> None:
    """The user turn after it has consultations of its own."""

    @tool(return_direct=True)
    def final(name: str) -> str:
        """Answer."""
        return name

    end = calls(tool_call("final", {"name": "Paris"}))
    saver = InMemorySaver() if kept else None
    one = bot([calls(CRITIC), end] * 2, tools=[final], budget=Budget(max_uses=1), checkpointer=saver)
    first = one.agent.invoke(ASK, THREAD)["messages"]
    said = [("user", "And Bob?")] if kept else [*first, ("user", "And Bob?")]
    assert one.agent.invoke({"messages": said}, THREAD)["messages"][-1].text == "Paris"
    assert one.offered() == [True, False, True, False]
    assert [state.remaining for state in one.critic.seen] == [0, 0]


def test_two_user_messages_are_one_turn(bot: Callable[..., Bot]) -> None:
    one = bot([calls(CRITIC), "Paris"])
    one.say({"messages": [("user", "Where was Ada born?"), ("user", "Be exact.")]})
    assert one.session().trajectory == 0
    assert one.session().turn is None


def test_what_an_inner_middleware_makes_of_a_reply_counts(bot: Callable[..., Bot]) -> None:
    @wrap_model_call
    def shout(request: Any, handler: Any) -> Any:
        answer = handler(request).result[0]
        return answer.model_copy(update={"content": answer.text.upper()})

    one = bot([calls(CRITIC), "Paris"], after=[shout])
    assert one.say()[-1].text == "PARIS"
    assert one.session().answer == "PARIS"


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"critic": None}, "needs a critic"),
        ({"critic": ScriptedCritic}, "must have critique"),
        ({"critic": "http://here"}, "must have critique"),
        ({"protocol": "sometimes"}, "unknown intervention protocol"),
        ({"on_error": "ignore"}, "on_error must be"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        CriticMiddleware(settings.pop("critic", advisor()), **settings)


def test_a_guard_for_a_tool_that_is_not_there(bot: Callable[..., Bot]) -> None:
    one = bot(["Paris"], protocol="guarded:refnud")
    with pytest.raises(ConfigError, match="no tool 'refnud' to guard; the tools are search, refund"):
        one.say()
    assert one.upstream.requests == []


def test_a_tool_with_the_name_of_the_control_tool(bot: Callable[..., Bot]) -> None:
    @tool
    def call_critic() -> str:
        """Somebody else's."""
        return "boo"

    with pytest.raises(ConfigError, match="'call_critic', which is the name of a control tool"):
        bot(["Paris"], tools=[call_critic]).say()


def test_without_langchain_one_line_says_what_to_install() -> None:
    program = "import sys; sys.modules['langchain'] = None\nfrom caddie_sdk import CriticMiddleware"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert "MissingExtra: CriticMiddleware needs a package" in ran.stderr
    assert "pip install 'caddie-sdk[langchain]'" in ran.stderr
