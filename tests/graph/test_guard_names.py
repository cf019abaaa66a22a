"""A guard for a tool that does not exist is a mistake, not a guard."""

from __future__ import annotations

import pytest

from caddie_sdk import Guarded, create_caddie_agent
from caddie_sdk.errors import ConfigError
from caddie_sdk.testing import ScriptedCritic, ScriptedModel


def refund(order: str) -> str:
    """Pay back."""
    return order


def test_a_misspelt_guard_is_refused() -> None:
    critic = ScriptedCritic([])
    with pytest.raises(ConfigError, match=r"no tool 'refnud' to guard; the tools are refund"):
        create_caddie_agent(ScriptedModel([]), [refund], critic=critic, protocol="guarded:refnud")
    create_caddie_agent(ScriptedModel([]), [refund], critic=critic, protocol=Guarded(irreversible=("refund",)))
