"""Settings of `create_caddie_agent`: models of every kind, and one clear error for each wrong setting."""

from __future__ import annotations

from typing import Any

import pytest
from graph_kit import WAYS, FakeChat, Invoke, contents, critic, look, search
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionMessage
from scripted_server import scripted_server

from caddie_sdk import Budget, CallModel, ChatEndpoint, Reply, Tool, Usage, create_caddie_agent
from caddie_sdk.errors import ConfigError, ContextOverflow, EndpointRefused, EndpointUnavailable
from caddie_sdk.testing import ScriptedCritic, ScriptedModel, calls, check_wire, tool_call


@pytest.fixture(params=WAYS)
def invoke(request: pytest.FixtureRequest) -> Invoke:
    return WAYS[request.param]


SCRIPT = [calls(tool_call("search", {"query": "Ada"}), tool_call("call_critic")), look("Bob"), "Paris"]
TOLD = ["found: Ada", "Critic feedback:\nAnalysis: analysis at 0\nAdvices for next steps: advice at 0"]


def check_told(output: dict[str, Any]) -> None:
    assert output["answer"] == "Paris"
    first, second, third = contents(output, "tool")
    assert first == TOLD[0]
    assert second.startswith(TOLD[1])
    assert third == "found: Bob"


# ------------------------------------------------------------------ models


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_model_by_name_and_url(suffix: str, invoke: Invoke) -> None:
    with scripted_server(SCRIPT) as server:
        agent = create_caddie_agent(
            "small-model", [search], base_url=server.url + suffix, api_key="sk-1", critic=critic(), system="Careful."
        )
        output = invoke(agent, {"messages": "Where?"}, {})
    check_told(output)
    assert output["usage"]["agent"] == {"prompt_tokens": 33, "completion_tokens": 9, "cached_tokens": 12, "calls": 3}
    assert server.keys == ["Bearer sk-1"] * 3
    for request in server.requests:
        check_wire(request["messages"])
        assert request["model"] == "small-model"
        assert [tool["function"]["name"] for tool in request["tools"]] == ["search", "call_critic"]
        assert "tool_choice" not in request
    assert [message["role"] for message in server.requests[0]["messages"]] == ["system", "user"]


def test_endpoint_as_model(invoke: Invoke) -> None:
    with scripted_server(SCRIPT) as server:
        model = ChatEndpoint(server.url, "m", params={"temperature": 0.5, "seed": 3})
        output = invoke(create_caddie_agent(model, [search], critic=critic()), {"messages": "Where?"}, {})
    check_told(output)
    assert {(request["temperature"], request["seed"]) for request in server.requests} == {(0.5, 3)}


def test_langchain_openai_as_model(invoke: Invoke) -> None:
    with scripted_server([*SCRIPT[:2], look("Cleo"), "Paris"]) as server:
        model = ChatOpenAI(model="m", base_url=server.url + "/v1", api_key="sk-1", temperature=0.5, max_retries=0)
        agent = create_caddie_agent(model, [search], critic=critic(), budget=Budget(max_steps=3))
        output = invoke(agent, {"messages": "Where?"}, {})
    assert (output["answer"], output["reason"]) == ("Paris", "max_steps")
    assert contents(output, "tool")[0] == "found: Ada"
    assert output["usage"]["agent"] == {"prompt_tokens": 44, "completion_tokens": 12, "cached_tokens": 16, "calls": 4}
    for request in server.requests:
        check_wire(request["messages"])
        assert request["temperature"] == 0.5
    # At the step limit no tool may be called any more.
    assert [request.get("tool_choice") for request in server.requests] == [None, None, None, "none"]
    ids = [call["id"] for message in output["messages"] for call in message.get("tool_calls", ())]
    assert ids[:2] == ["server_0", "server_1"]


def test_langchain_model_answers_in_blocks(invoke: Invoke) -> None:
    """Reasoning models answer in content blocks; what they thought or called is not what they said."""
    blocks = [
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "text", "text": "let me look"},
        {"type": "tool_use", "id": "x", "name": "search", "input": {"query": "Ada"}},
    ]
    call = {"id": "x", "name": "search", "args": {"query": "Ada"}}
    answer = [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "Par"}, {"type": "text", "text": "is"}]
    model = FakeChat(script=[AIMessage(blocks, tool_calls=[call]), AIMessage(answer)])
    output = invoke(create_caddie_agent(model, [search]), {"messages": "Where?"}, {})
    assert output["answer"] == "Paris"
    assert contents(output, "assistant") == ["let me look", "Paris"]
    assert contents(output, "tool") == ["found: Ada"]


