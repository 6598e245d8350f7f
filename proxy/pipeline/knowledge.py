"""What trimming must be told of a request: counts, prices, the context window, how long the session was idle.

It asks the catalogue of models and the counter. It decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from proxy.dialects import Message
from proxy.models import Catalogue, ModelFacts
from proxy.tokens import Calibration, TokenCounter, learnt, rounded
from proxy.trimming import PlanningContext
from proxy.upstream import Upstream


class Knowledge:
    """What is known of models and their tokens. One for the life of the process."""

    def __init__(
        self,
        counter: TokenCounter,
        catalogue: Catalogue,
        upstream: Upstream,
        calibration: Calibration | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Count with `counter`; without `calibration` nothing is learnt from what upstream counts.

        `clock` gives seconds since 1970.
        """
        self.counter = counter
        self.clock = clock
        self.catalogue = catalogue
        """Exchanged when the configuration is read again."""
        self._upstream = upstream
        self._calibration = calibration

    def facts(self, model: str) -> ModelFacts:
        """Return what is known of the model at the upstream that serves it."""
        return self.catalogue.facts(model, self._upstream.destination(model).base_url)

    def facts_at(self, model: str, base_url: str) -> ModelFacts:
        """Return what is known of the model at an address."""
        return self.catalogue.facts(model, base_url)

    @property
    def now(self) -> int:
        """Milliseconds since 1970."""
        return int(self.clock() * 1000)

    def known(
        self,
        model: str,
        facts: ModelFacts,
        *,
        fixed: int,
        agent: str | None,
        updated_at: int | None,
        scale: float | None = None,
    ) -> PlanningContext:
        """Return what trimming must be told.

        Args:
            model: the model that is asked.
            facts: what is known of it.
            fixed: tokens of instructions and tools.
            agent: who asks.
            updated_at: when the session's last exchange ended, in milliseconds since 1970.
            scale: what was learnt of the upstream's counting in this session.
        """
        return PlanningContext(
            count=lambda message: self.counter.message(message, model),
            fixed_tokens=fixed,
            context_window=facts.context_window,
            agent=agent,
            idle=None if updated_at is None else max(0, self.now - updated_at) / 1000,
            prices=facts.prices,
            scale=1.0 if scale is None or self._calibration is None else rounded(scale),
        )

    def fixed_tokens(self, instructions: Sequence[Message], tools: bytes | None, model: str) -> int:
        """Return the tokens of what is sent beside the log."""
        tokens = sum(self.counter.messages(instructions, model)) if instructions else 0
        return tokens + (self.counter.json(tools, model) if tools is not None else 0)

    def learn(self, model: str, scale: float | None, counted: int, reported: object) -> float | None:
        """Return a session's scale with what upstream reported for a request in which `counted` were counted.

        What is learnt is kept with the session: so each process judges alike, after a restart too.
        """
        if self._calibration is None or not isinstance(reported, int) or isinstance(reported, bool):
            return scale
        self._calibration.learn(model, counted, reported)
        return learnt(scale, counted, reported)
