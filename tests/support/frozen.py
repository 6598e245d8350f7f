"""Imported last by the process that others are forked from: what it has imported is no garbage of theirs.

The program looks for garbage once when it starts, and then no more in what it has imported. That takes a fifth of a
second of processor time, which each process would spend on the same modules.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
