"""Facts about models: context windows, prices, and the cache rules of their providers.

    prices      prices in dollars, the cost of an exchange, and the published price list
    catalogue   Catalogue: all facts about a model; the operator's settings come first

Nothing here uses the network. The price list is loaded when it is first needed, not on import.
"""

from __future__ import annotations

from proxy.models.catalogue import COMMON_OUTPUT, Catalogue, ModelFacts
from proxy.models.prices import Dollars, DollarStep, Used, cost, cost_of, input_cost, used
