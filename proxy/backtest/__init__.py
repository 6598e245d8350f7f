"""What a policy costs and what it loses, replayed offline over sessions that happened. Reads, never writes.

    histories     sessions: from the store, or from files of chat messages
    synthetic     a made-up agent whose cost can be reckoned by hand
    counted       a history with its tokens, ready for replaying
    replay        a history sent again, request by request, under a strategy; a policy is one
    baselines     the other strategies: what others do, and doing nothing
    cache         a provider's prompt cache, simulated
    price         what tokens cost: a model's prices, or those of a class of models
    recall        future-reference recall: which values later tool calls really used are still sent
    clairvoyant   a clearer that knows the future: the bound that no real one can beat
    comparison    all of that put together: every history under every strategy, beside no trimming
    figures       what came of it
    sheets        the same as tables of text; `page` as HTML, `document` as JSON

It stands beside `exchange`: it decides with the same engine, and asks no upstream.
"""

from __future__ import annotations

from proxy.backtest.baselines import CLAIRVOYANT, PREFIX, baseline, every_baseline
from proxy.backtest.cache import PromptCache, Rule, Segment
from proxy.backtest.comparison import Backtest
from proxy.backtest.document import as_data
from proxy.backtest.histories import History, read_file, stored
from proxy.backtest.page import page
from proxy.backtest.price import PriceClass, class_of, standard_classes
from proxy.backtest.replay import PolicyStrategy, Strategy
from proxy.backtest.sheets import Sheet, session_sheets, sheets, usual
from proxy.backtest.synthetic import synthetic_agents

__all__ = [
    "CLAIRVOYANT",
    "PREFIX",
    "Backtest",
    "History",
    "PolicyStrategy",
    "PriceClass",
    "PromptCache",
    "Rule",
    "Segment",
    "Sheet",
    "Strategy",
    "as_data",
    "baseline",
    "class_of",
    "every_baseline",
    "page",
    "read_file",
    "session_sheets",
    "sheets",
    "standard_classes",
    "stored",
    "synthetic_agents",
    "usual",
]
