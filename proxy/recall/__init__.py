"""The proxy's own tools: offered to the model beside the client's, and answered by the proxy.

`recall_context` reads what was trimmed from the session; `compress_chat_history` asks for a summary.

    answering   the tools: their definitions, their arguments, their answers; start here
    search      which messages of a conversation match a query
    render      refs, lines and pages; the text of an answer
"""

from __future__ import annotations

from proxy.recall.answering import COMPRESS, RECALL, OwnTools, Recall, RecallBranch, definitions, offered, sent_whole
from proxy.recall.render import REF_DIGITS, REF_PREFIX, chosen, name_in, pattern_of, ref_of, referred, span_of
