"""What a proxy counts, for Prometheus. No label ever holds what a caller said."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from caddie_sdk.errors import MissingExtra

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
except ImportError as error:
    raise MissingExtra("the proxy", "proxy") from error

if TYPE_CHECKING:
    from caddie_sdk.relay.exchange import Exchange

log = logging.getLogger("caddie.proxy")

_KNOWN = ("/v1/chat/completions", "/v1/responses", "/v1/models", "/v1/embeddings", "/v1/completions")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Counts of one proxy. Also the relay's observer."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        r = self.registry
        self._requests = Counter("caddie_requests", "Requests answered.", ["path", "status"], registry=r)
        self._seconds = Histogram("caddie_request_seconds", "Time per request.", ["path"], buckets=_SECONDS, registry=r)
        self._in_flight = Gauge("caddie_requests_in_flight", "Requests being worked on.", registry=r)
        self._unadopted = Counter("caddie_unadopted", "Requests passed on unread, without a critic.", registry=r)
        self._consultations = Counter(
            "caddie_consultations", "Consultations.", ["control", "trigger", "status"], registry=r
        )
        self._critic_seconds = Histogram(
            "caddie_consultation_seconds", "Time per consultation.", buckets=_SECONDS, registry=r
        )
        self._tokens = Counter("caddie_tokens", "Tokens, as the servers told them.", ["who", "kind"], registry=r)

    def page(self) -> bytes:
        """All counts, in Prometheus' text form."""
        return generate_latest(self.registry)

    def in_flight(self) -> AbstractContextManager[None]:
        """Counts a request as being worked on."""
        return self._in_flight.track_inprogress()

    def request(self, path: str, status: int, seconds: float) -> None:
        """A request is over."""
        label = path if path in _KNOWN else "other"  # any path may be asked for; labels must stay few
        self._requests.labels(label, str(status)).inc()
        self._seconds.labels(label).observe(seconds)

    def unadopted(self, reason: str) -> None:
        """A request went upstream as it was."""
        log.info("passed on without a critic: %s", reason)
        self._unadopted.inc()

    def finished(self, exchange: Exchange) -> None:
        """A relayed request was answered."""
        report = exchange.report() or {"consultations": ()}
        for record in report["consultations"]:
            self._consultations.labels(record["control"], record["trigger"], record["status"]).inc()
            self._critic_seconds.observe(record["seconds"])
        for who, spent in zip(("agent", "critic"), exchange.spent(), strict=True):
            self._tokens.labels(who, "prompt").inc(spent.prompt_tokens)
            self._tokens.labels(who, "completion").inc(spent.completion_tokens)
            self._tokens.labels(who, "cached").inc(spent.cached_tokens)
