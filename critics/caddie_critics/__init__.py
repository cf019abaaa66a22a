"""Critics: who advises, and how they are asked.

    from caddie_critics import EndpointCritic
    from caddie_sdk.shells.loop import run

    critic = EndpointCritic("http://127.0.0.1:8080")    # what `caddie serve <checkpoint>` prints
    critic.check()                                      # raises what is wrong, before the agent starts
    run(session, "Which river ...?", model, tools, critics={"call_critic": critic})

Names are imported when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caddie_critics.checkpoint import (
        find_pack,
        pack_from_checkpoint,
        parse_served_id,
        read_caddie_json,
        served_id,
        verify_pack,
        write_caddie_json,
    )
    from caddie_critics.endpoint import EndpointCritic, Served
    from caddie_critics.packs import Pack, list_packs, load_pack
    from caddie_critics.prompted import PromptedCritic
    from caddie_critics.self_critic import SelfCritic

_HOMES = {
    "checkpoint": (
        "find_pack",
        "pack_from_checkpoint",
        "parse_served_id",
        "read_caddie_json",
        "served_id",
        "verify_pack",
        "write_caddie_json",
    ),
    "endpoint": ("EndpointCritic", "Served"),
    "packs": ("Pack", "list_packs", "load_pack"),
    "prompted": ("PromptedCritic",),
    "self_critic": ("SelfCritic",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "EndpointCritic",
    "Pack",
    "PromptedCritic",
    "SelfCritic",
    "Served",
    "find_pack",
    "list_packs",
    "load_pack",
    "pack_from_checkpoint",
    "parse_served_id",
    "read_caddie_json",
    "served_id",
    "verify_pack",
    "write_caddie_json",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
