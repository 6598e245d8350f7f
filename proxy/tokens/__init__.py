"""Token counting for texts and messages.

    vocabulary    counts the tokens of a text: exactly with OpenAI's vocabularies, which the package contains, or
                  by an estimate
    counter       TokenCounter: counts texts, messages and JSON by model, with a cache; and Calibration: the ratio
                  of the upstream's counts to ours, by model

Nothing here uses the network, and importing a module builds nothing.
"""

from __future__ import annotations

from proxy.tokens.counter import MESSAGE_TOKENS, Calibration, TokenCounter, learnt, rounded
