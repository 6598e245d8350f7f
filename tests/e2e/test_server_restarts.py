"""Workers are killed and the database fails under load: replies whose end a client saw are stored exactly once.

`python -m tests.hostile.kills` does the same at a larger scale.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.hostile.kills import DATABASES, Scenario, attack
from tests.support import postgres
from tests.support.served import LONG_RUN

KILLS = Scenario()
AWAY = Scenario(exchanges=0, kill_every=0, away=30)
if not LONG_RUN:
    few = {"clients": 9, "workers": 3}  # of the three clients per API, one appends
    KILLS = replace(KILLS, **few, exchanges=90, kill_every=0.7)
    AWAY = replace(AWAY, **few, away=3, beside=0.5)
SCENARIOS = {"kills": KILLS, "away": AWAY, "away with kills": replace(AWAY, kill_every=1.0)}


@pytest.mark.parametrize("on", DATABASES)
@pytest.mark.parametrize("what", SCENARIOS)
def test_nothing_is_lost_or_stored_twice(tmp_path: Path, what: str, on: str) -> None:
    if on == "postgres" and postgres.VARIABLE in os.environ:  # noqa: TID251 - a setting of the tests
        pytest.skip("the server that is named is not ours to stop")
    scenario = SCENARIOS[what]
    outcome, log = attack(scenario, on, tmp_path)
    assert outcome.holds, outcome
    assert outcome.told.acknowledged > scenario.clients
    assert bool(outcome.told.kills) is bool(scenario.kill_every)
    assert "Traceback" not in log
