"""An OpenAI-compatible chat endpoint: the one place that talks to a model server.

The agent's model and the critics both go through `ChatEndpoint`. It owns retries (the openai client's own are
off), honours `Retry-After`, keeps a total deadline over all attempts, holds one client per event loop, and
turns every failure into an `EndpointError` that names the URL and what to check.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from caddie_sdk import _blocking
from caddie_sdk.commands import CallModel
from caddie_sdk.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    EndpointUnavailable,
    MessageError,
)
from caddie_sdk.messages import canonical
from caddie_sdk.model import Reply
from caddie_sdk.retry import PerLoop, RetryPolicy, parse_retry_after
from caddie_sdk.usage import Usage

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")

_NO_KEY = "none"
_GRAMMARS = {"llamacpp": "llama.cpp", "vllm": "vllm"}
"""How a server takes grammars, by what it says of itself in `/v1/models`."""
_BACKOFF, _MAX_WAIT = 0.2, 120.0
"""Seconds before the second try, and the longest wait that a server may ask for."""


class ChatEndpoint:
    """A chat-completions endpoint.

    Args:
        base_url: the server's base URL, with or without `/v1`.
        model: model name; None takes the one the server lists first.
        api_key: sent as the bearer token; local servers take any.
        timeout: seconds for one call, all attempts together.
        attempts: tries before giving up on connect errors, 429 and 5xx.
        params: further request fields (`temperature`, `seed`, `extra_body`, ...), sent with every call.
        grammar: how this server takes grammars: `llama.cpp` (field `grammar`), `vllm`
            (`structured_outputs.grammar`), None to send none, or `auto` to let `check()` find out.

    Raises:
        ConfigError: the URL, the key or `grammar` cannot be what is meant.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = 120.0,
        attempts: int = 3,
        params: Mapping[str, Any] | None = None,
        grammar: str | None = None,
    ) -> None:
        self.base_url = with_v1(base_url)
        self.model = model
        self.timeout = timeout
        self._policy = RetryPolicy(tries=max(1, attempts), backoff=_BACKOFF, max_wait=_MAX_WAIT)
        self.params = dict(params or {})
        if grammar not in (None, "auto", *_GRAMMARS.values()):
            raise ConfigError(f"grammar must be 'llama.cpp', 'vllm', 'auto' or None, not {grammar!r}")
        self.grammar = grammar
        self._api_key = _checked_key(api_key)
        self._clients = PerLoop(self._client, lambda client: client.close())

    def __repr__(self) -> str:
        return f"ChatEndpoint({self.base_url!r}, {self.model!r})"

    # ---------------------------------------------------------------- calls

    def complete(self, call: CallModel) -> Reply:
        """Blocking twin of `acomplete`."""
        return _blocking.run(self.acomplete(call))

    async def acomplete(self, call: CallModel) -> Reply:
        """Continue a chat.

        Raises:
            EndpointUnavailable, EndpointTimeout, EndpointRefused, ContextOverflow: see `caddie_sdk.errors`.
        """
        return await self.chat(call.messages, tools=call.tools, tool_choice=call.tool_choice, grammar=call.grammar)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str = "auto",
        grammar: str | None = None,
        timeout: float | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> Reply:
        """One chat completion, with retries inside one deadline of `timeout` seconds."""
        request: dict[str, Any] = {**self.params, **(params or {}), "messages": messages}
        if tools:
            request["tools"] = tools
            if tool_choice != "auto":
                request["tool_choice"] = tool_choice
        seconds = timeout or self.timeout
        return await self._within(seconds, self._chat(request, None if tools else grammar, seconds))

    async def models(self, *, timeout: float = 10.0) -> list[dict[str, Any]]:
        """The entries of `/v1/models`, first one first."""
        return await self._within(timeout, self._retrying(self._models, timeout))

    def check(self, *, timeout: float = 10.0) -> str:
        """Make sure that the server answers and serves the model; returns the model's name.

        Raises:
            EndpointError: the server is down, or does not list the model.
        """
        return _blocking.run(self.acheck(timeout=timeout))

    async def acheck(self, *, timeout: float = 10.0) -> str:
        """Async twin of `check`."""
        entries = await self.models(timeout=timeout)
        names = [str(entry.get("id")) for entry in entries]
        if self.grammar == "auto":
            ours = next((entry for entry in entries if entry.get("id") == self.model), entries[0] if entries else {})
            self.grammar = _GRAMMARS.get(str(ours.get("owned_by")))
        if self.model is None:
            if not names:
                raise EndpointRefused(f"the server at {self.base_url} lists no model; load one", url=self.base_url)
            self.model = names[0]
        elif names and self.model not in names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise EndpointRefused(
                f"the server at {self.base_url} does not serve the model {self.model!r}; it lists: {shown}",
                url=self.base_url,
            )
        return self.model

    async def aclose(self) -> None:
        """Close the client of the running event loop."""
        await self._clients.aclose()

    # ---------------------------------------------------------------- inside

    def _grammar_field(self, grammar: str) -> dict[str, Any]:
        if self.grammar == "llama.cpp":
            return {"grammar": grammar}
        if self.grammar == "vllm":
            return {"structured_outputs": {"grammar": grammar}}
        return {}

    def _client(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        # No timeout of its own: `_within` keeps the one deadline, which a caller may set longer than ours.
        return AsyncOpenAI(
            base_url=self.base_url,
            api_key=self._api_key,
            max_retries=0,
            timeout=None,
            http_client=DefaultAsyncHttpxClient(timeout=None),  # the client's own default closes itself on any loop
        )

    async def _chat(self, request: dict[str, Any], grammar: str | None, seconds: float) -> Reply:
        if self.model is None or (grammar and self.grammar == "auto"):
            await self.acheck()

        extra = {**request.pop("extra_body", {}), **(self._grammar_field(grammar) if grammar else {})}
        body = {"model": self.model, **request, **extra}

        async def once() -> Reply:
            # `create()` walks all messages and tools through its type tables on every call, which costs four times
            # what the rest of the request does; the session's wire copy needs no such care.
            client = await self._clients.get()
            answer = await client.post("/chat/completions", cast_to=dict[str, Any], body=body)
            return self._read(answer)

        return await self._retrying(once, seconds)

    def _read(self, answer: Any) -> Reply:
        try:
            choice = answer["choices"][0]
            message = canonical(choice["message"])
            truncated = choice.get("finish_reason") == "length"
            usage = Usage.from_openai(answer.get("usage"))
        except (AttributeError, IndexError, TypeError, KeyError, MessageError) as error:
            raise self._strange("chat completion") from error
        return Reply(message, usage, str(answer.get("model") or ""), truncated)

    async def _models(self) -> list[dict[str, Any]]:
        client = await self._clients.get()
        answer: Any = await client.get("/models", cast_to=dict[str, Any])
        entries = (answer.get("data") or []) if isinstance(answer, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry.get("id") for entry in entries):
            raise self._strange("list of models")
        return entries

    def _strange(self, expected: str) -> EndpointUnavailable:
        return EndpointUnavailable(
            f"{self.base_url} answered with something that is no {expected}; is it an OpenAI-compatible server?",
            url=self.base_url,
        )

    async def _within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise EndpointTimeout(
                f"{self.base_url} gave no answer within {seconds:g} s; raise the timeout, or check the server's load",
                url=self.base_url,
            ) from None

    async def _retrying(self, once: Callable[[], Awaitable[T]], seconds: float) -> T:
        async def attempt() -> T:
            from openai import OpenAIError

            try:
                return await once()
            except (OpenAIError, json.JSONDecodeError, UnicodeDecodeError) as error:
                raise translate(error, self.base_url, self.model, self._api_key) from error

        # A wait past the deadline would only turn what the server said into a timeout.
        return await self._policy.arun(attempt, within=seconds)


def _checked_key(api_key: str | None) -> str:
    key = (api_key or "").strip() or _NO_KEY
    if not key.isascii() or not key.isprintable():
        raise ConfigError("api_key holds characters that no HTTP header can carry; was it copied in full?")
    return key


def with_v1(base_url: str) -> str:
    """A server's base URL, ending in its API version; `/v1` where it names none.

    Raises:
        ConfigError: it is no http URL.
    """
    try:
        parts = urlsplit(base_url.strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (AttributeError, TypeError, ValueError):
        usable = False
    if not usable:
        raise ConfigError(f"base_url must look like http://127.0.0.1:8000/v1, not {base_url!r}")
    url = base_url.strip().rstrip("/")
    return url if url.rsplit("/", 1)[-1].startswith("v") and url.rsplit("/", 1)[-1][1:].isdigit() else f"{url}/v1"


_OVERFLOW_MARKS = (
    "context length", "context size", "context window", "maximum context", "context_length_exceeded",
    "exceed_context_size", "maximum model length",
)  # fmt: skip


def translate(error: Exception, url: str, model: str | None = None, secret: str = "") -> EndpointError:
    """An openai client error as one of ours, with the URL and what to check, and without the key `secret`."""
    import openai

    if isinstance(error, openai.APITimeoutError):
        return EndpointTimeout(f"{url} did not answer in time; check the server's load", url=url)
    if isinstance(error, openai.APIConnectionError):
        return EndpointUnavailable(f"cannot reach {url}; check that the server runs and that the URL is right", url=url)
    if not isinstance(error, openai.APIStatusError):
        return EndpointUnavailable(f"{url} sent an answer that cannot be read ({type(error).__name__})", url=url)
    # The client reads the message of OpenAI's own error object only; other servers have other forms.
    plain, body = str(error.message), error.response.text
    told = body if plain == f"Error code: {error.status_code}" and body.strip() else plain
    status, said = error.status_code, " ".join(told.split())
    detail = (said if secret in ("", _NO_KEY) else said.replace(secret, "***"))[:300]
    if status == 429 or status >= 500:
        return EndpointUnavailable(
            f"{url} answered {status}; it is overloaded or failing: {detail}",
            url=url,
            retry_after=parse_retry_after(error.response.headers.get("retry-after")),
        )
    if status in (400, 413, 422) and any(mark in body.lower() for mark in _OVERFLOW_MARKS):
        return ContextOverflow(f"{url}: the prompt does not fit the model's context: {detail}", url=url)
    if status in (401, 403):
        return EndpointRefused(f"{url} refused the API key ({status}); check the key", url=url)
    if status == 404:
        return EndpointRefused(f"{url} does not know the model {model!r} or the path; check both", url=url)
    return EndpointRefused(f"{url} refused the request ({status}): {detail}", url=url)
