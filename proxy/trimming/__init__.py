"""What is sent of a history, and why: `history + policy + what is known -> plan -> view`. Pure.

    plan          the words of that sentence: entry, change, gap, cut, known, plan
    policy        a policy as the operator writes it: match, trigger, target, keep, pin, edits
    trigger       when to trim and how far: thresholds and the sizes compared with them
    section       one mapping of a policy file, and the numbers that stand in it
    edits         the edits: one file each, one list
    draft         the picture of the log that an edit looks at
    protection    what is never trimmed
    gaps          what was dropped, summed up, and the log without it
    arrival       what happens to a message the first time it is sent, and every time after
    protocol      the provider's rules about tool calls, and the repair of what breaks them
    engine        all of it together: `plan` and `bypass`

An edit looks at a draft and returns changes; the engine makes the next draft of them. Nothing here
reads or writes anything, asks a clock or a provider, or changes what it was given.
"""
