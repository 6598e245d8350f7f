"""The configuration: what may be set, where it comes from, and what is said when it is wrong.

    model        the settings themselves, one frozen model for each section of the file
    values       kinds of values that several sections share (keys, addresses, names)
    document     a YAML file with the line of each of its values
    environment  the variables `PALIMPSEST_…`
    load         defaults < file < environment < command line; and the JSON Schema of the file
    problems     a line for each mistake: where it stands and what was allowed
    policies     which policy serves a request
    inheritance  what a policy takes over of the one that it extends
    layers       one mapping laid over another
    reload       follows the file while the process serves

Only this floor reads settings from the environment. It knows nothing of requests, stores and upstreams.
"""
