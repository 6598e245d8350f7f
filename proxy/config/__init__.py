"""The configuration: what may be set, where it comes from, and what is said when it is wrong.

    model        the settings themselves, one frozen model for each section of the file
    values       kinds of values that several sections share (keys, addresses, names)
    document     a YAML file with the line of each of its values
    environment  the variables `PALIMPSEST_…`
    load         defaults < file < environment < command line; and the JSON Schema of the file
    problems     a line for each mistake: where it stands and what was allowed
    policies     which policy serves a request
    inheritance  what a policy takes over of the one that it extends
    layers       one mapping laid over another
    reload       follows the file while the process serves

Only this floor reads settings from the environment. It knows nothing of requests, stores and upstreams.
"""

from __future__ import annotations

from proxy.config.load import Loaded, Source, load, schema_of
from proxy.config.model import (
    AuthKey,
    AuthSettings,
    Breakpoints,
    Matching,
    ModelCache,
    ModelPrices,
    ModelRule,
    PriceStep,
    ReasoningMode,
    Route,
    SessionSettings,
    Settings,
    SummarizerSettings,
    TokenMethod,
    UpstreamSettings,
    VirtualToolSettings,
)
from proxy.config.policies import BUILT_IN, BUILT_IN_NAME, OFF, Policies, select_policy, with_built_in
from proxy.config.reload import Reload, Takes, hears_hangup
from proxy.config.values import POSTGRES_DRIVERS, STATEMENT_CACHE, StoreUrl, store_url

__all__ = [
    "BUILT_IN",
    "BUILT_IN_NAME",
    "OFF",
    "POSTGRES_DRIVERS",
    "STATEMENT_CACHE",
    "AuthKey",
    "AuthSettings",
    "Breakpoints",
    "Loaded",
    "Matching",
    "ModelCache",
    "ModelPrices",
    "ModelRule",
    "Policies",
    "PriceStep",
    "ReasoningMode",
    "Reload",
    "Route",
    "SessionSettings",
    "Settings",
    "Source",
    "StoreUrl",
    "SummarizerSettings",
    "Takes",
    "TokenMethod",
    "UpstreamSettings",
    "VirtualToolSettings",
    "hears_hangup",
    "load",
    "schema_of",
    "select_policy",
    "store_url",
    "with_built_in",
]
