"""Tools that the model is offered beside the client's, and that the proxy answers itself.

`recall_context` reads again what was trimmed; `compress_chat_history` asks for a summary. What is read is one
session's: the asker's own.

    tools       the definitions, when they are offered, and how a call's arguments are read
    search      which messages of a conversation say what is asked for
    render      refs, lines, pages, and how the model is told what was found
    answering   calls answered from the store
"""

from __future__ import annotations

from proxy.recall.answering import OwnTools, Recall, RecallBranch, sent_whole
from proxy.recall.render import REF_DIGITS, REF_PREFIX, chosen, name_in, pattern_of, ref_of, span_of
from proxy.recall.tools import COMPRESS, RECALL, offered

__all__ = [
    "COMPRESS",
    "RECALL",
    "REF_DIGITS",
    "REF_PREFIX",
    "OwnTools",
    "Recall",
    "RecallBranch",
    "chosen",
    "name_in",
    "offered",
    "pattern_of",
    "ref_of",
    "sent_whole",
    "span_of",
]
