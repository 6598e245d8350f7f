"""Traces and metrics of exchanges for OpenTelemetry, by its conventions for generative AI. Off unless configured.

This module, and with it OpenTelemetry, is imported only if `telemetry.otlp_endpoint` is set. Data is sent by OTLP over
HTTP, in background threads. Everything else is configured by the SDK's own variables (`OTEL_…`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy import __version__

_NAME: Final = "palimpsest"
_MODELS: Final = 200  # limit on model names in metrics, since clients choose them; further ones become `other`
_OTHER: Final = "other"
_SECONDS: Final = tuple([0.01 * 2**step for step in range(14)])  # boundaries from the conventions
_TOKENS: Final = tuple([4**step for step in range(14)])
_CLOSING_MILLISECONDS: Final = 3000  # time limit of the last flush
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_CARRIED: Final = frozenset({b"traceparent", b"tracestate"})
_PROVIDERS: Final = {  # by suffix of the host name
    "openai.com": "openai",
    "anthropic.com": "anthropic",
    "openai.azure.com": "azure.ai.openai",
    "googleapis.com": "gcp.gemini",
    "deepseek.com": "deepseek",
    "groq.com": "groq",
    "mistral.ai": "mistral_ai",
    "x.ai": "x_ai",
    "perplexity.ai": "perplexity",
    "cohere.com": "cohere",
}

Headers = Sequence[tuple[bytes, bytes]]
Attribute = str | int | float | bool | Sequence[str]


class TracedExchange(Struct, frozen=True, kw_only=True):
    """The data of an ended exchange that is traced."""

    model: str
    base_url: str  # address of the API
    messages_api: bool  # whether the dialect is `messages`; decides the provider if the address is unknown
    answered_by: str | None
    stream: bool
    session: str | None
    exchange: str
    kind: str
    status: str
    policy: str
    edits: Sequence[str]
    finish_reasons: Sequence[str]
    tokens_before: int
    tokens_sent: int
    input: int | None  # tokens as the upstream reported them; None if it did not
    cached: int
    written: int
    output: int
    error: str | None  # kind of failure, if any


class Trace:
    """The span of one exchange that is in progress."""

    def __init__(self, tracing: Tracing, headers: Headers) -> None:
        """Start a span. Its parent is the span that the client's headers name, if any."""
        carrier = {
            name.lower().decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name.lower() in _CARRIED
        }
        self._tracing = tracing
        self._began = time.monotonic()
        self._first: float | None = None
        self._told: TracedExchange | None = None
        parent = _PROPAGATOR.extract(carrier)
        self._span: Span = tracing.tracer.start_span("chat", context=parent, kind=SpanKind.CLIENT)
        carried: dict[str, str] = {}
        _PROPAGATOR.inject(carried, context=set_span_in_context(self._span, parent))
        kept = [pair for pair in headers if pair[0].lower() not in _CARRIED]
        self.headers = [*kept, *[(name.encode(), value.encode("latin-1")) for name, value in carried.items()]]
        """The headers to send upstream, with this span as the parent."""

    def noting(
        self, write: Callable[[bytes], Coroutine[Any, Any, None]]
    ) -> Callable[[bytes], Coroutine[Any, Any, None]]:
        """Return a wrapper of `write` that records the time of the first piece."""

        async def noted(data: bytes) -> None:
            if self._first is None:
                self._first = time.monotonic() - self._began
            await write(data)

        return noted

    def tell(self, told: TracedExchange) -> None:
        """Set the data of the exchange at its end."""
        self._told = told

    def end(self, error: str | None = None) -> None:
        """End the span and record the metrics."""
        took, span, told = time.monotonic() - self._began, self._span, self._told
        if told is not None:
            error = error or told.error
            span.update_name(f"chat {told.model}")
            span.set_attributes(_attributes(told, self._first))
        shared: dict[str, Attribute] = {"gen_ai.operation.name": "chat"}
        if error is not None:
            shared["error.type"] = error
            span.set_status(Status(StatusCode.ERROR, error))
        if told is not None:
            self._tracing.count(told, shared, took, self._first)
        span.set_attributes(shared)
        span.end()


