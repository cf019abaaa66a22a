"""Client of a Search-R1 retrieval service.

POST /retrieve {"queries": [str], "topk": int, "return_scores": bool}
answers {"result": [[{"document": {"id", "contents"}, "score"}]]}, one list a query, best first; when scores
are off, bare documents in place of {"document", "score"}.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from caddie_sdk.errors import (
    ConfigError,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    EndpointUnavailable,
)
from caddie_sdk.retry import Clients, RetryPolicy, parse_retry_after
from caddie_tools.passages import Hit, Passage, clean_query


class RetrievalService:
    """Search through a Search-R1 retrieval service, sync (`search`) or async (`asearch`).

    Retries connection failures, 5xx and 429, and nothing else; honours Retry-After. Safe to share between
    threads and event loops. Close it with `close` or `aclose`, or use it in a `with` block.

    Args:
        base_url: where the service listens, with or without the final `/retrieve`.
        timeout: seconds a try may wait for the connection, and then for the answer.
        tries, backoff, max_wait: calls in all; seconds before the second; longest wait in seconds. A
            service that asks for a longer wait is not tried again.
        return_scores: ask for scores; without them each hit's score is 0.0 and the order is the service's.
        headers: sent with each request.

    Raises:
        ConfigError: `base_url` is no http(s) URL, or `tries` is below 1.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float = 30.0,
        tries: int = 3,
        backoff: float = 0.5,
        max_wait: float = 30.0,
        return_scores: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._endpoint = _endpoint(base_url)
        #: The address asked, as shown in messages: without user name and password.
        self.url = str(self._endpoint.copy_with(userinfo=b""))
        self.timeout, self.return_scores = timeout, return_scores
        self._retries = RetryPolicy(tries, backoff, max_wait)
        # Waiting for a connection of our own pool is no fault of the server: no limit on that.
        self._options: dict[str, Any] = {
            "timeout": httpx.Timeout(timeout, pool=None),
            "headers": dict(headers or {}),
        }
        self._clients: Clients[Any, Any] = Clients(
            lambda: httpx.Client(**self._options),
            httpx.Client.close,
            lambda: httpx.AsyncClient(**self._options),
            httpx.AsyncClient.aclose,
        )

    def __repr__(self) -> str:
        return f"RetrievalService({self.url!r})"

    def search(self, query: str, top_k: int = 3) -> list[Hit]:
        """Return at most `top_k` hits, best first; a blank query finds nothing and asks nobody.

        Raises:
            EndpointUnavailable: no connection, 5xx or 429, after the last try.
            EndpointTimeout: no answer within `timeout` seconds.
            EndpointRefused: any other status than 200.
            EndpointError: the answer is not in the service's form.
        """
        return self.search_many([query], top_k)[0]

    async def asearch(self, query: str, top_k: int = 3) -> list[Hit]:
        """Async twin of `search`."""
        return (await self.asearch_many([query], top_k))[0]

    def search_many(self, queries: Sequence[str], top_k: int = 3) -> list[list[Hit]]:
        """Several queries in one request; one list of hits for each. Raises as `search` does."""
        cleaned, body = self._body(queries, top_k)
        payload = self._retries.run(lambda: self._post(body)) if body["queries"] else {"result": []}
        return self._hits(payload, cleaned, top_k)

    async def asearch_many(self, queries: Sequence[str], top_k: int = 3) -> list[list[Hit]]:
        """Async twin of `search_many`."""
        cleaned, body = self._body(queries, top_k)
        payload = await self._retries.arun(lambda: self._apost(body)) if body["queries"] else {"result": []}
        return self._hits(payload, cleaned, top_k)

    def close(self) -> None:
        """Close the sync connections."""
        self._clients.close()

    async def aclose(self) -> None:
        """Close the sync connections and those of the running event loop."""
        await self._clients.aclose()

    def __enter__(self) -> RetrievalService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> RetrievalService:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _body(self, queries: Sequence[str], top_k: int) -> tuple[list[str], dict[str, Any]]:
        cleaned = [clean_query(query) if top_k > 0 else "" for query in queries]
        asked = [query for query in cleaned if query]
        return cleaned, {"queries": asked, "topk": top_k, "return_scores": self.return_scores}

    def _post(self, body: Mapping[str, Any]) -> Any:
        client = self._clients.get()
        try:
            return self._payload(client.post(self._endpoint, json=body))
        except httpx.HTTPError as error:
            raise self._failed(error) from error

    async def _apost(self, body: Mapping[str, Any]) -> Any:
        try:
            client = await self._clients.aget()
            return self._payload(await client.post(self._endpoint, json=body))
        except httpx.HTTPError as error:
            raise self._failed(error) from error

    def _failed(self, error: httpx.HTTPError) -> EndpointError:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            return EndpointTimeout(
                f"the retrieval service at {self.url} gave no answer within {self.timeout:g} s. Check its "
                f"load, or allow a longer timeout.",
                url=self.url,
            )
        if isinstance(error, httpx.TransportError):
            return EndpointUnavailable(
                f"no connection to the retrieval service at {self.url} ({what}), tried {self._retries.tries} "
                f"times. Check that it is running and that host and port are right.",
                url=self.url,
            )
        return self._malformed(what)

    def _payload(self, response: httpx.Response) -> Any:
        status = response.status_code
        if status == 429 or status >= 500:
            raise EndpointUnavailable(
                f"the retrieval service at {self.url} answered {status} (at most "
                f"{self._retries.tries} tries): {_excerpt(response)}. Check its log, or send fewer requests at once.",
                url=self.url,
                retry_after=parse_retry_after(response.headers.get("retry-after")),
            )
        if status != 200:
            raise EndpointRefused(
                f"the retrieval service at {self.url} answered {status}: {_excerpt(response)}. Check the URL "
                f"and that the service speaks Search-R1's /retrieve.",
                url=self.url,
            )
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise self._malformed(f"not JSON: {_excerpt(response)}") from error

    def _malformed(self, problem: str) -> EndpointError:
        return EndpointError(
            f"the retrieval service at {self.url} gave an answer that cannot be read ({problem}). Check that "
            'it speaks Search-R1\'s /retrieve: {"result": [[{"document": {"id", "contents"}, "score"}]]}.',
            url=self.url,
        )

    def _hits(self, payload: Any, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        result = payload.get("result") if isinstance(payload, dict) else None
        asked = sum(bool(query) for query in queries)
        if not isinstance(result, list) or len(result) != asked:
            raise self._malformed(f'"result" is not a list of {asked} answers')
        answers = iter(result)
        return [self._parse(next(answers), top_k) if query else [] for query in queries]

    def _parse(self, answer: Any, top_k: int) -> list[Hit]:
        if not isinstance(answer, list):
            raise self._malformed("the answer to a query is not a list")
        try:
            return [_parse_hit(item) for item in answer[:top_k]]
        except ValueError as error:
            raise self._malformed(str(error)) from error


def _endpoint(base_url: str) -> httpx.URL:
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"the retrieval service's URL is unusable: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host:
        raise ConfigError("the retrieval service's URL must look like http://127.0.0.1:8000")
    path = url.path.rstrip("/")
    return url.copy_with(path=path if path.endswith("/retrieve") else f"{path}/retrieve")


def _excerpt(response: httpx.Response) -> str:
    text = " ".join(response.text[:400].split())
    return f"{text[:200]!r}" if text else "(empty body)"


def _parse_hit(item: Any) -> Hit:
    """One element of an answer, with a score or bare; unknown fields are passed over."""
    document, score = item, 0.0
    if isinstance(item, dict) and "document" in item:
        document, score = item["document"], item.get("score", 0.0)
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError(f'"score" is {score!r}, not a number')
    return Hit(_parse_document(document), float(score))


def _parse_document(document: Any) -> Passage:
    if isinstance(document, str):  # some ports of the service give the contents themselves
        document = {"contents": document}
    if not isinstance(document, dict):
        raise ValueError(f"a document is {type(document).__name__}, not an object")
    contents, title, text = document.get("contents"), document.get("title"), document.get("text")
    if isinstance(contents, str):
        passage = Passage.from_contents("", contents)
    elif isinstance(text, str):
        passage = Passage("", title if isinstance(title, str) else "", text)
    else:
        raise ValueError('a document has no "contents"')
    identifier = document.get("id")
    if identifier is None:
        # Search-R1's BM25 server leaves ids out; the same passage must get the same id in each answer.
        identifier = hashlib.sha256(passage.contents.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return Passage(str(identifier), passage.title, passage.text)
