"""Settings that all tests share."""

import hypothesis

# Examples may take long under sanitizers, coverage and load; the test's own limit still holds.
hypothesis.settings.register_profile("pynixlkv", deadline=None)
hypothesis.settings.load_profile("pynixlkv")
