"""`pynixlkv size`: the costs of hand-offs, beside what they are by hand."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pynixlkv.cli.app import app
from pynixlkv.cli.size import SizeOptions, link_speed, size_fleet
from pynixlkv.errors import ConfigError


def test_a_request_of_equal_layouts_by_hand():
    # Llama 3.1 70B: 80 layers, K and V, 8 heads of 128 elements of 2 bytes.
    token = 80 * 2 * 8 * 128 * 2
    report = size_fleet(
        SizeOptions("Llama-3.1-70B", prefill_tp=4, decode_tp=8, prompt=8000, link=100, rate=10)
    )
    assert report.bytes_per_token == token
    assert report.request_bytes == 8000 * token
    assert report.rank_bytes == 1000 * token
    # One head of a rank is contiguous in a block, for each layer and K and V.
    assert report.descriptors == 500 * 80 * 2
    assert report.shortest_run == 16 * 128 * 2
    assert report.sources == 1
    # Two ranks of decode read from each rank of prefill, whose link is the bottleneck.
    assert report.transfer_s == pytest.approx(2000 * token / 12.5e9)
    assert report.load_gb_per_s == pytest.approx(10 * 8000 * token / 1e9)
    assert (report.prefill_links, report.decode_links) == (3, 3)
    assert report.leases == pytest.approx(10 * (0.5 + report.transfer_s))
    assert report.held_blocks == pytest.approx(report.leases * 500)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "prefill_peers", "decode_peers"),
    [(1, 1, 6, 5), (4, 8, 12, 5), (8, 4, 6, 10), (8, 8, 6, 5), (4, 2, 6, 10)],
)
def test_peers_multiply_by_the_engines_of_the_other_side(
    prefill_tp, decode_tp, prefill_peers, decode_peers
):
    report = size_fleet(
        SizeOptions(
            "Llama-3.1-8B", prefill_tp, decode_tp, prompt=64, prefill_engines=5, decode_engines=6
        )
    )
    assert (report.prefill_peers, report.decode_peers) == (prefill_peers, decode_peers)


def test_an_unlike_layout_costs_descriptors_and_no_bytes():
    alike = size_fleet(SizeOptions("Llama-3.1-8B", prompt=256))
    unlike = size_fleet(SizeOptions("Llama-3.1-8B", prompt=256, decode_axes="NHD"))
    assert unlike.request_bytes == alike.request_bytes
    assert alike.descriptors == 16 * 32 * 2
    assert unlike.descriptors == 256 * 8 * 32 * 2
    assert unlike.shortest_run == 128 * 2


def test_a_latent_is_read_whole_by_every_rank():
    report = size_fleet(SizeOptions("DeepSeek-V3", prefill_tp=1, decode_tp=8, prompt=160))
    assert report.rank_bytes == 160 * 61 * 576 * 2
    assert report.request_bytes == 8 * report.rank_bytes


def test_the_command():
    run = CliRunner().invoke(app, ["size", "--prompt", "64", "--link", "400Gb/s", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["request_bytes"] == 64 * 32 * 2 * 8 * 128 * 2
    run = CliRunner().invoke(app, ["size", "--prompt", "64"])
    assert "8,388,608" in run.stdout
    run = CliRunner().invoke(app, ["size", "--link", "fast"])
    assert run.exit_code == 1
    assert "expected a speed" in run.output


def test_speeds():
    assert [link_speed(text) for text in ("100Gb", "25", "400 Gb/s", "1.5gb")] == [
        100,
        25,
        400,
        1.5,
    ]
    for wrong in ({"link": 0}, {"rate": -1}, {"rate": float("nan")}, {"model": "none"}):
        with pytest.raises(ConfigError):
            size_fleet(SizeOptions(**{"model": "Llama-3.1-8B", "prompt": 16, **wrong}))
