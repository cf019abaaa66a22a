"""An MCP server with one tool, `call_critic`: advice for agents whose framework speaks MCP and nothing else of ours.

The conversation comes with the call, or is known to a Caddie proxy that has relayed it under a session name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import httpx
from pydantic import BaseModel, Field

from caddie_sdk.budget import Budget
from caddie_sdk.config import CALL_CRITIC, CONTROLS
from caddie_sdk.critic import Critic
from caddie_sdk.critique import Critique
from caddie_sdk.errors import CaddieError, ConfigError, MissingExtra
from caddie_sdk.relay.advise import advise

try:
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import CallToolResult, TextContent, ToolAnnotations
except ImportError as missing:
    raise MissingExtra("the MCP server", "mcp") from missing

MAX_BYTES = 4 * 2**20
"""Default size of a conversation, as JSON."""

_INSTRUCTIONS = (
    "One tool, call_critic: an independent critic reviews a conversation and answers with an analysis and advice for "
    "the next steps. Pass the whole conversation, not a question about it."
)


class Advice(BaseModel):
    """What the critic had to say.

    Attributes:
        status: `ok`, or why there is no advice (`unavailable`, `timeout`, `over_budget`, ...).
        analysis: what the critic makes of the work so far.
        advice: what to do next.
        detail: what went wrong, where something did.
        seconds: how long the consultation took.
    """

    status: str
    analysis: str = ""
    advice: str = ""
    detail: str = ""
    seconds: float = 0.0


def make_server(
    critic: Critic | None = None,
    *,
    budget: Budget | None = None,
    proxy: str | None = None,
    api_key: str | None = None,
    max_bytes: int = MAX_BYTES,
    transport: httpx.AsyncBaseTransport | None = None,
) -> MCPServer[Any]:
    """An MCP server whose `call_critic` asks this critic, or the one of a running proxy.

    Args:
        critic: asked about conversations that come with the call. Without one they are sent to the proxy.
        budget: limits of one consultation, and how many a conversation may hold.
        proxy: URL of a `caddie proxy`, whose sessions can then be named instead of sending a conversation.
        api_key: sent to the proxy as the bearer token.
        max_bytes: largest conversation, as JSON; a larger one is refused.
        transport: carries the requests to the proxy, for one that lives in the same process.

    Raises:
        ConfigError: neither critic nor proxy is given, or a setting is wrong.
    """
    if critic is None and proxy is None:
        raise ConfigError("the MCP server needs a critic, the URL of a Caddie proxy, or both")
    if critic is not None and (isinstance(critic, type) or not isinstance(critic, Critic)):
        raise ConfigError(f"the critic must have critique() and acritique(); got {critic!r}")
    if max_bytes <= 0:
        raise ConfigError("max_bytes must be positive")
    limits = budget or Budget()
    desk = _Desk(critic, limits, max_bytes, _Proxy(proxy, limits.timeout, api_key, transport) if proxy else None)
    server: MCPServer[Any] = MCPServer("caddie", instructions=_INSTRUCTIONS, log_level="WARNING")
    hints = ToolAnnotations(title="Ask the critic", read_only_hint=True, destructive_hint=False, open_world_hint=True)
    server.tool(CALL_CRITIC, description=_described(desk), annotations=hints)(desk.call_critic)
    return server


def _described(desk: _Desk) -> str:
    named = " Or give the session_id under which the conversation runs through the Caddie proxy." if desk.proxy else ""
    told = CONTROLS[CALL_CRITIC].replace("It takes no question. ", "")
    return f"{told} Pass the whole conversation so far as `messages`.{named}"


def _argument(description: str, **schema: Any) -> Any:
    """An argument that is checked here: one readable line says more to a model than a validator's report."""
    return Field(description=description, json_schema_extra=schema)


_OBJECTS = {"type": "object", "additionalProperties": True}
_Messages = Annotated[
    Any,
    _argument(
        "The conversation: OpenAI chat messages, or items of the Responses API, oldest first.",
        type="array",
        items=_OBJECTS,
    ),
]
_Tools = Annotated[
    Any, _argument("Schemas of the agent's tools, so that the critic knows them.", type="array", items=_OBJECTS)
]
_SessionId = Annotated[
    Any, _argument("Name of a session that a Caddie proxy has relayed, in place of messages.", type="string")
]


