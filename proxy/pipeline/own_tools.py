"""Tools of the proxy's own in one exchange: what they answer, and the rounds that the client is not shown."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from proxy.dialects import Call, Dialect, Message, OwnCalls
from proxy.pipeline.background import TRIMMING, compute
from proxy.pipeline.prepare import unused
from proxy.pipeline.relay import Answered, OwnCall
from proxy.pipeline.settle import Exchange
from proxy.recall import OwnTools, Recall, RecallBranch, sent_whole
from proxy.trimming import Hidden, compaction
from proxy.upstream import Answer

MOST_ASKS: Final = 3  # how often upstream is asked again for one reply
MOST_CALLS: Final = 8  # calls of one block that are answered: each may take as long as a search does
TOO_MANY: Final = "These are too many calls at once: this one was not answered. Ask again, for less."
TOO_LONG: Final = "What this call found is too long to be shown here. Ask again, for fewer lines of it."
"""What a call is told whose answer made the request too long for the model."""
BEGUN: Final = (
    "A summary of the older part of this conversation is being made. It takes the place of that part in one "
    "of the next requests; until then nothing changes. Go on with the task."
)
NOTHING_TO_SUM_UP: Final = (
    "There is nothing yet that a summary would make shorter. Nothing was changed. Go on with the task."
)


def own_tools(exchange: Exchange, recall: Recall) -> OwnTools:
    """Return the tools that this exchange offers, with what answers them."""
    prepared, history = exchange.prepared, exchange.prepared.history
    fresh = tuple([body.message for body in history.fresh])
    end = history.entries[-1].position + 1 if history.entries else history.start
    branch = RecallBranch(
        key=prepared.key,
        tip=history.arrival.base,
        depth=end - len(fresh),
        fresh=fresh,
        whole=sent_whole(history.entries, exchange.report.plan.view),
    )
    return OwnTools(prepared.own_tools, recall, branch, partial(_request_summary, exchange))


async def _request_summary(exchange: Exchange) -> str:
    """Note that the model asked for a summary, which is begun when the exchange is settled."""
    prepared, history = exchange.prepared, exchange.prepared.history
    policy = prepared.context.policy
    if policy is None:
        return NOTHING_TO_SUM_UP
    cut = history.standing.cut if history.standing is not None else None
    request = await compute(
        TRIMMING * history.size, compaction, history.entries, policy, prepared.planning, cut, start=history.start
    )
    exchange.requested_summary = request or unused(history.ready_summary, cut)
    return NOTHING_TO_SUM_UP if exchange.requested_summary is None else BEGUN


AnswerCall = Callable[
    [Call], Awaitable[str]
]  # returns the text of a result; what goes wrong is said in it, never raised
AskAgain = Callable[[Sequence[Message]], Awaitable[Answer]]
"""Sends the view with these messages at its end. Raises a `PalimpsestError` where there is no answer."""
Form = Callable[[Message, bool], Message]  # returns a reply as a request carries it; the flag says that it broke off


class OwnRound(Struct, kw_only=True):
    """A reply with calls of the proxy's tools. All but the last of an exchange have no other calls."""

    message: Message  # as it is sent back
    results: tuple[Message, ...]
    shortened: bool = False  # whether its results gave way to a text that says that they are too long


