"""A critic behind an OpenAI-compatible endpoint.

What the server says of itself in `/v1/models` is asked once, at the first consultation: which model to call,
which pack it was trained with (by the served id, see `checkpoint.served_id`) and how it takes a grammar. From
then on a consultation is one request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, Unpack, get_args

from caddie_critics.checkpoint import PackSource, find_pack, mismatch, parse_served_id
from caddie_critics.packs import Pack, list_packs, load_pack
from caddie_critics.prompted import BaseCritic, Settings, Setup
from caddie_sdk import _blocking
from caddie_sdk.actions import strip_thinking
from caddie_sdk.critique import FeedbackFormat
from caddie_sdk.endpoint import ChatEndpoint
from caddie_sdk.errors import CaddieError, ConfigError, EndpointRefused
from caddie_sdk.model import Reply

T = TypeVar("T")

Constrain = Literal["auto", "grammar", "vllm", "json_schema", "none"]
"""How the server is made to write well-formed critiques: llama.cpp's `grammar`, vLLM's `structured_outputs`,
OpenAI's `response_format`, or not at all. `auto` decides by `owned_by` in `/v1/models`."""

_BY_OWNER: dict[str, Constrain] = {"llamacpp": "grammar", "vllm": "vllm"}
_FALLBACK_PACK = "general"
_LISTING_SECONDS = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """What a critic has found behind its URL.

    Attributes:
        model: the model's id.
        pack: the pack it is asked with.
        constrain: how well-formed critiques are enforced.
        warning: a mismatch that was allowed.
    """

    model: str
    pack: Pack
    constrain: Constrain
    warning: str | None = None


class EndpointCritic(BaseCritic):
    """Asks a model server for critiques.

        critic = EndpointCritic("http://127.0.0.1:8080")
        critic.check()                          # optional: raises what is wrong, before any agent starts

    Args:
        base_url: the server's base URL, with or without `/v1`.
        model: a model id of the server, or the name part of a served id; None takes the first critic the
            server lists, else its first model.
        pack: a pack, a built-in pack's name, or the path of a pack or a checkpoint. `auto` takes the pack
            that the served id names, else `general`.
        api_key: sent as the bearer token.
        attempts: tries before giving up on connect errors, 429 and 5xx.
        constrain: see `Constrain`.
        allow_mismatch: only warn when the model was trained with another pack.
        params: further request fields (`extra_body`, ...), sent with every request.
        settings: `temperature`, `top_p`, `seed`, `timeout`, `count`; see `prompted.Settings`.

    Raises:
        PackError: `pack` is neither `auto` nor usable.
        ConfigError: there is no such `constrain`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        pack: PackSource = "auto",
        api_key: str | None = None,
        attempts: int = 3,
        constrain: Constrain = "auto",
        allow_mismatch: bool = False,
        params: Mapping[str, Any] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        super().__init__(**settings)
        if constrain not in get_args(Constrain):
            raise ConfigError(f"unknown constrain {constrain!r}: choose one of {', '.join(get_args(Constrain))}")
        self._model = model
        self._pack = None if pack == "auto" else find_pack(pack)
        self._constrain = constrain
        self._allow_mismatch = allow_mismatch
        self._endpoint = ChatEndpoint(base_url, model, api_key=api_key, attempts=attempts, params=params)
        self._served = _Once(self._discover)

    def __repr__(self) -> str:
        return f"EndpointCritic({self.base_url!r}, model={self._model!r})"

    @property
    def base_url(self) -> str:
        """The server's base URL."""
        return self._endpoint.base_url

    # ---------------------------------------------------------------- before the work starts

    def check(self, *, timeout: float = _LISTING_SECONDS) -> Served:
        """Blocking twin of `acheck`."""
        return _blocking.run(self.acheck(timeout=timeout))

    async def acheck(self, *, timeout: float = _LISTING_SECONDS) -> Served:
        """Ask the server, again if need be, what it serves.

        Raises:
            EndpointError: it is down, refuses the key, or does not serve the model.
            PackMismatch: the model was trained with another pack than the one at hand.
        """
        self._served.forget()
        served = await self._discover(timeout)
        self._served.keep(served)
        return served

    def close(self) -> None:
        """Blocking twin of `aclose`, for a critic that was used from blocking code."""
        _blocking.run(self.aclose())

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._endpoint.aclose()

    # ---------------------------------------------------------------- a consultation

    async def _setup(self, timeout: float) -> Setup:
        served = await self._served.get(min(timeout, _LISTING_SECONDS))
        form = served.pack.form
        extra = _constraint(served.constrain, form)

        async def complete(messages: list[dict[str, Any]], params: dict[str, Any], timeout: float) -> Reply:
            try:
                return await self._endpoint.chat(messages, params=self._merged(params, extra), timeout=timeout)
            except EndpointRefused:
                # The server may have been restarted with another model: ask anew next time.
                self._served.forget()
                raise

        def read(text: str) -> str:
            return _from_json(text, form) if served.constrain == "json_schema" else text

        return Setup(served.pack, complete, served.model, read)

    def _merged(self, params: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        own = self._endpoint.params.get("extra_body") or {}
        merged = {**params, **extra}
        if "extra_body" in extra:
            merged["extra_body"] = {**own, **extra["extra_body"]}
        return merged

    # ---------------------------------------------------------------- what the server serves

    async def _discover(self, timeout: float) -> Served:
        entry = self._choose(await self._listing(timeout))
        model = str(entry["id"])
        pack, warning = self._pack_for(model)
        constrain = self._constrain
        if constrain == "auto":
            constrain = _BY_OWNER.get(str(entry.get("owned_by")), "none")
        if warning:
            _log.warning("%s", warning)
        self._endpoint.model = model
        return Served(model, pack, constrain, warning)

    async def _listing(self, timeout: float) -> list[dict[str, Any]]:
        try:
            entries = await self._endpoint.models(timeout=timeout)
        except EndpointRefused as error:
            # Some proxies have no listing at all; a model that was named can still be called.
            if self._model is None or getattr(error.__cause__, "status_code", None) not in (404, 405):
                raise
            return []
        return [entry for entry in entries if isinstance(entry.get("id"), str)]

    def _choose(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """The entry to call: as named, else the first critic, else the first model."""
        parsed = [(entry, parse_served_id(entry["id"])) for entry in entries]
        if self._model is None:
            if not entries:
                raise EndpointRefused(
                    f"the server at {self.base_url} lists no model; load one, or name it", url=self.base_url
                )
            return next((entry for entry, served in parsed if served), entries[0])
        named = [entry for entry in entries if entry["id"] == self._model]
        named += [entry for entry, served in parsed if served and served[0] == self._model]
        if named or not entries:
            return named[0] if named else {"id": self._model}
        shown = ", ".join(entry["id"] for entry in entries[:5]) + (", ..." if len(entries) > 5 else "")
        raise EndpointRefused(
            f"the server at {self.base_url} does not serve the model {self._model!r}; it lists: {shown}",
            url=self.base_url,
        )

    def _pack_for(self, model: str) -> tuple[Pack, str | None]:
        """The pack to ask with, and a warning where a mismatch is allowed."""
        served = parse_served_id(model)
        if served is None:
            return self._pack or load_pack(_FALLBACK_PACK), None
        _, name, digits = served
        trained = f"{self.base_url} serves {model!r}, a critic trained with pack {name!r} (hash {digits}...)"
        pack = self._pack or (load_pack(name) if name in list_packs() else None)
        if pack is None:
            found = "and no built-in pack has that name"
        elif pack.hash.startswith(digits):  # the name is part of the hash
            return pack, None
        else:
            found = f"and the pack at hand is {pack.name!r} (hash {pack.hash})"
        remedy = (
            "Pass as pack the pack's folder, or the checkpoint with its caddie.json; or allow the mismatch "
            "(allow_mismatch=True, --allow-mismatch)"
        )
        warning = mismatch(f"{trained}, {found}. {remedy}", self._allow_mismatch)
        return pack or load_pack(_FALLBACK_PACK), warning


# ------------------------------------------------------------------ well-formed critiques


def _constraint(kind: Constrain, form: FeedbackFormat) -> dict[str, Any]:
    """The request fields that make a server write the format and nothing else."""
    if kind == "grammar":
        return {"extra_body": {"grammar": form.grammar}}
    if kind == "vllm":
        return {"extra_body": {"structured_outputs": {"regex": form.regex}}}
    if kind == "json_schema":
        names = _json_fields(form)
        schema = {
            "type": "object",
            "properties": {name: {"type": "string"} for name in names},
            "required": names,
            "additionalProperties": False,
        }
        return {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "critique", "strict": True, "schema": schema},
            }
        }
    return {}


