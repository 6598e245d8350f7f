"""How many tokens a text or a message has.

    vocabulary    tokens of a text: exact by OpenAI's vocabularies, shipped with the package, or estimated
    counter       TokenCounter: texts, messages and JSON by the name of the model, with a cache; and Calibration,
                  how many tokens an upstream counts for one of ours, by model

Nothing here uses the network, and importing a module builds nothing.
"""

from __future__ import annotations

from proxy.tokens.counter import MESSAGE_TOKENS, Calibration, TokenCounter, learnt, rounded