class Rounds:
    """What happens behind one reply. Used once."""

    def __init__(
        self, dialect: Dialect, names: Collection[str], answer_call: AnswerCall, ask_again: AskAgain, form: Form
    ) -> None:
        """Answer calls of the tools `names` with `answer_call`."""
        self.dialect = dialect
        self.names = names
        self._answer_call = answer_call
        self._ask_again = ask_again
        self._form = form
        self._rounds: list[OwnRound] = []
        self._mixed: OwnRound | None = None
        self._asks = 0
        self.answered: list[OwnCall] = []  # every call that was answered, in order

    def __len__(self) -> int:
        """Return how many rounds the client was not shown."""
        return len(self._rounds)

    @property
    def may_ask(self) -> bool:
        """Whether upstream may be asked once more."""
        return self._asks < MOST_ASKS

    def note(self, answered: Answered) -> None:
        """Note in `answered` what happened in these rounds."""
        answered.own_calls, answered.asked_again = tuple(self.answered), self._asks > 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """The rounds, as they are sent: each a reply with its calls, and their results."""
        return _messages_of(self._rounds)

    async def answer(self, calls: OwnCalls) -> None:
        """Answer all calls of a reply that calls only the proxy's tools."""
        self._rounds.append(await self._answer(calls))

    async def answer_last(self, calls: OwnCalls) -> None:
        """Answer the proxy's calls of the last reply: one that calls tools of the client's, too.

        Where the provider may hold the reply, those of any: what goes on from it must bring their results.
        """
        if calls.own and (calls.others or self.dialect.requests.state_fields):
            self._mixed = await self._answer(calls)

    async def ask(self) -> Answer | None:
        """Ask upstream again with the results, and with shorter ones where those are too long for it.

        Returns the answer, whatever its status, to be closed by the caller; None: it may not be asked again.
        Raises a `PalimpsestError` where there is no answer.
        """
        while self.may_ask:
            self._asks += 1
            answer = await self._ask_again(self.messages)
            try:
                too_long = False
                if answer.status >= 400:
                    body, overflow_of = await answer.read(), self.dialect.requests.overflow_of
                    too_long = await compute(len(body), overflow_of, answer.status, body) is not None
            except BaseException:  # cancelled too: nobody else holds the answer yet, and it occupies a connection
                await answer.aclose()
                raise
            if not (too_long and self._shorten()):
                return answer
            await answer.aclose()
        if self._rounds and self.dialect.requests.state_fields:  # the provider holds it as the last reply
            self._mixed = self._rounds.pop()
        return None

    def hidden(self, reply: Message, last: Message, *, partial: bool) -> Hidden | None:
        """Return what is sent with the reply from now on; None where the client was shown everything.

        `reply` is the whole reply, as the client has it; `last` its last round without calls of the proxy's.
        """
        if self._mixed is not None:
            return Hidden(before=self.messages, reply=self._mixed.message, after=self._mixed.results, tokens=0)
        kept = list(self._rounds)
        sent = self._form(last, partial)
        while kept and not (sent.text or sent.has_content or sent.calls):
            # It said nothing by itself, which no provider takes: what was said before it is its own.
            sent = self._form(last.with_content_of(kept.pop().message), partial)
        if not kept:
            return None
        is_all = sent.data == self._form(reply, partial).data
        return Hidden(before=_messages_of(kept), reply=None if is_all else sent, after=(), tokens=0)

    async def _answer(self, calls: OwnCalls) -> OwnRound:
        results: list[Message] = []
        for number, call in enumerate(calls.own):
            began = time.monotonic()
            text = await self._answer_call(call) if number < MOST_CALLS else TOO_MANY
            took = round((time.monotonic() - began) * 1000, 2)
            self.answered.append(OwnCall(tool=call.name, ms=took, chars=len(text), round=len(self._rounds) + 1))
            results.append(self.dialect.result(call.id, text))
        return OwnRound(message=self._form(calls.message, False), results=tuple(results))

    def _shorten(self) -> bool:
        """Put a short text in the place of the newest results that are whole; tell whether there are any."""
        for number, made in reversed(list(enumerate(self._rounds, 1))):
            if not made.shortened:
                made.results = tuple([result.with_text(TOO_LONG) for result in made.results])
                made.shortened = True
                self.answered = [
                    replace(call, error=TOO_LONG) if call.round == number else call for call in self.answered
                ]
                return True
        return False


def _messages_of(rounds: Sequence[OwnRound]) -> tuple[Message, ...]:
    return tuple([message for made in rounds for message in (made.message, *made.results)])
