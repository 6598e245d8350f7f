"""How many tokens a text or a message has.

    vocabulary   OpenAI's vocabularies, shipped with the package: exact, for any text
    estimate     the same by classes of characters, where no vocabulary is wanted or can be read
    cache        counts that are known already, bounded in size
    calibration  how many tokens upstream counts for one of these, by model
    counter      what everybody else calls: texts, messages, JSON, by the name of the model

Nothing here touches the network, and nothing is built when a module is imported.
"""

from __future__ import annotations

from proxy.tokens.calibration import Calibration, learnt, rounded
from proxy.tokens.counter import MESSAGE_TOKENS, TokenCounter

__all__ = ["MESSAGE_TOKENS", "Calibration", "TokenCounter", "learnt", "rounded"]
