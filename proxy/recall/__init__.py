"""Tools that the model is offered beside the client's, and that the proxy answers itself.

`recall_context` reads again what was trimmed; `compress_chat_history` asks for a summary. What is offered
depends on the request alone, and what is read is one session's: the asker's own.
"""

from __future__ import annotations

from proxy.recall.answering import OwnTools, Recall
from proxy.recall.branch import Branch, sent_whole
from proxy.recall.lines import chosen, pattern_of, span_of
from proxy.recall.refs import REF_DIGITS, REF_PREFIX, name_in, ref_of
from proxy.recall.tools import COMPRESS, RECALL, offered, with_tools

__all__ = [
    "COMPRESS",
    "RECALL",
    "REF_DIGITS",
    "REF_PREFIX",
    "Branch",
    "OwnTools",
    "Recall",
    "chosen",
    "name_in",
    "offered",
    "pattern_of",
    "ref_of",
    "sent_whole",
    "span_of",
    "with_tools",
]
