"""Ways to say the same tool output in less, each of one kind of text. None of them fails on any text.

document    JSON read and written so that no value changes
embedded    where documents stand in a text
table       records that share their keys, as a table                 nothing is lost
whitespace  terminal escapes, progress bars, blanks                   nothing that is read is lost
markup      HTML as the text that it shows                            what is lost is marked
blob        base64, hexadecimal                                       what is lost is marked
log         lines that differ only in numbers, once                   what is lost is marked
preview     a document with its long lists and texts cut              what is lost is marked

alarm       words that tell of something gone wrong
weight      about how many tokens a text has, beside another text
mark        how it is said that something is not shown

All of it takes time in proportion to the text, whatever the text is. It knows no message and no settings.
"""
