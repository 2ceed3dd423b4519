"""``pynixlkv bench``: how fast bytes move here, beside what the machine and UCX allow.

`cases` says what is measured, `movers` holds what moves the bytes, `side` is the process that each
of the two sides runs, `perftest` runs UCX's own measurement, and `run` leads them.
"""
