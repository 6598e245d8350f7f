"""What is known of models: context windows, prices, and how their providers cache.

    dollars     prices in dollars per million tokens, and what an exchange cost
    published   what the price list that comes with a package says of a model
    caches      how providers cache, by model and host
    facts       all of it, for one model
    catalogue   what everybody else asks for facts; the operator's word counts first

Nothing here touches the network, and the price list is read when it is first asked for, not when a
module is imported. It knows no request and no policy.
"""

from __future__ import annotations

from proxy.models.catalogue import COMMON_OUTPUT, Catalogue
from proxy.models.dollars import Dollars, DollarStep, cost
from proxy.models.facts import ModelFacts

__all__ = ["COMMON_OUTPUT", "Catalogue", "DollarStep", "Dollars", "ModelFacts", "cost"]