def test_langchain_model_whose_context_is_full(invoke: Invoke) -> None:
    model = FakeChat(script=[ContextOverflowError("too long"), "Lyon"])
    output = invoke(create_caddie_agent(model, [search]), {"messages": "Where?"}, {})
    assert (output["answer"], output["reason"]) == (None, "context_overflow")


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (400, {"message": "This model's maximum context length is 8 tokens", "code": "context_length_exceeded"}, None),
        (400, {"message": "request (9 tokens) exceeds the available context size (8 tokens)"}, None),
        (401, {"message": "bad key sk-1"}, EndpointRefused),
        (500, {"message": "broken"}, EndpointUnavailable),
    ],
)
def test_errors_of_langchain_openai_are_ours(status: int, error: Any, expected: Any, invoke: Invoke) -> None:
    with scripted_server([(status, {"error": error})]) as server:
        model = ChatOpenAI(model="m", base_url=server.url + "/v1", api_key="sk-1", max_retries=0)
        agent = create_caddie_agent(model, [search])
        if expected is None:
            assert invoke(agent, {"messages": "Where?"}, {})["reason"] == "context_overflow"
            return
        with pytest.raises(expected, match=server.url) as caught:
            invoke(agent, {"messages": "Where?"}, {})
        assert "sk-1" not in str(caught.value)


def test_error_of_a_langchain_model_passes_through(invoke: Invoke) -> None:
    model = FakeChat(script=[KeyError("its own bug")])
    with pytest.raises(KeyError, match="its own bug"):
        invoke(create_caddie_agent(model), {"messages": "Where?"}, {})


def test_langchain_model_in_a_text_format(invoke: Invoke) -> None:
    model = FakeChat(script=["<reason>r</reason><search>Ada</search>", "<reason>r</reason><answer>Paris</answer>"])
    output = invoke(create_caddie_agent(model, [search], action_format="caddie"), {"messages": "Where?"}, {})
    assert output["answer"] == "Paris"
    assert model.asked == [{}, {}]  # no tools are bound: the format writes them as text


def test_langchain_model_must_answer_with_a_call_while_no_answer_is_accepted(invoke: Invoke) -> None:
    call = AIMessage("", tool_calls=[{"id": "x", "name": "search", "args": {"query": "Ada"}}])
    model = FakeChat(script=[call, "Paris"])
    agent = create_caddie_agent(model, [search], budget=Budget(min_steps=1))
    assert invoke(agent, {"messages": "Where?"}, {})["answer"] == "Paris"
    assert [asked.get("tool_choice") for asked in model.asked] == ["required", None]


class OwnModel:
    """A user's own `ChatModel`, answering with the openai client's types."""

    def __init__(self) -> None:
        search_call = {"id": "x", "type": "function", "function": {"name": "search", "arguments": '{"query": "Ada"}'}}
        self.replies: list[Any] = [
            ChatCompletionMessage(role="assistant", content=None, tool_calls=[search_call]),
            ChatCompletionMessage(role="assistant", content="Paris"),
        ]

    def complete(self, call: CallModel) -> Reply:
        return Reply(self.replies.pop(0), Usage(1, 2, 0, 1))

    async def acomplete(self, call: CallModel) -> Reply:
        return self.complete(call)


def test_own_chat_model_with_openai_types(invoke: Invoke) -> None:
    output = invoke(create_caddie_agent(OwnModel(), [search]), {"messages": "Where?"}, {})
    assert output["answer"] == "Paris"
    assert output["messages"][1]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "Ada"}'}
    events = list(create_caddie_agent(OwnModel(), [search]).stream({"messages": "Where?"}, stream_mode="custom"))
    assert events[0]["message"] == output["messages"][1] | {"tool_calls": [*output["messages"][1]["tool_calls"]]}


@pytest.mark.parametrize(
    ("name", "keeps"), [("deepseek-reasoner", True), ("org/Kimi-K2-Thinking", True), ("gpt-4o", False)]
)
def test_profile_follows_from_the_name(name: str, keeps: bool) -> None:
    replies = [{**look(), "reasoning_content": "I think"}, "Paris"]
    with scripted_server(replies) as server:
        create_caddie_agent(name, [search], base_url=server.url).invoke({"messages": "Where?"})
    sent = server.requests[1]["messages"][1]
    assert ("reasoning_content" in sent) == keeps


def test_profile_given_wins() -> None:
    with scripted_server(["Paris"]) as server:
        agent = create_caddie_agent("gpt-4o", base_url=server.url, system="Careful.", profile="no-system")
        agent.invoke({"messages": "Where?"})
    assert server.requests[0]["messages"] == [{"role": "user", "content": "Careful.\n\nWhere?"}]


# ------------------------------------------------------------------ critics


def test_only_feedback(invoke: Invoke) -> None:
    own = ScriptedCritic(lambda state: ("", f"from {state.control}"))
    model = ScriptedModel([calls(tool_call("request_feedback")), "Paris"])
    output = invoke(create_caddie_agent(model, feedback=own), {"messages": "Where?"}, {})
    assert contents(output, "tool")[0].startswith("Critic feedback:\nfrom request_feedback")
    assert [tool["function"]["name"] for tool in model.seen[0].tools] == ["request_feedback"]


