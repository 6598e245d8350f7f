"""The configuration: the settings, their sources, and the messages about mistakes.

    settings    the settings, one frozen model for each section of the file
    source      merges YAML file, environment and command line; `${NAME}` and `NAME_file`; the JSON Schema
    problems    formats one line for each mistake: where it is and what is allowed
    policies    the built-in policy, the choice of a policy for a request, and `extends`
    reload      watches the file while the process serves

No other package reads settings from the environment.
"""

from __future__ import annotations

from proxy.config.policies import BUILT_IN, BUILT_IN_NAME, OFF, Policies, with_built_in
from proxy.config.reload import AcceptedFile, Reload, Takes, hears_hangup
from proxy.config.settings import (
    CONNECT_TIMEOUT,
    KEY_HASH,
    LIBPQ_OPTIONS,
    POSTGRES_DRIVERS,
    STATEMENT_CACHE,
    AuthSettings,
    Breakpoints,
    Budget,
    Matching,
    ModelPrices,
    ModelRule,
    PriceStep,
    RetentionSettings,
    ServerSettings,
    SessionSettings,
    Settings,
    SummarizerSettings,
    TokenMethod,
    UpstreamSettings,
    VirtualToolSettings,
    checked_name,
    store_url,
)
from proxy.config.source import ConfigSource, Loaded, json_schema, load, policy_of
