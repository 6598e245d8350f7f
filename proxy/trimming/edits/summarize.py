"""`summarize`: replaces older rounds with one summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Final, Literal, Self, TypeAlias

import orjson
from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field, model_validator

from proxy.trimming.draft import Draft, clipped
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change, Summary, SummaryRequest, SummaryRole
from proxy.trimming.settings import NO_TRUTH_VALUE, Natural, Positive, Share, Target, contradiction
from proxy.trimming.statistics import DETAILS, Language, Statistics, statistics_of

Mode: TypeAlias = Literal["model", "statistics"]

_REASON: Final = "it is summed up"
_RECIPE_BYTES: Final = 6
LEAST_ROOM: Final = 120  # with fewer tokens no model is asked; heading and preface alone take about 50
_IN_THE_RECIPE: Final = frozenset({"heading", "prompt", "language", "max_tokens", "max_generations"})
_OF_A_MODEL: Final = frozenset({"prompt", "verbatim_user_tokens", "soft", "max_generations"})


class Beginning(Struct, frozen=True, kw_only=True):
    """A beginning of the log that a summary may cover."""

    stop: int  # place after its last message
    until: int  # position of the first message after it
    messages: int  # number of its messages that are sent and not protected
    tokens: int  # their tokens
    rounds: int  # number of whole rounds with such messages
    new_messages: int  # unprotected messages that no summary covers yet, including dropped ones
    new_tokens: int  # their tokens if nothing were trimmed


class Summarize(BaseEdit, frozen=True):
    """Replaces older rounds with one summary. The newest `keep_rounds` whole rounds stay.

    With a limit (`lower`, or else the policy's target), only as many of the oldest rounds are replaced as needed to get
    within it. Without a limit, all older rounds are replaced. If there are too few, nothing changes. Protected messages
    stay, after the summary. With `keep_rounds: 0`, spans of the current round are replaced too. The next summary is
    made from the current one and the newly covered messages.

    With `mode: statistics`, code makes the summary at once: it counts and quotes. With `mode: model`, a model writes it
    in the background, from a part of the trigger on (`soft`). It covers what was said, including what other edits
    have dropped. It is used at the next trim; until then nothing changes.

    At a trim, a model's summary is used even if everything it covers was dropped before, and the view grows: the edits
    after it make room. It must make the view smaller in two cases: if no edit makes room (the view would end above the
    trigger), and if it was requested between two trims.
    """

    type: Literal["summarize"] = "summarize"
    """Name of the edit."""
    mode: Mode
    """How the summary is made. `model`: a model writes it. `statistics`: code counts and quotes, without a model."""
    upper: Positive | None = None
    """Summarize only above this number of tokens, instructions and tools included. If unset, the trigger decides."""
    lower: Positive | None = None
    """Number of tokens to get within, counted like `upper`. Used instead of the policy's target."""
    budget_ratio: Share = 0.26
    """Maximum size of the summary, as a part of what `lower` or the target leaves after instructions and tools. A
    model's summary also has fewer tokens than its sources: the messages, dropped or not, and the previous summary. None
    is made if that leaves fewer than 120 tokens."""
    min_messages: Natural = 20
    """Minimum messages of a session for its first summary."""
    min_new_messages: Natural = 10
    """Minimum messages that a further summary must add."""
    growth_ratio: Annotated[float, Field(ge=0, allow_inf_nan=False), NO_TRUTH_VALUE] = 0.5
    """A further summary is made only if what it adds has more than this part of the current summary's tokens."""
    keep_rounds: Natural = 10
    """Number of newest whole rounds of the history to keep. The current one is not counted. With 0, only the newest
    span of the current round stays, and what the policy's `keep` names."""
    max_tokens: Positive = 1500
    """Maximum tokens that a model may write. What code adds verbatim comes on top, within `budget_ratio`. With
    `mode: statistics`, maximum tokens of the summary."""
    verbatim_user_tokens: Natural | None = None
    """Maximum tokens of the user's own messages to include verbatim. If unset, a quarter of what `budget_ratio` allows;
    short messages may take twice that. For `mode: model`."""
    role: Literal["auto", "system", "user", "merge"] = "auto"
    """Where the summary is sent. `merge`: at the end of the instructions. `system` or `user`: after them, as a system
    or a user message. `auto`: as `merge`."""
    heading: Annotated[str, Field(min_length=1, max_length=200)] = "Archived Session Summary"
    """First line of the summary."""
    prompt: str | None = None
    """What the model is asked to write, instead of the default sections. For `mode: model`."""
    language: Literal["auto", "en", "zh"] = "auto"
    """Language of the summary. `auto` uses Chinese if user and assistant speak it, else English."""
    soft: Share = 0.8
    """Part of the trigger (and of `upper`) above which a summary is prepared. For `mode: model`."""
    max_generations: Positive = 5
    """Number of summaries that are each made from the previous one. After that, one is made from all messages again.
    For `mode: model`."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.upper is not None and self.lower is not None and self.lower > self.upper:
            raise contradiction(f"this is above upper ({self.upper}), the most it may be", "lower")
        return self

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Settings for `mode: model` that were given with another mode."""
        if self.mode == "model":
            return {}
        return {
            name: f"{name} decides nothing with mode: statistics"
            for name in sorted(self.model_fields_set & _OF_A_MODEL)
        }

    @cached_property
    def recipe(self) -> str:
        """A hash of the settings that shape a summary, as 12 hexadecimal digits.

        A summary may be made from a predecessor with the same recipe.
        """
        content = self.model_dump(mode="json", include=set(_IN_THE_RECIPE))
        return blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=_RECIPE_BYTES).hexdigest()

    def is_done(self, draft: Draft) -> bool:
        """Tell whether the view is within `lower`, or else the policy's target, and no requested summary is ready."""
        return draft.within(self._aim) and not self._is_asked(draft)

    @property
    def _aim(self) -> Target | None:
        return Target(tokens=self.lower) if self.lower is not None else None

    def apply(self, draft: Draft) -> Iterator[Change | Summary | SummaryRequest]:
        """Replace older rounds if the conditions are met; if a model has yet to write the summary, request it."""
        upper = draft.limit(Target(tokens=self.upper)) if self.upper is not None else None
        limit = draft.limit(self._aim)
        above = all(least is None or draft.total > least for least in (upper, limit))
        if not above and not self._is_asked(draft):
            return
        if self.mode == "statistics":
            summary = self._by_statistics(draft, limit)
        else:
            summary = self.ready(draft, trimming=above and not draft.tight)
            if summary is None and above and (request := self.request(draft, urgent=True)) is not None:
                yield request
        if summary is not None:
            yield summary
            for place in _covered(draft, summary.until):
                yield draft.removing(place, self.type, _REASON)

    def ready(self, draft: Draft, *, trimming: bool = False) -> Summary | None:
        """Return the summary by a model that can be used now, or None.

        It must cover more than the current one and make the view smaller. With `trimming`, the log is trimmed anyway
        and other edits make room: then it may make the view larger, but must be smaller than the messages it covers
        (dropped ones included) and within `budget_ratio`.
        """
        made, current = draft.ready_summary, draft.summary
        if self.mode != "model" or made is None or made.until > draft.end:
            return None
        if current is not None and made.until < current.until + (current.kind == "model"):
            return None
        summary = Summary(
            text=made.text,
            role=self._role,
            until=made.until,
            tokens=0,
            kind="model",
            covered_messages=made.covered_messages,
            covered_tokens=made.covered_tokens,
            generation=made.generation,
            model=made.model,
        )
        summary = replace(summary, tokens=draft.count(summary.message(draft.entries[0].message.dialect)))
        replaced = sum(draft.tokens[place] for place in _covered(draft, made.until))
        replaced += current.tokens if current is not None else 0
        if summary.tokens < replaced:
            return summary
        budget = self._budget(draft, draft.limit(self._aim))
        fits = summary.tokens < made.covered_tokens and (budget is None or summary.tokens <= budget)
        return summary if trimming and fits else None

    def request(
        self, draft: Draft, *, added: int = 0, whole: bool = False, urgent: bool = False
    ) -> SummaryRequest | None:
        """Return the summary that a model should make; None if it would not be worth it.

        With a limit, it covers the shortest beginning that gets the view and `added` more tokens within the limit.
        Without a limit, or with `whole`, it covers everything that may be covered.
        """
        limit = None if whole else draft.limit(self._aim)
        current = draft.summary.tokens if draft.summary is not None else 0
        if limit is not None and (ready := self.ready(draft)) is not None:
            left = draft.total - current - sum(draft.tokens[at] for at in _covered(draft, ready.until))
            if left + ready.tokens + added <= limit:
                return None
        found: SummaryRequest | None = None
        since, of_newest = _newest(draft)
        for each in beginnings(draft, self.keep_rounds, since):
            room = self._room_to_write(each, draft, of_newest, in_view=whole)
            if room < LEAST_ROOM or not self._is_due(each, draft, since, of_newest):
                continue
            found = SummaryRequest(stop=each.until, room=room, urgent=urgent)
            if limit is not None and draft.total - current - each.tokens + room + added <= limit:
                break
        return found

    def lacking_room(self, draft: Draft) -> int | None:
        """Return the tokens that `budget_ratio` allows a summary by a model if they are too few; else None."""
        budget = self._budget(draft, draft.limit(self._aim))
        return budget if self.mode == "model" and budget is not None and budget < LEAST_ROOM else None

    def requested_now(self, draft: Draft) -> SummaryRequest | None:
        """Return the summary that is made on explicit request; None if nothing is left that is worth it.

        The edit's conditions are ignored. It covers at least one round of the history, or a part of the current one.
        """
        history = sum(each.number > 0 for each in draft.rounds[:-1])
        rounds = min(self.keep_rounds, max(0, history - 1))
        free = {"keep_rounds": rounds, "min_messages": 0, "min_new_messages": 1, "growth_ratio": 0.0}
        return self.model_copy(update=free).request(draft, whole=True)

    def imagined(self, draft: Draft, request: SummaryRequest) -> Draft:
        """Return the draft as it would be with the requested summary at its maximum size."""
        tokens = min(request.room, self.max_tokens)
        summary = Summary(
            text="",
            role=self._role,
            until=request.stop,
            tokens=tokens,
            kind="model",
            covered_messages=0,
            covered_tokens=0,
        )
        covered = _covered(draft, request.stop)
        return draft.after([draft.removing(place, self.type, _REASON) for place in covered], summary)

    @property
    def _role(self) -> SummaryRole:
        return "merge" if self.role == "auto" else self.role

    def _is_asked(self, draft: Draft) -> bool:
        return draft.ready_summary is not None and draft.ready_summary.asked and self.ready(draft) is not None

    def _is_due(self, beginning: Beginning, draft: Draft, since: int, of_newest: int | None) -> bool:
        """Tell whether a beginning is enough for a summary by a model.

        `since` and `of_newest` are the end and the tokens of the newest summary by a model; `of_newest` is None if
        there is none.
        """
        if draft.summary is not None and beginning.until <= draft.summary.until:
            return False
        if of_newest is None:
            return beginning.messages > 0 and draft.end >= self.min_messages
        if beginning.until <= since or beginning.new_messages < self.min_new_messages:
            return False
        return beginning.new_tokens > self.growth_ratio * of_newest

    def _by_statistics(self, draft: Draft, limit: int | None) -> Summary | None:
        """Return the summary that code makes; None if it would not be worth it."""
        current = draft.summary
        if current is not None and current.kind != "statistics":
            return None  # statistics cannot be made from a model's text, and its messages are not here
        choices = [each for each in beginnings(draft, self.keep_rounds) if self._is_worth_it(each, draft)]
        sent = draft.total - (current.tokens if current is not None else 0)
        for choice in choices:
            # Take the shortest beginning that gets the view within the limit.
            left = sent - choice.tokens
            if limit is not None and left + min(self.max_tokens, self._room(choice, draft, limit)) <= limit:
                summary = self._counted(choice, draft, limit)
                if left + summary.tokens <= limit:
                    return summary
        return self._counted(choices[-1], draft, limit) if choices else None

    def _is_worth_it(self, choice: Beginning, draft: Draft) -> bool:
        current = draft.summary
        if current is None:
            return choice.messages > 0 and draft.end >= self.min_messages
        needed = max(1, self.min_new_messages)
        return choice.messages >= needed and choice.tokens > self.growth_ratio * current.tokens

    def _room(self, choice: Beginning, draft: Draft, limit: int | None) -> int:
        """Return the maximum tokens of a summary by code: fewer than what it replaces, and within the budget."""
        replaced, budget = _replaced(choice, draft), self._budget(draft, limit)
        return replaced - 1 if budget is None else min(replaced - 1, budget)

    def _room_to_write(self, beginning: Beginning, draft: Draft, of_newest: int | None, *, in_view: bool) -> int:
        """Return the maximum tokens of a summary by a model.

        They are fewer than those of its sources: the newest summary (`of_newest` tokens) and the messages since,
        including dropped ones. With a limit, they are within the budget. Without one, they are at most `max_tokens`, or
        more if the summary replaces more in the view. With `in_view`, they are also fewer than what it replaces in the
        view.
        """
        made_of = (of_newest or 0) + beginning.new_tokens
        in_the_view = _replaced(beginning, draft)
        budget = self._budget(draft, draft.limit(self._aim))
        most = max(self.max_tokens, in_the_view - 1) if budget is None else budget
        return min(most, made_of - 1, in_the_view - 1 if in_view else most)

    def _budget(self, draft: Draft, limit: int | None) -> int | None:
        """Return the tokens that a summary may take of a limit; None if there is no limit."""
        return None if limit is None else int(self.budget_ratio * max(0, limit - draft.fixed_tokens))

    def _counted(self, choice: Beginning, draft: Draft, limit: int | None) -> Summary:
        """Return the summary by statistics: those of the current summary plus those of the newly covered messages.

        The level of detail falls until the summary has room. Its first lines are always kept, even without room.
        """
        spans = [span for span in draft.spans if span.stop <= choice.stop and any(draft.free(span.start, span.stop))]
        statistics = statistics_of([entry.message for entry in draft.entries], spans, choice.rounds)
        tokens = sum(entry.tokens for span in spans for entry in draft.entries[span.start : span.stop])
        current, generation = draft.summary, 1
        if current is not None:
            statistics = Statistics.model_validate(current.state).and_then(statistics)
            tokens, generation = tokens + current.covered_tokens, generation + current.generation
        language: Language = statistics.language if self.language == "auto" else self.language
        summary = Summary(
            text="",
            role=self._role,
            until=choice.until,
            tokens=0,
            kind="statistics",
            covered_messages=statistics.messages,
            covered_tokens=tokens,
            generation=generation,
            state=statistics.model_dump(mode="json"),
        )
        room = min(self.max_tokens, self._room(choice, draft, limit))
        for detail in DETAILS:
            summary = replace(summary, text=f"{self.heading}\n{statistics.text(language, detail)}")
            summary = replace(summary, tokens=draft.count(summary.message(draft.entries[0].message.dialect)))
            if summary.tokens <= room:
                break
        return summary


