"""Runs one model server and makes sure that it ends with us. Started as a script; standard library only.

    python -I -S _guard.py GRACE_SECONDS COMMAND...

The command gets a session, and so a process group, of its own. It is ended (SIGTERM to the group, SIGKILL after
GRACE_SECONDS) when standard input closes, which the system does even if whoever started us was killed with
SIGKILL, or when this process is asked to stop. Whatever the command leaves behind in its group is killed once it
is gone. The exit status is the command's; 128 + n when signal n ended it; 127 when it could not be started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any


class Guard:
    """Watches over one command."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._child: subprocess.Popen[bytes] | None = None
        self._asked_to_end = False

    def run(self, command: list[str]) -> int:
        # The handlers come first: killed from here on, this process would leave the command behind.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        signal.signal(signal.SIGALRM, lambda *_: self._signal(signal.SIGKILL))
        try:
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", flush=True)
            return 127
        if self._asked_to_end:
            self._end()
        threading.Thread(target=_await_close, daemon=True).start()
        status = self._child.wait()
        self._signal(signal.SIGKILL)
        return status if status >= 0 else 128 - status

    def _end(self, *_: Any) -> None:
        self._asked_to_end = True
        self._signal(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, self._grace)

    def _signal(self, number: int) -> None:
        try:
            if self._child is not None:
                os.killpg(self._child.pid, number)
        except OSError:
            pass  # nobody is left


def _await_close() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(Guard(float(sys.argv[1])).run(sys.argv[2:]))