@pytest.mark.parametrize("protocol", ["self-call", "fixed:0", "probabilistic:1", "guarded:search"])
def test_without_a_critic_every_protocol_is_off(protocol: str, invoke: Invoke) -> None:
    model = ScriptedModel([look(), "Paris"])
    output = invoke(create_caddie_agent(model, [search], protocol=protocol), {"messages": "Where?"}, {})
    assert output["consultations"] == []
    assert contents(output, "tool") == ["found: Ada"]
    assert [tool["function"]["name"] for tool in model.seen[0].tools] == ["search"]


# ------------------------------------------------------------------ wrong settings

TWO = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}
OK: Any = ScriptedModel(["Paris"])


class HalfACritic:
    def critique(self, state: Any) -> Any:
        return None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "model None": ({"model": None}, "model must be"),
    "model a class": ({"model": ScriptedModel}, "model must be"),
    "model an object": ({"model": object()}, "model must be"),
    "name without url": ({"model": "m"}, "base_url"),
    "empty url": ({"model": "m", "base_url": ""}, "base_url"),
    "url without scheme": ({"model": "m", "base_url": "localhost:8000"}, "base_url"),
    "url of another scheme": ({"model": "m", "base_url": "ftp://x"}, "base_url"),
    "url with a bad port": ({"model": "m", "base_url": "http://x:port"}, "base_url"),
    "url no text": ({"model": "m", "base_url": 5}, "base_url"),
    "key of odd letters": ({"model": "m", "base_url": "http://x", "api_key": "sk-…"}, "api_key"),
    "tools a function": ({"tools": search}, "tools must be a list"),
    "tools None": ({"tools": None}, "tools must be a list"),
    "tools a text": ({"tools": "search"}, "tools must be a list"),
    "same name twice": ({"tools": [search, search]}, "tools: the name 'search' is used twice"),
    "tool without a name": ({"tools": [Tool("", "")]}, "tools"),
    "tool named as the control": ({"tools": [Tool("call_critic", "")], "critic": critic()}, "'call_critic'"),
    "critic a url": ({"critic": "http://127.0.0.1:1"}, "critic must be a Critic"),
    "critic a class": ({"critic": ScriptedCritic}, "critic must be a Critic"),
    "critic by half": ({"critic": HalfACritic()}, "critic must be a Critic"),
    "feedback a model": ({"feedback": OK}, "feedback must be a Critic"),
    "system None": ({"system": None}, "system must be"),
    "system a list": ({"system": ["Careful."]}, "system must be"),
    "examples a text": ({"examples": "Where?"}, "examples must be a list"),
    "examples None": ({"examples": None}, "examples must be a list"),
    "examples of texts": ({"examples": ["Where?"]}, "examples: a message must be a mapping"),
    "examples of an unknown role": (
        {"examples": [{"role": "tester", "content": "x"}]},
        "examples: unknown message role",
    ),
    "examples with a system prompt": ({"examples": [{"role": "system", "content": "x"}]}, "examples: only user"),
    "protocol unknown": ({"protocol": "often"}, "unknown intervention protocol 'often'"),
    "protocol None": ({"protocol": None}, "protocol must be"),
    "protocol a number": ({"protocol": 0.5}, "protocol must be"),
    "window the wrong way round": ({"protocol": "windowed:5-1"}, "k_min"),
    "probability above one": ({"protocol": "probabilistic:1.5"}, "alpha"),
    "guarded with a bad option": ({"protocol": "guarded:search;repeat=1"}, "unknown intervention protocol"),
    "format unknown": ({"action_format": "xml"}, "unknown action format 'xml'"),
    "format that cannot say the tool": ({"action_format": "caddie", "tools": [Tool("two", "", TWO)]}, "'two'"),
    "budget a number": ({"budget": 3}, "budget must be"),
    "budget a dict": ({"budget": {"max_uses": 1}}, "budget must be"),
    "profile unknown": ({"profile": "gpt"}, "unknown message profile 'gpt'"),
    "on_error unknown": ({"on_error": "explode"}, "on_error"),
    "breakpoint unknown": ({"interrupt_before": ["tool"]}, "interrupt_before: there is no node 'tool'"),
    "breakpoint at a node that is not there": ({"interrupt_after": ["critic"]}, "interrupt_after"),
    "checkpointer a text": ({"checkpointer": "memory"}, "checkpointer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_setting(case: str) -> None:
    settings, says = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        create_caddie_agent(**{"model": OK, "tools": [search], **settings})
    assert says in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_uses": -1}, "max_uses"),
        ({"timeout": 0}, "timeout"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_steps": -1}, "max_steps"),
        ({"max_steps": 1, "min_steps": 2}, "min_steps 2 exceeds max_steps 1"),
    ],
)
def test_wrong_budget(limits: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Budget(**limits)


def test_overflow_is_an_endpoint_error_of_its_own() -> None:
    """Shells tell it apart from other refusals, so it must not be caught with them by accident."""
    assert not issubclass(ContextOverflow, EndpointRefused)
