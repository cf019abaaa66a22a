"""Requests of an agent that keeps its own history and runs its own tools: the sans-IO part of `wrap` and the proxy.

    ledger.py     what callers never see, found again by the content of what they do see
    exchange.py   one request: a session made from the caller's history, driven to what the caller must handle
    chat.py       chat completions: requests, answers and streams
    responses.py  the same for the Responses API
    sse.py        server-sent events
    flow.py       one request from its first byte to its last, as a generator that says what I/O it needs

All rules live in the session; nothing here decides when to consult or what a turn means.
"""
