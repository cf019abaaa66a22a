"""The `caddie` command. Commands live in modules beside this one and import upper floors inside their bodies."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: a CaddieError is one line on stderr and exit status 1, an interrupt is 130."""
    from caddie_sdk.cli.app import app
    from caddie_sdk.errors import CaddieError

    try:
        app()
    except CaddieError as error:
        print(f"caddie: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
