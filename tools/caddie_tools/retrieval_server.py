"""A Search-R1 retrieval service over a local corpus; `retrieval_service` is its client.

    POST /retrieve   {"queries": [str], "topk": int, "return_scores": bool}
                     → {"result": [[{"document": {"id", "contents"}, "score"}]]}, or bare documents
    GET /healthz     what is searched, and how

Every error is JSON on one line, {"error": "..."}, and says what to change. Queries are not logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

from caddie_sdk.errors import ConfigError, MissingExtra
from caddie_tools.corpus import CorpusSearch, corpus_fingerprint
from caddie_tools.passages import Hit

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise MissingExtra("the retrieval server", "proxy") from error


@dataclass(frozen=True, slots=True)
class RetrievalLimits:
    """What one request may cost.

    Attributes:
        max_body: bytes of a request body.
        max_queries: queries in one request.
        max_top_k: passages for one query.
        total: seconds for a whole request.

    Raises:
        ConfigError: one of them is not positive.
    """

    max_body: int = 4 * 2**20
    max_queries: int = 1024
    max_top_k: int = 100
    total: float = 300.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise ConfigError(f"limits: {each.name} must be positive")


@dataclass(frozen=True, slots=True)
class _Asked:
    queries: list[str]
    top_k: int
    scores: bool


def create_app(
    search: CorpusSearch,
    *,
    top_k: int = 3,
    limits: RetrievalLimits | None = None,
    threads: int | None = None,
) -> Starlette:
    """The service as an ASGI application. Its answers are those of `search.search`, query by query.

    Args:
        search: what is searched; its passages are hashed here, for `/healthz`.
        top_k: passages a query where the request does not say.
        limits: of size and time.
        threads: searches that run at once; by default one a processor. The event loop runs none.

    Raises:
        ConfigError: `top_k` is not between 1 and the limit, or `threads` is below 1.
    """
    bounds = limits or RetrievalLimits()
    if not 1 <= top_k <= bounds.max_top_k:
        raise ConfigError(f"top_k must be between 1 and {bounds.max_top_k}, not {top_k}")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be 1 or more, not {threads}")
    workers = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="caddie-search")
    server = _Server(search, top_k, bounds, workers)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        workers.shutdown(wait=False, cancel_futures=True)

    return Starlette(
        routes=[
            Route("/retrieve", server.retrieve, methods=["POST"]),
            Route("/healthz", server.healthz),
        ],
        exception_handlers={HTTPException: _refused, Exception: _broken},
        lifespan=lifespan,
    )


class _Server:
    def __init__(self, search: CorpusSearch, top_k: int, limits: RetrievalLimits, workers: ThreadPoolExecutor) -> None:
        self.search, self.top_k, self.limits, self.workers = search, top_k, limits, workers
        self.facts = {
            "status": "ok",
            "passages": len(search),
            "mode": search.mode,
            "content_hash": corpus_fingerprint(search.passages),
        }

    async def healthz(self, request: Request) -> Response:
        return _json(self.facts)

    async def retrieve(self, request: Request) -> Response:
        late = HTTPException(408, f"the request body did not arrive within {self.limits.total:g} s")
        try:
            async with asyncio.timeout(self.limits.total):
                asked = self._read(await self._body(request))
                late = HTTPException(503, f"no answer within {self.limits.total:g} s: send fewer queries at once")
                return await self._answer(request, asked)
        except TimeoutError:
            raise late from None
        except ClientDisconnect:
            return Response(status_code=499)

    async def _body(self, request: Request) -> bytes:
        limit = self.limits.max_body
        large = HTTPException(413, f"the request body is larger than {limit:,} bytes: send fewer queries at once")
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise large
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise large
            parts.append(part)
        return b"".join(parts)

    def _read(self, body: bytes) -> _Asked:
        try:
            given = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise _bad(f"the body is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise _bad('the body must be an object: {"queries": [...], "topk": 3, "return_scores": true}')
        queries, top_k, scores = given.get("queries"), given.get("topk"), given.get("return_scores")
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise _bad("queries must be a list of strings")
        if len(queries) > self.limits.max_queries:
            raise _bad(f"queries has {len(queries):,} entries; at most {self.limits.max_queries:,} are taken at once")
        top_k = self.top_k if top_k is None else top_k
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= self.limits.max_top_k:
            raise _bad(f"topk must be a whole number from 1 to {self.limits.max_top_k}")
        if scores is not None and not isinstance(scores, bool):
            raise _bad("return_scores must be true or false")
        return _Asked(queries, top_k, bool(scores))

    async def _answer(self, request: Request, asked: _Asked) -> Response:
        loop = asyncio.get_running_loop()
        result = []
        # One query is one job: requests take turns, and a request that is given up stops at the next query.
        for query in asked.queries:
            if await request.is_disconnected():
                raise ClientDisconnect
            hits = await loop.run_in_executor(self.workers, self.search.search, query, asked.top_k)
            result.append([_scored(hit) if asked.scores else _document(hit) for hit in hits])
        return _json({"result": result})


def _document(hit: Hit) -> dict[str, Any]:
    return {"id": hit.passage.id, "contents": hit.passage.contents}


def _scored(hit: Hit) -> dict[str, Any]:
    return {"document": _document(hit), "score": hit.score}


def _bad(problem: str) -> HTTPException:
    return HTTPException(400, problem)


def _json(content: Any, status: int = 200, headers: Any = None) -> Response:
    # ASCII, so that half a surrogate pair in a passage does no harm; floats are written to the last bit.
    return Response(json.dumps(content), status, headers, "application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "there is only POST /retrieve and GET /healthz", 405: "this path takes another method"}
    return _json({"error": known.get(error.status_code, error.detail)}, error.status_code, error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    return _json({"error": f"the search failed ({type(error).__name__}); see the server's log"}, 500)
