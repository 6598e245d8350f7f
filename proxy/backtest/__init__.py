"""Measures what a policy costs and loses by replaying recorded sessions offline. Nothing is written.

histories     sessions to replay: from the store, from files, or synthetic
cost          the cost of prompts: a simulated prompt cache, and classes of prices
recall        the values that later tool calls used, and whether they are still sent
replay        replays a history, request by request, under a strategy: a policy or a baseline
comparison    replays every history under every strategy and compares with no trimming; start here
report        the result as tables, HTML and JSON
suggest       finds the cheapest policy that keeps enough
"""

from __future__ import annotations

from proxy.backtest.comparison import Backtest, BacktestResult
from proxy.backtest.cost import CacheRule, PriceClass, PromptCache, Segment, class_of, price_class, standard_classes
from proxy.backtest.histories import SessionHistory, read_file, read_files, stored, synthetic_agents
from proxy.backtest.replay import NONE, ORACLE, PREFIX, PolicyStrategy, Strategy, baseline, every_baseline
from proxy.backtest.report import as_data, headlines, main_prices, page, percent, report_tables, session_tables
from proxy.backtest.suggest import RECALL, candidates, suggested
