"""What travels between client and upstream, as bytes and plain data. Pure: no input or output, no clock.

messages    one chat message, as the JSON text it arrived as
facts       what is known of a message's text once it was read
generations what a bounded memory holds, young and old
canonical   the form of a message by which it is recognised; never sent
request     a request beside its bytes, and the body that goes upstream
refusals    why a request cannot be read
overflow    whether an error says that a request was too large for the model
marks       explicit cache breakpoints
cache_key   the name under which a provider's cache finds a session again
fields      the fields of an object as text
headers     names, what may pass in which direction, how values are encoded
sse         a stream of bytes as server-sent events, byte for byte
completion  the replies that a body, or the chunks of a stream, hold
deltas      the message that the deltas of a stream amount to
reader      values of JSON text that a stranger wrote
writer      JSON text of any value, however deep
shapes      objects and arrays among parsed JSON
"""
