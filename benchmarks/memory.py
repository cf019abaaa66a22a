"""Resident memory of a relay over many requests with distinct histories, each with a consultation.

    python benchmarks/memory.py [--requests N] [--json PATH]

The steps of `wrap` and the proxy are carried out by hand here, without HTTP, so that what is measured is what the relay
itself keeps: the ledger of hidden turns, live sessions, and what was read of messages. All three are full long before
the end; from then on the line must be flat.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from caddie_sdk.relay.flow import Answer, Ask, Emit, Read, Relay, Send
from caddie_sdk.shells.wrap import make_relay
from caddie_sdk.testing import ScriptedCritic, calls, tool_call

PATH = "/v1/chat/completions"
HEADERS = {"authorization": "Bearer none", "content-type": "application/json"}
TEXT = 1500
"""Characters of each user turn."""


def answer(message: dict[str, Any]) -> bytes:
    """A chat completion with this message."""
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps(
        {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
    ).encode()


def one(relay: Relay, text: str) -> bytes:
    """One request: the model asks the critic, then answers."""
    replies = iter(
        [answer(calls(tool_call("call_critic", id="c1"))), answer({"role": "assistant", "content": "Paris"})]
    )
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    flow, value, rest, out = relay.flow(PATH, HEADERS, body), None, iter(()), b""
    critic = ScriptedCritic([("The question is open.", "Answer it.")])
    try:
        while True:
            step, value = flow.send(value), None
            match step:
                case Send():
                    value, rest = Answer(200, {}), iter([next(replies)])
                case Read():
                    value = next(rest, None)
                case Ask(state):
                    value = critic.critique(state)
                case Emit(data):
                    out += data
    except StopIteration:
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    process, source = psutil.Process(os.getpid()), random.Random(0)
    relay = make_relay({"call_critic": ScriptedCritic([])})
    started, rows = time.perf_counter(), []
    for number in range(options.requests + 1):
        if number % max(1, options.requests // 10) == 0:
            gc.collect()
            resident = process.memory_info().rss / 2**20
            rows.append({"requests": number, "rss_mib": round(resident, 1), "ledger": len(relay.ledger)})  # type: ignore[arg-type]
        text = f"{number} {source.randbytes(TEXT // 2).hex()}"
        assert b"Paris" in one(relay, text), "no answer came out"
    table = Table(title=f"Memory over {options.requests} requests with distinct histories")
    for column in ("requests", "resident, MiB", "turns in the ledger"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    half = [row["rss_mib"] for row in rows[len(rows) // 2 :]]
    growth = round(max(half) - min(half), 1)
    seconds = round(time.perf_counter() - started, 1)
    print(f"second half: between {min(half)} and {max(half)} MiB (a span of {growth}); {seconds} s in all")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "span_second_half_mib": growth, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
