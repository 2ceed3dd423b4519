"""What pynixlkv is compared with."""
