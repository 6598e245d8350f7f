"""`summarize`: older rounds become one summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from proxy.history.spans import Span
from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.edits.keep_rounds import start_of_newest
from proxy.trimming.plan import Change, Summary, SummaryRole
from proxy.trimming.section import Natural, Positive, Share, contradiction
from proxy.trimming.statistics import DETAILS, Language, Statistics, statistics_of
from proxy.trimming.trigger import Target

Mode: TypeAlias = Literal["model", "statistics"]

_REASON: Final = "it is summed up"


@dataclass(frozen=True, slots=True)
class _Choice:
    """A beginning of the log that may be covered: whole rounds."""

    stop: int
    """Place after the last message of it."""
    messages: int
    """Messages of it that are not protected and stand."""
    tokens: int
    """Their tokens."""
    rounds: int
    """Rounds in which there are any."""


class Summarize(BaseEdit, frozen=True):
    """Rounds older than the newest `keep_rounds` whole ones are replaced by one summary. Too few: no change.

    Where there is a limit (`lower`, or else the policy's target), so many of them are replaced, from the
    oldest, as it takes to get within it; without one all are. What is protected stays, after the summary. The
    next summary is made of the standing one and of the rounds that are added to it.
    """

    type: Literal["summarize"] = "summarize"
    """Which strategy this is."""
    mode: Mode
    """Who makes it: `statistics` counts and quotes, without asking a model. (`model` is not there yet.)"""
    upper: Positive | None = None
    """Only above so many tokens, those of instructions and tools included; without it the trigger decides."""
    lower: Positive | None = None
    """How far: so many tokens, counted like `upper`, in place of the policy's target."""
    budget_ratio: Share = 0.26
    """The summary has at most this part of `lower` or of the target, minus instructions and tools."""
    min_messages: Natural = 20
    """No first summary of a session of fewer messages."""
    min_new_messages: Natural = 10
    """No further summary that would add fewer messages."""
    growth_ratio: Annotated[float, Field(ge=0)] = 0.5
    """No further summary unless what it adds has more than this part of the standing one's tokens."""
    keep_rounds: Natural = 10
    """So many whole rounds of the history stay, the newest; the current one is not counted."""
    max_tokens: Positive = 1500
    """Tokens that the summary has at most."""
    role: Literal["auto", "system", "user", "merge"] = "auto"
    """Where it is sent: at the end of the instructions (`merge`), after them as a system message (`system`)
    or as a user message (`user`); `auto` merges."""
    heading: Annotated[str, Field(min_length=1, max_length=200)] = "Archived Session Summary"
    """Its first line."""
    prompt: str | None = None
    """What a model is told; of `mode: model`."""
    language: Literal["auto", "en", "zh"] = "auto"
    """Its language; `auto` takes Chinese where user and assistant speak it, else English."""
    soft: Share = 0.8
    """From this part of the trigger on a summary is prepared; of `mode: model`."""
    max_generations: Positive = 5
    """After so many summaries one is made from the originals again; of `mode: model`."""

    @field_validator("mode")
    @classmethod
    def _is_there(cls, mode: Mode) -> Mode:
        """Refuse what is not built yet."""
        if mode == "model":
            raise ValueError("summaries by a model are not available in this version; use mode: statistics")
        return mode

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        """Refuse limits that contradict each other."""
        if self.upper is not None and self.lower is not None and self.lower > self.upper:
            raise contradiction(f"this is above upper ({self.upper}), the most it may be", "lower")
        return self

    def is_done(self, draft: Draft) -> bool:
        """Tell whether the view is within `lower`, or else the policy's target."""
        return draft.within(self._aim)

    @property
    def _aim(self) -> Target | None:
        return Target(tokens=self.lower) if self.lower is not None else None

    def apply(self, draft: Draft) -> Iterator[Change | Summary]:
        """Replace older rounds, where the conditions are fulfilled."""
        upper = draft.limit(Target(tokens=self.upper)) if self.upper is not None else None
        limit = draft.limit(self._aim)
        if any(least is not None and draft.total <= least for least in (upper, limit)):
            return
        standing = draft.summary
        if standing is not None and standing.kind != "statistics":
            return
        choices = [each for each in self._choices(draft) if self._is_worth_it(each, draft)]
        if not choices:
            return
        summary = self._first_within(choices, draft, limit) if limit is not None else None
        if summary is None:
            summary = self._summary(choices[-1], draft, limit)
        yield summary
        for position, _ in draft.standing(0, len(draft.messages)):
            if draft.entries[position].position < summary.until and position not in draft.protected:
                yield draft.removing(position, self.type, _REASON)

    def _choices(self, draft: Draft) -> Iterator[_Choice]:
        """Yield what may be covered, from the least: one whole round after the other, from the oldest."""
        last = start_of_newest(draft.rounds, self.keep_rounds)
        messages = tokens = rounds = 0
        for each in draft.rounds:
            if each.stop > last:
                return
            free = [at for at, _ in draft.standing(each.start, each.stop) if at not in draft.protected]
            messages, tokens = messages + len(free), tokens + sum(draft.tokens[at] for at in free)
            if each.number > 0:
                rounds += bool(free)
                yield _Choice(each.stop, messages, tokens, rounds)

    def _is_worth_it(self, choice: _Choice, draft: Draft) -> bool:
        """Tell whether it is enough for a summary."""
        standing = draft.summary
        if standing is None:
            return choice.messages > 0 and draft.entries[-1].position + 1 >= self.min_messages
        needed = max(1, self.min_new_messages)
        return choice.messages >= needed and choice.tokens > self.growth_ratio * standing.tokens

    def _first_within(self, choices: Sequence[_Choice], draft: Draft, limit: int) -> Summary | None:
        """Return the summary of the least that gets within the limit; None where nothing does."""
        standing = draft.summary.tokens if draft.summary is not None else 0
        for choice in choices:
            left = draft.total - standing - choice.tokens
            if left + self._room(choice, draft, limit) <= limit:
                summary = self._summary(choice, draft, limit)
                if left + summary.tokens <= limit:
                    return summary
        return None

    def _room(self, choice: _Choice, draft: Draft, limit: int | None) -> int:
        """Return how many tokens the summary may have: fewer than what it replaces."""
        replaced = choice.tokens + (draft.summary.tokens if draft.summary is not None else 0)
        most = min(self.max_tokens, replaced - 1)
        if limit is None:
            return most
        return min(most, int(self.budget_ratio * max(0, limit - draft.fixed_tokens)))

    def _summary(self, choice: _Choice, draft: Draft, limit: int | None) -> Summary:
        """Return the summary of what stood and of what is covered now; its first lines stand in any case."""
        spans = [span for span in draft.spans if span.stop <= choice.stop and _is_covered(span, draft)]
        statistics = statistics_of([entry.message for entry in draft.entries], spans, choice.rounds)
        tokens = sum(entry.tokens for span in spans for entry in draft.entries[span.start : span.stop])
        standing, generation = draft.summary, 1
        if standing is not None:
            statistics = Statistics.model_validate(standing.state).and_then(statistics)
            tokens, generation = tokens + standing.covered_tokens, generation + standing.generation
        language: Language = statistics.language if self.language == "auto" else self.language
        role: SummaryRole = "merge" if self.role == "auto" else self.role
        summary = Summary(
            text="",
            role=role,
            until=draft.entries[choice.stop].position,
            tokens=0,
            kind="statistics",
            covered_messages=statistics.messages,
            covered_tokens=tokens,
            generation=generation,
            state=statistics.model_dump(mode="json"),
        )
        room = self._room(choice, draft, limit)
        for detail in DETAILS:
            summary = replace(summary, text=f"{self.heading}\n{statistics.text(language, detail)}")
            summary = replace(summary, tokens=draft.count(summary.message))
            if summary.tokens <= room:
                break
        return summary


def _is_covered(span: Span, draft: Draft) -> bool:
    """Tell whether anything of a span goes into a summary."""
    return any(at not in draft.protected for at, _ in draft.standing(span.start, span.stop))
