"""The `caddie` command. Commands live in modules beside this one and import upper floors inside their bodies."""

from __future__ import annotations


def main() -> None:
    """Entry point: a CaddieError is one line on stderr and exit status 1, an interrupt is 130."""
    try:
        _run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _run() -> None:
    from caddie_sdk.cli.app import app
    from caddie_sdk.cli.terminal import print_anything, tell
    from caddie_sdk.errors import CaddieError

    print_anything()
    try:
        app(prog_name="caddie")
    except CaddieError as error:
        tell(f"caddie: {error}")
        raise SystemExit(1) from None
