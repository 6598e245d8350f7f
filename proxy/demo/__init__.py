"""The demonstration: runs the proxy between a client that replays a recorded conversation and a practice upstream.

    upstream   a practice provider: answers from a script, refuses like a real one, simulates a prompt cache
    replay     the recording, the client, the proxy's configuration, the two runs, and the measurements
    report     the measurements as text and as JSON

It needs no key, no network and no configuration file. The caller passes in the real proxy.
"""

from __future__ import annotations

from proxy.demo.replay import CONFIG, STORE, TRIMMED, DemoOutcome, rehearse
from proxy.demo.report import as_data, report
