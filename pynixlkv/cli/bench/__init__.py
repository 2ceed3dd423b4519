"""``pynixlkv bench``: how fast bytes move here, beside what the machine and UCX allow."""
