"""Telemetry of the process: log lines (`log`), metrics for Prometheus (`metrics`), and traces (`tracing`).

`tracing` sends traces and metrics to OpenTelemetry. It is imported only if that is configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.errors import ConfigurationError
from proxy.telemetry.log import log_exchange, set_level, set_up_logging
from proxy.telemetry.metrics import BUCKETS, ExchangePlaces, Meters, shared_memory

if TYPE_CHECKING:
    from proxy.telemetry.tracing import Tracing


def tracing_class() -> type[Tracing]:
    """Import and return `Tracing`. Raises `ConfigurationError` if OpenTelemetry is not installed."""
    try:
        from proxy.telemetry.tracing import Tracing  # noqa: PLC0415 - see above
    except ImportError as why:
        raise ConfigurationError(
            "telemetry.otlp_endpoint needs OpenTelemetry, which is not installed: pip install 'palimpsest[otel]'."
        ) from why
    return Tracing
