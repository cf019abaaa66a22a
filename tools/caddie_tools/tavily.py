"""Web search through Tavily (https://tavily.com), by their own client. Extra `[tavily]`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import httpx

from caddie_sdk.errors import (
    ConfigError,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    EndpointUnavailable,
    MissingExtra,
)
from caddie_sdk.retry import Clients, RetryPolicy
from caddie_tools.passages import Hit, Passage, clean_query

_DEFAULT_URL = "https://api.tavily.com"
_MOST_RESULTS = 20  # Tavily's own limit


class TavilySearch:
    """Search the web, sync (`search`) or async (`asearch`). A passage's id is the page's URL.

    Retries connection failures, 5xx and 429, and nothing else; Tavily's client does not pass Retry-After on.
    The key is in no message and no repr.

    Args:
        api_key: Tavily's key; the environment's TAVILY_API_KEY if None.
        base_url: another address, such as a gateway or a test server.
        max_results: hits to ask for when a search names no `top_k`, 1 to 20.
        timeout: seconds a try may wait, at most 120.
        tries, backoff, max_wait: calls in all; seconds before the second; longest wait in seconds.
        options: passed on to Tavily's `search`, such as {"search_depth": "advanced"}.

    Raises:
        ConfigError: no key, or `max_results` out of range.
        MissingExtra: tavily-python is not installed.
    """

    def __init__(
        self,
        api_key: str | None = None,
        *,
        base_url: str | None = None,
        max_results: int = 5,
        timeout: float = 30.0,
        tries: int = 3,
        backoff: float = 0.5,
        max_wait: float = 30.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._key = (os.environ.get("TAVILY_API_KEY", "") if api_key is None else api_key).strip()
        if not self._key:
            # Tavily's client would go on without a key, slowly and within a small quota.
            raise ConfigError("Tavily needs a key: set TAVILY_API_KEY, or give api_key")
        if not 1 <= max_results <= _MOST_RESULTS:
            raise ConfigError(f"max_results must be 1 to {_MOST_RESULTS}, not {max_results}")
        self.url = (base_url or _DEFAULT_URL).rstrip("/")
        self.max_results, self.timeout = max_results, timeout
        self._options = dict(options or {})
        self._retries = RetryPolicy(tries, backoff, max_wait)
        self._tavily = _tavily()
        self._clients: Clients[Any, Any] = Clients(
            lambda: self._tavily.TavilyClient(self._key, api_base_url=self.url),
            lambda client: client.close(),
            lambda: self._tavily.AsyncTavilyClient(self._key, api_base_url=self.url),
            lambda client: client.close(),
        )

    def __repr__(self) -> str:
        return f"TavilySearch(base_url={self.url!r}, max_results={self.max_results})"

    def search(self, query: str, top_k: int | None = None) -> list[Hit]:
        """Return at most `top_k` (`max_results` if None) hits, best first; a blank query finds nothing.

        Raises:
            EndpointUnavailable: no connection, 5xx or 429, after the last try.
            EndpointTimeout: no answer within `timeout` seconds.
            EndpointRefused: bad key, used-up plan, bad request.
            EndpointError: the answer is not in Tavily's form.
        """
        request = self._request(query, top_k)
        return self._hits(self._retries.run(lambda: self._ask(request)), request) if request else []

    async def asearch(self, query: str, top_k: int | None = None) -> list[Hit]:
        """Async twin of `search`."""
        request = self._request(query, top_k)
        return self._hits(await self._retries.arun(lambda: self._aask(request)), request) if request else []

    def close(self) -> None:
        """Close the sync connections."""
        self._clients.close()

    async def aclose(self) -> None:
        """Close the sync connections and those of the running event loop."""
        await self._clients.aclose()

    def _request(self, query: str, top_k: int | None) -> dict[str, Any]:
        query, wanted = clean_query(query), self.max_results if top_k is None else top_k
        if not query or wanted < 1:
            return {}
        wanted = min(wanted, _MOST_RESULTS)
        return {**self._options, "query": query, "max_results": wanted, "timeout": self.timeout}

    def _ask(self, request: Mapping[str, Any]) -> Any:
        client = self._clients.get()
        try:
            return client.search(**request)
        except self._errors as error:
            # "from None": the original may quote the key, and a traceback would print it.
            raise self._failed(error) from None

    async def _aask(self, request: Mapping[str, Any]) -> Any:
        try:
            client = await self._clients.aget()
            return await client.search(**request)
        except self._errors as error:
            raise self._failed(error) from None

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        from requests import RequestException  # the sync client's library; always beside tavily-python

        named = self._tavily.errors
        own = (named.UsageLimitExceededError, named.ForbiddenError, named.InvalidAPIKeyError)
        # Not JSON, or JSON that is no object, which Tavily's client does not expect.
        answer = (ValueError, AttributeError, TypeError)
        return (*own, named.BadRequestError, named.TimeoutError, httpx.HTTPError, RequestException, *answer)

    def _failed(self, error: Exception) -> EndpointError:
        from requests import ConnectionError as NoConnection

        named = self._tavily.errors
        said = f" ({str(error).replace(self._key, '***')[:200]})" if str(error) else ""
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, named.UsageLimitExceededError):
            return self._error(EndpointUnavailable, f"is refusing requests for now, 429{said}", "Send fewer at once.")
        if isinstance(error, named.InvalidAPIKeyError):
            return self._error(EndpointRefused, f"does not accept the key, 401{said}", "Check TAVILY_API_KEY.")
        if isinstance(error, named.ForbiddenError):
            return self._error(EndpointRefused, f"refused{said}", "Check the plan's limits and the key's rights.")
        if isinstance(error, named.BadRequestError):
            return self._error(EndpointRefused, f"found the request bad, 400{said}", "Shorten or change the query.")
        if isinstance(error, named.TimeoutError | httpx.TimeoutException):
            late = f"gave no answer within {self.timeout:g} s"
            return self._error(EndpointTimeout, late, "Check the network, or allow a longer timeout.")
        if status is not None and status < 500:
            return self._error(EndpointRefused, f"answered {status}", "Check base_url.")
        if status is not None or isinstance(error, NoConnection | httpx.TransportError):
            what = "cannot be reached" if status is None else f"answered {status}"
            tried = f"{what}, tried {self._retries.tries} times{said}"
            return self._error(EndpointUnavailable, tried, "Check the network and base_url.")
        return self._error(EndpointError, f"gave an answer that cannot be read{said}", "Check base_url.")

    def _error(self, kind: type[EndpointError], what: str, check: str) -> EndpointError:
        return kind(f"Tavily at {self.url} {what}. {check}", url=self.url)

    def _hits(self, payload: Any, request: Mapping[str, Any]) -> list[Hit]:
        results = payload.get("results") if isinstance(payload, dict) else None
        if not isinstance(results, list):
            raise self._error(EndpointError, 'gave an answer without a list of "results"', "Check base_url.")
        return [self._hit(result) for result in results[: request["max_results"]]]

    def _hit(self, result: Any) -> Hit:
        fields = result if isinstance(result, dict) else {}
        url, title, text = fields.get("url"), fields.get("title") or "", fields.get("content")
        if not isinstance(url, str) or not isinstance(title, str) or not isinstance(text, str):
            raise self._error(EndpointError, 'gave a result without "url" and "content"', "Check base_url.")
        score = fields.get("score")
        return Hit(Passage(url, title, text), float(score) if isinstance(score, int | float) else 0.0)


def _tavily() -> Any:
    try:
        import tavily
        import tavily.errors
    except ImportError as error:
        raise MissingExtra("Web search with Tavily", "tavily") from error
    return tavily
