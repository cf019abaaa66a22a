"""Text that models, passages and servers wrote, made safe for a terminal."""

from __future__ import annotations

import io
import sys
import unicodedata

_UNSEEN = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Marks that turn the reading direction: with them a line can show what it does not say."""


def plain(text: str) -> str:
    """One line without control characters: nothing in it moves the cursor, colours, or renames the window."""
    return " ".join("".join(map(_shown, text)).split())


def _shown(character: str) -> str:
    if character.isspace():
        return " "
    kind = unicodedata.category(character)
    if kind == "Cs":
        return "\ufffd"
    return "" if kind == "Cc" or character in _UNSEEN else character


def tell(message: str) -> None:
    """Print a line on standard error."""
    print(plain(message), file=sys.stderr, flush=True)


def print_anything() -> None:
    """Let standard output and error show `?` for what their encoding lacks, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
