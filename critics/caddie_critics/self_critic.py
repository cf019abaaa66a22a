"""The agent's own model in the critic's role: one model, two roles, as in CAFE (SPEC §8)."""

from __future__ import annotations

from typing import Any, Unpack

from caddie_critics.checkpoint import PackSource, find_pack
from caddie_critics.prompted import BaseCritic, Settings, Setup
from caddie_sdk.commands import CallModel
from caddie_sdk.endpoint import ChatEndpoint
from caddie_sdk.model import ChatModel, Reply


class SelfCritic(BaseCritic):
    """Asks the agent's model to review the agent's own work.

    Behind a `ChatEndpoint` the limits, the sampling and, where its server takes one, the grammar of the
    feedback format are sent along. Any other `ChatModel` gets the prompt and the grammar, and decides on the
    rest itself.

    Args:
        model: the agent's model.
        pack: a pack, a built-in pack's name, or the path of a pack or a checkpoint.
        settings: see `prompted.Settings`.

    Raises:
        PackError: there is no such pack, or it is unusable.
    """

    def __init__(self, model: ChatModel, pack: PackSource = "feedback", **settings: Unpack[Settings]) -> None:
        super().__init__(**settings)
        self.model = model
        self.pack = find_pack(pack)

    def __repr__(self) -> str:
        return f"SelfCritic({self.model!r}, pack={self.pack.name!r})"

    async def _setup(self, timeout: float) -> Setup:
        if isinstance(self.model, ChatEndpoint) and self.model.model is None:
            # Some families want another form on the wire, so the name must be known before the first call.
            await self.model.acheck(timeout=timeout)
        name = getattr(self.model, "model", None)
        return Setup(self.pack, self._complete, name if isinstance(name, str) else "")

    async def _complete(self, messages: list[dict[str, Any]], params: dict[str, Any], timeout: float) -> Reply:
        grammar = self.pack.form.grammar
        if isinstance(self.model, ChatEndpoint):
            return await self.model.chat(messages, params=params, grammar=grammar, timeout=timeout)
        return await self.model.acomplete(CallModel(messages, [], grammar=grammar))
