"""What is left of a long text when it goes: the values in it that a later step is most likely to need.

    readable      the text under its wrapping: escapes, tags and colours taken off; of a long one its ends
    candidates    what of it may be kept, and what that is worth
    digest        the best of them within so many characters, put under their labels
    stub          what stands in the place of a tool result, or of a call's arguments

A digest is a function of the text, of the words that stand elsewhere anyway, and of a number of
characters. Nothing here knows a message or a policy.
"""

from proxy.trimming.digest.digest import digest_of, words_of
from proxy.trimming.digest.stub import digest_in, shorter_arguments, shorter_text, stub_of

__all__ = ["digest_in", "digest_of", "shorter_arguments", "shorter_text", "stub_of", "words_of"]