class _Desk:
    """Answers the tool's calls."""

    def __init__(self, critic: Critic | None, budget: Budget, max_bytes: int, proxy: _Proxy | None) -> None:
        self._critics = {} if critic is None else {CALL_CRITIC: critic}
        self._budget, self._max_bytes, self.proxy = budget, max_bytes, proxy

    async def call_critic(
        self,
        messages: _Messages = None,
        tools: _Tools = None,
        session_id: _SessionId = None,
    ) -> Annotated[CallToolResult, Advice]:
        """Answer one call. What the caller got wrong is one line for it to read; a failed consultation is a status."""
        if session_id is not None and not isinstance(session_id, str):
            raise ToolError("session_id must be a text, the name of a session at the proxy")
        if (messages is None) == (session_id is None):
            raise ToolError("give either messages, the conversation so far, or session_id, its name at the proxy")
        try:
            if session_id is not None:
                return _answer(await self._by_session(session_id))
            self._check_size(messages, tools)
            return _answer(await self._by_messages(messages, [] if tools is None else tools))
        except CaddieError as error:
            raise ToolError(str(error)) from error

    async def _by_session(self, session_id: str) -> Critique:
        if self.proxy is None:
            raise ConfigError("session_id needs a Caddie proxy, and this server was started without --proxy")
        return await self.proxy.ask({"session_id": session_id})

    async def _by_messages(self, messages: Any, tools: Any) -> Critique:
        if self._critics or self.proxy is None:
            return await advise(messages, tools, self._critics, budget=self._budget)
        return await self.proxy.ask({"messages": messages, "tools": tools})

    def _check_size(self, *parts: Any) -> None:
        size = sum(len(json.dumps(part, ensure_ascii=False).encode("utf-8", "replace")) for part in parts if part)
        if size > self._max_bytes:
            raise ConfigError(f"the conversation has {size:,} bytes, more than the {self._max_bytes:,} allowed here")


class _Proxy:
    """The critique endpoint of a running proxy."""

    def __init__(
        self, url: str, timeout: float, api_key: str | None, transport: httpx.AsyncBaseTransport | None
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"the proxy's URL must start with http:// or https://, not {url!r}")
        self._url = url.rstrip("/").removesuffix("/v1") + "/caddie/critique"
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # The proxy keeps the critic's deadline; ours only has to outlast it.
        self._timeout, self._transport = httpx.Timeout(timeout + 10, connect=10.0), transport

    async def ask(self, asked: Mapping[str, Any]) -> Critique:
        """A critique, or the reason why the proxy gave none.

        Raises:
            ConfigError: the proxy refuses the request; the text is its own.
        """
        try:
            async with httpx.AsyncClient(timeout=self._timeout, transport=self._transport, trust_env=False) as client:
                answer = await client.post(self._url, json=dict(asked), headers=self._headers)
            said = answer.json()
        except httpx.TimeoutException:
            return Critique(status="timeout", detail=f"the proxy at {self._url} gave no answer in time")
        except (httpx.HTTPError, ValueError) as error:
            detail = f"the proxy at {self._url} gave no usable answer ({type(error).__name__})"
            return Critique(status="unavailable", detail=detail)
        return _read_answer(answer.status_code, said, self._url)


def _read_answer(status: int, said: Any, url: str) -> Critique:
    facts = said if isinstance(said, dict) else {}
    if 400 <= status < 500:
        error = facts.get("error")
        told = error.get("message") if isinstance(error, dict) else None
        raise ConfigError(str(told or f"the proxy at {url} refused the request with status {status}"))
    if status != 200 or not isinstance(facts.get("status"), str):
        return Critique(status="unavailable", detail=f"the proxy at {url} answered with status {status}")
    return Critique.load({name: facts[name] for name in _TOLD if name in facts})


_TOLD = ("status", "analysis", "advice", "detail", "seconds", "usage")


def _answer(critique: Critique) -> CallToolResult:
    """Text for models, and the same in fields for programs."""
    facts = {name: getattr(critique, name) for name in Advice.model_fields}
    reason = f": {critique.detail}" if critique.detail else ""
    text = critique.text if critique.ok else f"There is no advice this time ({critique.status}{reason})."
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=facts)


__all__ = ["MAX_BYTES", "Advice", "make_server"]
