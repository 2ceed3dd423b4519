"""Fail if a test was skipped, or if a folder of tests that any machine can run did not run.

Only tests/gpu, which needs an accelerator, may skip.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import chain
from pathlib import Path

MUST_RUN = ("unit", "native", "integration", "bench", "cuda")


def main(*reports: Path) -> int:
    """Print how many tests of each folder ran and return the exit status."""
    ran: Counter[str] = Counter()
    failures = []
    for case in chain.from_iterable(ET.parse(report).iter("testcase") for report in reports):
        where = case.get("classname", "").split(".")
        layer = where[1] if where[0] == "tests" and len(where) > 1 else where[0]
        skipped = case.find("skipped")
        if skipped is None:
            ran[layer] += 1
        elif layer != "gpu":
            failures.append(
                f"{case.get('classname')}.{case.get('name')} was skipped: {skipped.get('message')}"
            )
    failures += [f"no test of layer {layer} ran" for layer in MUST_RUN if not ran[layer]]
    print("ran " + ", ".join(f"{count} {layer}" for layer, count in sorted(ran.items())))
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
