"""``pynixlkv bench``: how fast bytes move here, beside what the machine and UCX allow.

`cases` says what is measured, `transfers` has both ends of each way to move bytes, `perftest` runs
UCX's own measurement, and `run` leads them.
"""
