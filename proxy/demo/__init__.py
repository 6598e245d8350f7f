"""The demonstration: the proxy between a client that replays a recorded conversation and a practice upstream.

    upstream   a practice provider: answers by a script, refuses as a real one does, simulates a prompt cache
    replay     the recording, the client, the proxy's configuration, the two runs, and what was measured
    report     the measurements as text and as JSON

It needs no key, no network and no configuration file. The caller passes the proxy in; it is the real one.
"""

from __future__ import annotations

from proxy.demo.replay import CONFIG, STORE, TRIMMED, DemoOutcome, rehearse
from proxy.demo.report import as_data, report
