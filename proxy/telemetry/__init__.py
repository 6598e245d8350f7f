"""What the process reports about itself: its log lines (`log`), and figures for Prometheus (`metrics`)."""

from __future__ import annotations

from proxy.telemetry.log import log_exchange, set_level, set_up_logging
from proxy.telemetry.metrics import BUCKETS, Meters, shared_memory