def _json_fields(form: FeedbackFormat) -> list[str]:
    return ["advice"] if form.name == "feedback" else ["analysis", "advice"]


def _from_json(text: str, form: FeedbackFormat) -> str:
    """The critique that a JSON object spells, in the wire format; any other text as it is.

    From here on it is text like any other: it is parsed as strictly, and the critic is shown its earlier
    critiques in the form that its prompt asks for.
    """
    try:
        spelled = json.loads(strip_thinking(text))
    except (ValueError, RecursionError):
        return text
    names = _json_fields(form)
    if not isinstance(spelled, dict) or not all(isinstance(spelled.get(name), str) for name in names):
        return text
    return form.render(spelled.get("analysis", ""), spelled["advice"])


class _Once(Generic[T]):
    """A job that is done until it has succeeded once. Those who wait for it share its result or its failure.

    Works from several event loops: each loop has its own lock, so in the worst case each does the job once.
    Whoever does the job does it in its own task, so cancelling it closes what it opened, and the next takes over.
    """

    def __init__(self, job: Callable[[float], Awaitable[T]]) -> None:
        self._job = job
        self._result: T | None = None
        self._failed = 0
        self._failure: CaddieError | None = None
        self._guard = threading.Lock()
        self._locks: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}

    async def get(self, timeout: float) -> T:
        """The result; does the job, which is given `timeout`, if nobody has."""
        if self._result is not None:
            return self._result
        failed = self._failed
        async with self._lock():
            if self._result is not None:
                return self._result
            if self._failure is not None and self._failed != failed:
                raise self._failure
            try:
                self._result = await self._job(timeout)
            except CaddieError as error:
                self._failed, self._failure = self._failed + 1, error
                raise
            return self._result

    def keep(self, result: T) -> None:
        """Take a result that was found elsewhere."""
        self._result = result

    def forget(self) -> None:
        """Do the job anew at the next `get`."""
        self._result = None

    def _lock(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        with self._guard:
            # A lock keeps its loop alive, so those of closed loops are dropped here.
            self._locks = {known: lock for known, lock in self._locks.items() if not known.is_closed()}
            return self._locks.setdefault(loop, asyncio.Lock())