COMPACTION: Final = Summarize(mode="model", keep_rounds=0)  # for requested summaries if the policy has no such edit


def _replaced(choice: Beginning, draft: Draft) -> int:
    """Return the tokens in the view that a summary would replace, including the current summary."""
    return choice.tokens + (draft.summary.tokens if draft.summary is not None else 0)


def _newest(draft: Draft) -> tuple[int, int | None]:
    """Return (end position, tokens) of the newest summary by a model; (0, None) if there is none."""
    current, made = draft.summary, draft.ready_summary
    found: tuple[int, int | None] = (0, None)
    if current is not None and current.kind == "model":
        found = (current.until, current.tokens)
    if made is not None and found[0] < made.until <= draft.end:
        found = (made.until, made.tokens)
    return found


def _covered(draft: Draft, until: int) -> list[int]:
    """Return the places that a summary up to position `until` replaces: unprotected messages of whole spans."""
    return [
        place
        for span in draft.spans
        if draft.position(span.stop - 1) < until
        for place, _ in draft.free(span.start, span.stop)
    ]


def beginnings(draft: Draft, keep_rounds: int, since: int = 0) -> Iterator[Beginning]:
    """Yield the beginnings of the log that a summary may cover, the shortest first.

    Each ends after a whole round of the history. With `keep_rounds` 0, it may also end after any span of the current
    round but the newest, since an agent may run 300 calls in one round. Protected messages are not counted. `since` is
    the position of the first message that no summary covers yet.
    """
    messages = tokens = rounds = new_messages = new_tokens = 0
    gaps = iter(clipped(draft.gaps, since, draft.end))
    gap = next(gaps, None)
    last = draft.history_before(keep_rounds)
    # Groups that are covered together: (start, stop, whether it is a whole round, whether a beginning may end there).
    groups = [(each.start, each.stop, *(each.number > 0,) * 2) for each in draft.rounds if each.stop <= last]
    if keep_rounds == 0 and draft.rounds:
        current = [span for span in draft.spans[:-1] if span.start >= draft.rounds[-1].start]
        groups += [(each.start, each.stop, False, any(draft.free(each.start, each.stop))) for each in current]
    for start, stop, is_round, ends in groups:
        free = 0
        for place in range(start, stop):
            if place in draft.protected:
                continue
            entry = draft.entries[place]
            if draft.messages[place] is not None:
                free, tokens = free + 1, tokens + draft.tokens[place]
            if entry.position >= since:
                new_messages, new_tokens = new_messages + 1, new_tokens + entry.tokens
        until = draft.position(stop)
        while gap is not None and gap.stop <= until:
            new_messages, new_tokens = new_messages + gap.messages, new_tokens + gap.tokens
            gap = next(gaps, None)
        messages += free
        rounds += bool(free) and is_round
        if ends:
            yield Beginning(
                stop=stop,
                until=until,
                messages=messages,
                tokens=tokens,
                rounds=rounds,
                new_messages=new_messages,
                new_tokens=new_tokens,
            )
