"""Plans between random pairs of layouts move what the reference says, and not one byte more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pynixlkv.geometry import KVCache
from pynixlkv.plan import TransferPlan
from pynixlkv.topology import held_heads, read_sources

from reference import Shape, Side, apply, check_rows, expected_bytes

NAMED_AXES = [
    *("KBHND", "KBNHD", "BKHND", "BKNHD", "BHKND", "BNKHD", "BHNC", "BNHC", "LBHNC", "LBNHC"),
    *("LKBHND", "BLHNC", "BLKNHD"),
]
LATENT_AXES = ["BND", "LBND", "BNHD", "BLND", "NBD"]


@dataclass(frozen=True)
class Model:
    kv_heads: int | None
    num_layers: int
    head_dim: int
    itemsize: int


@st.composite
def models(draw) -> Model:
    return Model(
        kv_heads=draw(st.sampled_from([None, 1, 2, 3, 4, 6, 8, 12])),
        num_layers=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 3)),
        itemsize=draw(st.sampled_from([1, 2, 4, 8])),
    )
