"""Small GBNF pieces shared by action and critique grammars.

GBNF is llama.cpp's grammar notation; xgrammar (vLLM, SGLang) reads the same subset that is used here.
"""

from __future__ import annotations

import json

JSON_RULES = r"""
object ::= "{" ws ( pair ( ws "," ws pair ){0,15} )? ws "}"
pair ::= string ws ":" ws value
array ::= "[" ws ( value ( ws "," ws value ){0,31} )? ws "]"
value ::= object | array | string | number | "true" | "false" | "null"
string ::= "\"" ( [^"\\<\x00-\x1F] | "\\" ( ["\\/bfnrt] | "u" [0-9a-fA-F]{4} ) ){0,400} "\""
number ::= "-"? ( "0" | [1-9] [0-9]{0,15} ) ( "." [0-9]{1,15} )?
ws ::= [ \t\n]{0,4}
""".strip()


def literal(text: str) -> str:
    """A quoted terminal."""
    return json.dumps(text, ensure_ascii=False)


_BLANKS = r"\x00-\x20\x7F-\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000"
"""Controls and whatever Python's `strip` takes for white space: a text of these alone would be empty."""


def line(limit: int) -> str:
    """One to `limit` characters on one line that open no tag and do not start with a blank."""
    return rf"[^<{_BLANKS}] [^<\n]{{0,{limit - 1}}}"