class Tracing:
    """Sends traces and metrics. One per process."""

    def __init__(self, endpoint: str, instance: str) -> None:
        """Send to the collector at `endpoint`. `instance` identifies this process."""
        resource = Resource.create({"service.version": __version__, "service.instance.id": instance})
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": _NAME}))
        self._spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces")))
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics"))
        self._meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self.tracer = self._spans.get_tracer(_NAME, __version__)
        meter = self._meters.get_meter(_NAME, __version__)
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration", "s", "Duration.", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self._first_chunk = meter.create_histogram(
            "gen_ai.client.operation.time_to_first_chunk",
            "s",
            "Time to the first chunk of a stream.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens; of the input, those read from the provider's cache and written to it.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )
        self._models: set[str] = set()

    def begin(self, headers: Headers) -> Trace:
        """Start the span of a request."""
        return Trace(self, headers)

    def count(self, told: TracedExchange, shared: Mapping[str, Attribute], seconds: float, first: float | None) -> None:
        """Record the metrics of an ended exchange."""
        labels = {**shared, "gen_ai.provider.name": _provider(told), "gen_ai.request.model": self._bounded(told.model)}
        if told.answered_by is not None:
            labels["gen_ai.response.model"] = self._bounded(told.answered_by)
        self._duration.record(seconds, labels)
        if told.stream and first is not None:
            self._first_chunk.record(first, labels)
        if told.input is not None:
            counts = {"input": told.input, "output": told.output, "cache_read": told.cached}
            for name, number in (counts | {"cache_creation": told.written}).items():
                self._tokens.record(number, {**labels, "gen_ai.token.type": name})

    def close(self) -> None:
        """Flush and shut down. This may take a few seconds."""
        self._spans.force_flush(_CLOSING_MILLISECONDS)
        self._spans.shutdown()
        self._meters.shutdown(_CLOSING_MILLISECONDS)

    def _bounded(self, model: str) -> str:
        if model not in self._models:
            if len(self._models) >= _MODELS:
                return _OTHER
            self._models.add(model)
        return model


def _provider(told: TracedExchange) -> str:
    host = urlsplit(told.base_url).hostname or ""
    known = [name for end, name in _PROVIDERS.items() if host == end or host.endswith(f".{end}")]
    return known[-1] if known else "anthropic" if told.messages_api else "openai"


def _attributes(told: TracedExchange, first: float | None) -> dict[str, Attribute]:
    parts = urlsplit(told.base_url)
    found: dict[str, Attribute | None] = {
        "gen_ai.provider.name": _provider(told),
        "gen_ai.request.model": told.model,
        "gen_ai.response.model": told.answered_by,
        "gen_ai.conversation.id": told.session,
        "gen_ai.response.finish_reasons": list(told.finish_reasons) or None,
        "gen_ai.usage.input_tokens": told.input,
        "gen_ai.usage.output_tokens": told.output if told.input is not None else None,
        "gen_ai.usage.cache_read.input_tokens": told.cached if told.input is not None else None,
        "gen_ai.usage.cache_creation.input_tokens": told.written if told.input is not None else None,
        "gen_ai.response.time_to_first_chunk": first if told.stream else None,
        "server.address": parts.hostname,
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        "palimpsest.exchange": told.exchange,
        "palimpsest.kind": told.kind,
        "palimpsest.status": told.status,
        "palimpsest.policy": told.policy,
        "palimpsest.edits": list(told.edits) or None,
        "palimpsest.tokens_before": told.tokens_before,
        "palimpsest.tokens_sent": told.tokens_sent,
    }
    return {name: value for name, value in found.items() if value is not None}
