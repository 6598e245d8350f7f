"""The configuration: the settings, where they come from, and what is said about mistakes.

    settings    the settings, one frozen model for each section of the file
    source      YAML file, environment and command line, merged; `${NAME}` and `NAME_file`; the JSON Schema
    problems    one line for each mistake: where it is, and what is allowed
    policies    the built-in policy, which policy serves a request, and `extends`
    reload      follows the file while the process serves

Only this room reads settings from the environment.
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
