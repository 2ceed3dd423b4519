# cython: language_level=3
"""Array kernels of pynixlkv: block tables in, descriptor arrays out."""
