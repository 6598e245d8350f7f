"""What one summary hands to the next, as JSON. It does not know how either of them is made."""

from __future__ import annotations

from pydantic import BaseModel

from proxy.summaries.facts import Facts


class State(BaseModel, frozen=True):
    """Of a summary that a model made: the next one is made of this and of the messages since.

    Its JSON form (`model_dump(mode="json")`) is kept with the summary.
    """

    facts: Facts
    """What code took from all the messages that it covers."""
    told: str
    """What the model wrote, without what code added."""
