"""What passes for an array of integers, and what does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pynixlkv._arrays import first_outside, integers
from pynixlkv.errors import ConfigError, PlanError


@pytest.mark.parametrize(
    ("values", "columns", "text"),
    [
        ([1, True], None, "ids holds True at index 1; expected integers"),
        ([[1, 2], [3, np.True_]], 2, r"ids\[1\] holds True at index 1; expected integers"),
        ([0.5], None, r"ids has shape \(1,\) and dtype float64; expected one dimension"),
        ([2**64], None, "dtype object; expected one dimension of integers"),
        ([[1], [2, 3]], None, "ids cannot be read as an array of integers"),
        (np.zeros(2), None, "dtype float64"),
        ([1, 2], 2, r"ids has shape \(2,\) .* expected integers of shape \(n, 2\)"),
        ([[1, 2, 3]], 2, r"expected integers of shape \(n, 2\)"),
        (7, None, r"ids has shape \(\)"),
        ("1", None, r"ids has shape \(\)"),
    ],
)
def test_refuses_what_is_no_array_of_integers(values: Any, columns: int | None, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        integers("ids", values, PlanError, columns=columns)


def test_keeps_every_number_exact() -> None:
    assert integers("ids", [0, 2**64 - 1], ConfigError).tolist() == [0, 2**64 - 1]
    assert integers("ids", [[1, 2**63], [3, 4]], ConfigError, columns=2).tolist()[0] == [1, 2**63]
    array = np.arange(3, dtype=np.int32)
    assert integers("ids", array, ConfigError) is array


def test_empty_is_of_the_wanted_shape() -> None:
    assert integers("ids", [], ConfigError).shape == (0,)
    assert integers("ids", (), ConfigError, columns=3).shape == (0, 3)


def test_finds_the_first_number_out_of_range() -> None:
    assert first_outside(np.array([1, 5, -1, 9]), 0, 8) == (2,)
    assert first_outside(np.array([[1, 2], [3, 4]], np.uint64), 0, 3) == (1, 1)
    assert first_outside(np.array([0, 2**63], np.uint64), 0, 2**63 - 1) == (1,)
    assert first_outside(np.array([1, 2], np.int8), -1000, 1000) is None
    assert first_outside(np.array([], np.int64), 0, 1) is None
