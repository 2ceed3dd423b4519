"""The command line without transfers: options, contents, sizes."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from pynixlkv.cli import demo
from pynixlkv.cli.cache import Contents, RankCache, dimension_letters
from pynixlkv.cli.models import MODELS, Model, find_model
from pynixlkv.cli.render import info_table
from pynixlkv.errors import LayoutError

TINY = Model("tiny", layers=2, kv_heads=4, dim=8, block_size=4)
TINY_LATENT = Model("tiny-latent", layers=2, kv_heads=None, dim=12, axes="BND", block_size=4)
ATTENTION_AXES = ["KBHND", "KBNHD", "BKNHD", "BHNC", "BNHC", "LKBHND", "BLKNHD", "HND", "NHD"]


def run(*arguments, code=None):
    command = [sys.executable, *(("-c", code) if code else ("-m", "pynixlkv")), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named_with_its_remedy(package):
    done = run(
        code=f"import sys; sys.modules['{package}'] = None; import pynixlkv.cli as c; c.main()"
    )
    assert done.returncode == 2
    assert package in done.stderr
    assert 'pip install "pynixlkv[cli]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_any_other_missing_module_is_not_hidden():
    done = run(code="import sys; sys.modules['msgspec'] = None; import pynixlkv.cli as c; c.main()")
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "GPT-2"], ["GPT-2", "Llama-3.1-8B", "DeepSeek-V3"]),
        (["--axes", "KBHNX"], ["KBHNX", "KBHND"]),
        (["--model", "DeepSeek-V3", "--axes", "KBHND"], ["KBHND", "BND"]),
        (["--decode-tp", "3"], ["8", "3"]),
        (["--blocks", "100000000"], ["100000000", "GiB"]),
    ],
)
def test_impossible_options_are_refused_before_anything_starts(options, words):
    done = run("demo", "--json", *options)
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert answer["ok"] is False
    assert all(word in answer["error"] for word in words)
    assert done.stderr == ""


def test_errors_go_to_standard_error_without_json():
    done = run("demo", "--model", "GPT-2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: there is no geometry for model 'GPT-2'")


def test_sizes_are_those_of_the_models():
    assert find_model("llama-3.1-8b").block_bytes(0, 1) == 2 * 1024 * 1024
    assert find_model("Llama-3.1-70B").block_bytes(3, 8) == 80 * 2 * 16 * 128 * 2
    # More ranks than heads: each holds one whole head.
    assert find_model("Qwen3-32B").block_bytes(15, 16) == 64 * 2 * 16 * 128 * 2
    assert find_model("DeepSeek-V3").block_bytes(1, 4) == 61 * 16 * 576 * 2
    with pytest.raises(LayoutError, match="3 ranks"):
        find_model("Llama-3.1-8B").block_bytes(0, 3)


@pytest.mark.parametrize("model", [TINY, TINY_LATENT], ids=lambda model: model.name)
def test_no_two_pages_and_no_two_places_of_a_page_are_alike(model):
    contents = Contents((1,), model, 5)
    heads = range(model.kv_heads or 1)
    layers = [contents.pages(layer, heads) for layer in range(model.layers)]
    pages = np.stack(layers).reshape(-1, model.page_elems)
    assert len(np.unique(pages, axis=0)) == len(pages)
    assert len(np.unique(pages.reshape(-1, 4), axis=0)) == pages.size // 4


@pytest.mark.parametrize("axes", ATTENTION_AXES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_contents_depend_on_the_global_place_alone(axes, size):
    contents = Contents((7,), TINY, 3)
    whole = [contents.pages(layer, range(4)) for layer in range(TINY.layers)]
    for rank in range(size):
        cache = RankCache(TINY, axes, rank, size, 3)
        letters = dimension_letters(axes, TINY)
        heads = [rank * 4 // size] if size > 4 else range(rank * 4 // size, (rank + 1) * 4 // size)
        for layer in range(TINY.layers):
            cache.layer(layer)[:] = contents.pages(layer, cache.heads)
        for layer, block, part, head, token, elem in np.ndindex(
            TINY.layers, 3, 2, len(heads), TINY.block_size, TINY.dim
        ):
            # The place of the element, letter by letter.
            place = {"L": layer, "K": part, "B": block, "H": head, "N": token, "D": elem,
                     "C": part * TINY.dim + elem}  # fmt: skip
            tensor = cache.tensors[0 if "L" in letters else layer]
            found = tensor[tuple(place[letter] for letter in letters)]
            assert found == whole[layer][block, part, heads[head], token, elem]


def test_a_wrong_byte_is_counted_and_located():
    cache = RankCache(TINY, "KBNHD", 1, 2, 3)
    cache.layer(1)[:] = expected = Contents((7,), TINY, 3).pages(1, cache.heads)
    assert cache.compare(1, expected) == (0, "")
    # K/V, block, token, local head, element of the second layer; head 0 of rank 1 is global head 2.
    cache.tensors[1][1, 2, 3, 0, 5] ^= 0x0101
    wrong, where = cache.compare(1, expected)
    assert wrong == 2
    assert "layer 1, block 2, V, head 2, token 3, element 5" in where


@pytest.mark.parametrize("axes", ["KBHN", "KBHNDD", "KBHNC", "BND", "", "LBHNDK0"])
def test_axes_that_do_not_fit_are_refused(axes):
    with pytest.raises(LayoutError, match="axes"):
        dimension_letters(axes, TINY)


@pytest.mark.parametrize("blocks", [1, 2, 7, 100])
def test_tables_are_disjoint_and_leave_both_ends_alone(blocks):
    pool = demo._pool_blocks(blocks)
    tables = demo._scatter(blocks, pool, seed=3)
    for side in ("prefill", "decode"):
        used = tables[side]["read"] + tables[side]["write"]
        assert len(tables[side]["read"]) == len(tables[side]["write"]) == blocks
        assert len(set(used)) == 2 * blocks
        assert min(used) > 0
        assert max(used) < pool - 1
    assert tables == demo._scatter(blocks, pool, seed=3)
    assert blocks < 7 or tables["prefill"] != tables["decode"]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_default_pools_are_modest_on_a_large_machine_and_on_a_small_one(model, monkeypatch):
    def pools(free, sizes):
        monkeypatch.setattr(demo, "_free_bytes", lambda: free)
        options = demo.DemoOptions(model.name, {}, sizes)
        blocks = demo._choose_blocks(model, options)
        return blocks, [
            demo._pool_blocks(blocks) * sum(model.block_bytes(r, size) for r in range(size))
            for size in sizes.values()
        ]

    blocks, each = pools(512 << 30, {"prefill": 1, "decode": 16})
    assert max(each) <= 1 << 30
    blocks, each = pools(4 << 30, {"prefill": 2, "decode": 1})
    assert blocks > 1
    assert sum(each) <= 0.15 * (4 << 30)


def test_free_memory_is_plausible():
    assert 0 < demo._free_bytes() < 1 << 46


def test_the_table_of_libraries_shows_every_value_without_markup():
    report = {
        "nixl": {"path": "/opt/libnixl_capi.so", "version": "1.5.1", "origin": ""},
        "loaded": (),
        "ucx_version": "",
        "plugins": ({"name": "GDS", "memory_types": (), "problem": "cannot [red]open[/red]"},),
        "memory_types": ("DRAM", "VRAM"),
    }
    file = io.StringIO()
    Console(width=70, file=file).print(info_table(report))
    text = file.getvalue()
    for part in ("path /opt/libnixl_capi.so, version 1.5.1", "cannot [red]open[/red]", "none"):
        assert part in text
    assert text.index("DRAM") < text.index("VRAM")


UCX_SAYS = """
[1.0] [vm:1:0]   | d intra-node cfg#1                                   |
[1.0] [vm:1:0]   | active message by ucp_am_send*(egr) from host memory |
[1.0] [vm:1:0]   | Count |   Range    |    Description     |   Config   |
[1.0] [vm:1:0]   |     2 |   1..16515 | zero-copy          | tcp/lo     |
[1.0] [vm:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [vm:1:0]   | Count | Range  | Description |              Config               |
[1.0] [vm:1:0]   |     2 | 0..inf | zero-copy   | cma/memory                        |
[1.0] [vm:1:0]   |     0 | 0..inf | copy-in     | sysv/memory                       |
[1.0] [vm:1:0]   | remote memory write by ucp_put*(multi) from host memory to host |
[1.0] [vm:1:0]   |     2 | 0..inf | software emulation | 52% on tcp/lo and 48% on tcp/eth0 |
"""


def test_reported_transports_are_those_that_ucx_used():
    assert demo._used_transports("read", [UCX_SAYS.splitlines()] * 2) == "cma/memory (zero-copy)"
    expected = "52% on tcp/lo and 48% on tcp/eth0 (software emulation)"
    assert demo._used_transports("write", [[], UCX_SAYS.splitlines()]) == expected
    assert demo._used_transports("read", [[], ["nothing of UCX"]]) == "not reported"
