"""Array kernels of pynixlkv: block tables in, descriptor arrays out."""
