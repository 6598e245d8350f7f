"""The proxy's own tools. The proxy offers them to the model in addition to the client's tools, and answers their calls.

`recall_context` reads content that was trimmed from the session; `compress_chat_history` requests a summary.

    answering   the tools: their definitions, their arguments, their answers; start here
    search      finds the messages of a conversation that match a query
    render      refs, lines and pages; the text of an answer
"""

from __future__ import annotations

from proxy.recall.answering import COMPRESS, RECALL, OwnTools, Recall, RecallBranch, definitions, offered, sent_whole
from proxy.recall.render import REF_DIGITS, REF_PREFIX, chosen, name_in, pattern_of, ref_of, referred, span_of
