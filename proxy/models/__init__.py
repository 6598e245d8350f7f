"""What is known of models: context windows, prices, and how their providers cache.

    prices      prices in dollars, what an exchange cost, and what the published price list says
    catalogue   Catalogue: all facts about a model; the operator's settings come first

Nothing here uses the network. The price list is read when it is first needed, not by an import.
"""

from __future__ import annotations

from proxy.models.catalogue import COMMON_OUTPUT, Catalogue, ModelFacts
from proxy.models.prices import Dollars, DollarStep, Used, cost, cost_of, input_cost, used
