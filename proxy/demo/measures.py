"""What the demonstration measured: each request, each run, and whether what should hold does.

Plain figures and the sentences about them. How they were taken stands in `rehearsal`.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.demo.recording import Recording


@dataclass(frozen=True, slots=True)
class Step:
    """One request on its way: what the client sent, what was forwarded, what was stored afterwards."""

    turn: int
    messages: int
    """Messages that the client sent, the system prompt included."""
    tokens: int
    """Their tokens, the tools' included; like all tokens here counted by the practice upstream."""
    forwarded_messages: int
    forwarded_tokens: int
    cached_tokens: int
    """Of the forwarded ones, those that the upstream's prompt cache held, as it told the client."""
    edits: tuple[str, ...]
    """The edits that changed something in what was forwarded."""
    moved: bool
    """Whether the cut moved: the trigger fired."""
    stored: int
    """Messages on the session's branch once the reply had come."""


@dataclass(frozen=True, slots=True)
class Run:
    """The whole conversation through one session."""

    session: str
    steps: tuple[Step, ...]
    replies_equal: bool
    """Whether the client got every reply as it was recorded."""
    stored_equal: bool
    """Whether the store holds the conversation, message for message."""
    bytes_equal: bool
    """Whether the upstream received every request with the bytes that the client sent."""
    extended: bool
    """Whether every forwarded request began with all messages of the last one, unless the cut moved."""

    @property
    def tokens(self) -> int:
        """Prompt tokens that the client sent."""
        return sum(step.tokens for step in self.steps)

    @property
    def forwarded(self) -> int:
        """Prompt tokens that were forwarded."""
        return sum(step.forwarded_tokens for step in self.steps)

    @property
    def cached(self) -> int:
        """Prompt tokens that the upstream's prompt cache held."""
        return sum(step.cached_tokens for step in self.steps)

    @property
    def moves(self) -> int:
        """How many times the cut moved."""
        return sum(step.moved for step in self.steps)

    @property
    def saved_percent(self) -> float:
        """How much less was forwarded than the client sent, in per cent."""
        return round(100 * (1 - self.forwarded / self.tokens), 1)


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold."""

    claim: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the demonstration."""

    recording: Recording
    trigger: int
    """Tokens of a request above which the policy trims."""
    target: int
    """Tokens down to which it does."""
    fixed_tokens: int
    """Tokens of every request that no policy touches: instructions and tools."""
    trimmed: Run
    whole: Run
    refused: int
    """Requests that the upstream refused."""

    @property
    def checks(self) -> tuple[Check, ...]:
        """Everything that must hold."""
        both = (self.trimmed, self.whole)
        asked = sum(len(run.steps) for run in both) + self.refused
        stored = len(self.recording.log)
        moves = self.trimmed.moves
        return (
            Check(
                claim=f"requests refused by the upstream: {self.refused} of {asked}", holds=self.refused == 0
            ),
            Check(
                claim="the client got every reply as it was recorded",
                holds=all(run.replies_equal for run in both),
            ),
            Check(
                claim=f"the store holds all {stored} messages of the conversation, message for message",
                holds=all(run.stored_equal for run in both),
            ),
            Check(
                claim="under the policy less was sent on than the client sent",
                holds=moves > 0 and self.trimmed.saved_percent > 0,
            ),
            Check(
                claim=f"every request began with all of the last one, but for {moves} moves of the cut",
                holds=self.trimmed.extended,
            ),
            Check(
                claim="with X-Context-Policy: off, every request went upstream byte for byte",
                holds=self.whole.bytes_equal,
            ),
        )

    @property
    def holds(self) -> bool:
        """Whether all of it does."""
        return all(check.holds for check in self.checks)
