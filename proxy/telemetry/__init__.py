"""What the process reports about itself: its log lines (`log`)."""

from __future__ import annotations

from proxy.telemetry.log import log_exchange, set_level, set_up_logging
