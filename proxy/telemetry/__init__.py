"""What the process reports about itself: its log lines (`log`), figures for Prometheus (`metrics`), and traces.

`tracing` sends traces and metrics to OpenTelemetry; it is imported where that is switched on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.errors import ConfigurationError
from proxy.telemetry.log import log_exchange, set_level, set_up_logging
from proxy.telemetry.metrics import BUCKETS, ExchangePlaces, Meters, shared_memory

if TYPE_CHECKING:
    from proxy.telemetry.tracing import Tracing


def tracing_class() -> type[Tracing]:
    """Import what sends traces; raises `ConfigurationError` where OpenTelemetry is not installed."""
    try:
        from proxy.telemetry.tracing import Tracing  # noqa: PLC0415 - see above
    except ImportError as why:
        raise ConfigurationError(
            "telemetry.otlp_endpoint needs OpenTelemetry, which is not installed: pip install 'palimpsest[otel]'."
        ) from why
    return Tracing
