"""Tools that the model is offered beside the client's, and that the proxy answers itself.

`recall_context` reads again what was trimmed; `compress_chat_history` asks for a summary. What is offered
depends on the request alone, and what is read is one session's: the asker's own.
"""
