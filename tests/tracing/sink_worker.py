"""Writes traces until it is killed, and says how many are on disk. Arguments: file, name, how many."""

from __future__ import annotations

import itertools
import sys

from trace_kit import finished

from caddie_sdk.tracing import TraceSink


def main(path: str, name: str, count: str) -> None:
    sink, session = TraceSink(path), finished(observation="x" * 200_000)
    for number in itertools.count() if count == "forever" else range(int(count)):
        sink.write(session, way="worker", metadata={"worker": name, "number": number})
        print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
