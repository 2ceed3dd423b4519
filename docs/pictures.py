"""Draw the pictures of the pages; those of layouts come from real geometries and plans.

    python docs/pictures.py

writes the SVG files; a test checks that they are what this script gives. A cell is the elements of
one token in one head, at its place in memory. Where it lies comes from `KVCache.geometry`; what a
peer reads, and in how many runs, from `TransferPlan.descriptors`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pynixlkv.geometry import KVCache, Part
from pynixlkv.plan import TransferPlan

if TYPE_CHECKING:
    from collections.abc import Callable

PICTURES = Path(__file__).parent / "concepts" / "pictures"
LAYOUTS = ("KBHND", "KBNHD", "BKHND", "BKNHD", "BHKND", "BNKHD", "BHNC", "BNHC", "LBHNC", "BND")

NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM = 2, 3, 2, 4, 8
CELL_BYTES = HEAD_DIM * 2
LOCAL_BLOCK, REMOTE_BLOCK = 0, 1

CELL, HEIGHT, LEFT, ROW = 16, 22, 12, 74
CELLS_PER_ROW = 2 * NUM_BLOCKS * NUM_HEADS * BLOCK_SIZE
WIDTH = CELLS_PER_ROW * CELL + 2 * LEFT
LATENT = "#cfe5c8"
LAYERS = (
    ("engine adapters", "pynixlkv.vllm, pynixlkv.nixl_api", "one serving engine", "#e6d5f2"),
    (
        "connector",
        "pynixlkv.connector, pynixlkv.handshake",
        "requests, leases, failures",
        "#f7c6c6",
    ),
    (
        "transfer",
        "pynixlkv.nixl, pynixlkv.ucx, pynixlkv.testing",
        "agents, peers, bytes",
        "#f5b35c",
    ),
    ("plan", "TransferPlan", "two geometries and two block tables to runs of bytes", "#86b6e3"),
    ("geometry", "KVCache, pynixlkv.topology", "axes, strides, who holds what", "#cfe3f7"),
)
PART_FILLS = (("#cfe3f7", "#86b6e3"), ("#fde3c0", "#f5b35c"), ("#cfe5c8", "#cfe5c8"))
FILLS = {(0, 0): "#cfe3f7", (0, 1): "#86b6e3", (1, 0): "#fde3c0", (1, 1): "#f5b35c"}


@dataclass(frozen=True)
class Cell:
    """K, V or the latent of one token in one head, and its byte offset in the cache's memory."""

    offset: int
    layer: int
    kv: int
    block: int
    head: int
    token: int


def make_cache(axes: str, rank: int, size: int) -> KVCache:
    """Return a small cache of one layer, or of two where layers are an axis."""
    extents = {
        "L": NUM_LAYERS,
        "K": 2,
        "B": NUM_BLOCKS,
        "H": NUM_HEADS // size,
        "N": BLOCK_SIZE,
        "D": HEAD_DIM,
        "C": 2 * HEAD_DIM,
    }
    array = np.zeros([extents[axis] for axis in axes], np.uint16)
    kv_heads = NUM_HEADS if "H" in axes else None
    return KVCache.from_tensors({"layer": array}, axes=axes, kv_heads=kv_heads, tp=(rank, size))


def cells_of(cache: KVCache) -> list[Cell]:
    """Return the cells of a cache in the order in which they lie in memory."""
    (span,) = cache.geometry.spans
    (group,) = cache.geometry.groups
    cells = []
    for region in group.regions:
        axes = (region.layer, region.kv, region.block, region.head, region.token)
        for index in product(*(range(axis.start, axis.start + axis.count) for axis in axes)):
            steps = zip(axes, index, strict=True)
            offset = sum((i - axis.start) * axis.stride for axis, i in steps)
            cells.append(Cell(region.address + offset - span.address, *index))
    return sorted(cells, key=lambda cell: cell.offset)


def runs_between(local: KVCache, remote: KVCache) -> list[tuple[range, range]]:
    """Return the byte offsets, local and remote, of what a read of one block moves."""
    plan = TransferPlan(local.geometry, remote.geometry)
    sides = []
    descriptors = plan.descriptors([LOCAL_BLOCK], [REMOTE_BLOCK])
    for rows, cache in zip(descriptors, (local, remote), strict=True):
        base = cache.geometry.spans[0].address
        sides.append([range(row[0] - base, row[0] - base + row[1]) for row in rows.tolist()])
    return list(zip(*sides, strict=True))


def place(offset: int, top: int) -> tuple[int, int]:
    """Return where in the picture the cell at an offset has its upper left corner."""
    row, column = divmod(offset // CELL_BYTES, CELLS_PER_ROW)
    return LEFT + column * CELL, top + row * ROW


def rectangle(x: int, y: int, width: int, height: int, fill: str) -> str:
    """Return a filled rectangle."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"/>'


def label(x: int, y: int, words: str, *, anchor: str = "middle", size: int = 11) -> str:
    """Return a line of text whose anchor is at (x, y)."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{words}</text>'


def draw_memory(cells: list[Cell], runs: list[range], top: int, *, is_latent: bool) -> list[str]:
    """Draw memory from left to right, with a bar under each run."""
    parts = []
    for cell in cells:
        x, y = place(cell.offset, top)
        fill = LATENT if is_latent else FILLS[cell.head, cell.kv]
        parts.append(rectangle(x, y, CELL - 1, HEIGHT, fill))
        parts.append(label(x + CELL // 2, y + 15, str(cell.token), size=9))
    has_layers = len({cell.layer for cell in cells}) > 1
    for (layer, block), members in groupby(cells, key=lambda cell: (cell.layer, cell.block)):
        group = list(members)
        x, y = place(group[0].offset, top)
        end = x + len(group) * CELL - 1
        parts.append(f'<path d="M{x} {y - 3}V{y - 8}H{end}V{y - 3}" fill="none" stroke="#777"/>')
        words = f"layer {layer}, block {block}" if has_layers else f"block {block}"
        parts.append(label((x + end) // 2, y - 12, words))
    for run in runs:
        x, y = place(run.start, top)
        parts.append(rectangle(x, y + HEIGHT + 3, len(run) // CELL_BYTES * CELL - 1, 5, "#222"))
    return parts


def legend(y: int, *, is_latent: bool) -> list[str]:
    """Return the meaning of the fills."""
    entries = [("latent", LATENT)]
    if not is_latent:
        entries = [(f"head {head} {'KV'[kv]}", fill) for (head, kv), fill in FILLS.items()]
    parts = []
    for i, (words, fill) in enumerate(entries):
        parts.append(rectangle(LEFT + 90 * i, y, 12, 12, fill))
        parts.append(label(LEFT + 90 * i + 17, y + 10, words, anchor="start"))
    return parts


def document(title: str, height: int, parts: list[str]) -> str:
    """Return the text of an SVG file."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">\n'
        f"<title>{title}</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def draw_layout(axes: str) -> str:
    """Draw a layout, and what rank 1 of 2 with the same layout reads of a block."""
    local, remote = make_cache(axes, 1, 2), make_cache(axes, 0, 1)
    cells = cells_of(remote)
    runs = [there for _, there in runs_between(local, remote)]
    is_latent = "H" not in axes
    _, last = place(cells[-1].offset, 56)
    count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
    words = f"{axes} — rank 1 of 2 reads block {REMOTE_BLOCK} in {count} of {len(runs[0])} bytes"
    parts = [label(LEFT, 20, words, anchor="start", size=13)]
    parts += draw_memory(cells, runs, 56, is_latent=is_latent)
    parts += legend(last + HEIGHT + 20, is_latent=is_latent)
    return document(words, last + HEIGHT + 44, parts)


def draw_plan(local_axes: str, remote_axes: str) -> str:
    """Draw both ends of a plan and a line for each run between them."""
    local, remote = make_cache(local_axes, 0, 1), make_cache(remote_axes, 0, 1)
    pairs = runs_between(local, remote)
    words = (
        f"block {REMOTE_BLOCK} of {remote_axes} to block {LOCAL_BLOCK} of {local_axes}: "
        f"{len(pairs)} runs of {len(pairs[0][0])} bytes"
    )
    parts = [label(LEFT, 20, words, anchor="start", size=13)]
    parts += draw_memory(cells_of(remote), [there for _, there in pairs], 56, is_latent=False)
    parts += draw_memory(cells_of(local), [here for here, _ in pairs], 180, is_latent=False)
    for here, there in pairs:
        ends = []
        for run, top, edge in ((there, 56, HEIGHT + 8), (here, 180, -1)):
            x, y = place(run.start, top)
            ends.append(f"{x + len(run) // CELL_BYTES * CELL // 2} {y + edge}")
        parts.append(f'<path d="M{ends[0]}L{ends[1]}" stroke="#222" stroke-width="0.7"/>')
    parts += legend(222, is_latent=False)
    return document(words, 246, parts)


def make_state(rank: int, size: int) -> KVCache:
    """Return the state of a convolution: heads of x, and B and C, which every rank holds whole."""
    parts = [
        Part("x", "HD", {"D": 2}, 4),
        Part("B", "D", {"D": 2}, None),
        Part("C", "D", {"D": 2}, None),
    ]
    state = np.zeros((2, 2, 8 // size + 4), np.uint16)
    return KVCache.from_parts({"layer": state}, axes="BKP", parts=parts, tp=(rank, size))


def make_packed(rank: int, size: int) -> KVCache:
    """Return pages that hold the packed data of all heads, and then their scales."""
    parts = [
        Part("data", "HND", {"N": 4, "D": 4}, 2, "float4_e2m1fn_x2"),
        Part("scales", "HND", {"N": 4, "D": 1}, 2, "float8_e4m3fn"),
    ]
    pages = np.zeros((2, 2 // size, 4, 5), np.uint8)
    return KVCache.from_parts({"layer": pages}, axes="BPPP", parts=parts, tp=(rank, size))


def make_compressed(rank: int, size: int) -> KVCache:
    """Return a latent with one entry for each four tokens."""
    array = np.zeros((3, 4, 8), np.uint8)
    return KVCache.from_tensors(
        {"layer": array}, axes="BND", kv_heads=None, tp=(rank, size), tokens_per_state=4
    )


def draw_pages(name: str, make: Callable[[int, int], KVCache]) -> str:
    """Draw pages of several parts, and what rank 1 of 2 reads of block 1."""
    local, remote = make(1, 2), make(0, 1)
    table = remote.geometry.groups[0].table
    plan = TransferPlan(local.geometry, remote.geometry)
    _, rows = plan.descriptors({table: [LOCAL_BLOCK]}, {table: [REMOTE_BLOCK]})
    base = remote.geometry.spans[0].address
    parts, pixel, top = [], CELL // 2, 56
    for group, fills in zip(remote.geometry.groups, PART_FILLS, strict=False):
        for region in group.regions:
            axes = (region.kv, region.block, region.head, region.token)
            for index in product(*(range(axis.start, axis.start + axis.count) for axis in axes)):
                steps = zip(axes, index, strict=True)
                offset = sum((i - axis.start) * axis.stride for axis, i in steps)
                x = LEFT + (region.address - base + offset) * pixel
                width = region.dim.count * group.element_bytes * pixel
                first = index[3] * group.tokens_per_state
                words = f"{first}..{first + group.tokens_per_state - 1}"
                if group.tokens_per_state == 1:
                    words = str(index[3]) if group.block_size else f"{index[2]}"
                parts.append(rectangle(x, top, width - 1, HEIGHT, fills[index[2] % 2]))
                parts.append(label(x + width // 2, top + 15, words, size=9))
    block = remote.geometry.groups[0].regions[0].block
    for at in range(block.count):
        x, end = (LEFT + (at + step) * block.stride * pixel for step in (0, 1))
        parts.append(f'<path d="M{x} 53V48H{end - 2}V53" fill="none" stroke="#777"/>')
        parts.append(label((x + end) // 2, 44, f"block {at}"))
    for address, nbytes, _ in rows.tolist():
        x = LEFT + (address - base) * pixel
        parts.append(rectangle(x, top + HEIGHT + 3, nbytes * pixel - 1, 5, "#222"))
    for i, (group, fills) in enumerate(zip(remote.geometry.groups, PART_FILLS, strict=False)):
        parts.append(rectangle(LEFT + 90 * i, 98, 12, 12, fills[0]))
        parts.append(label(LEFT + 90 * i + 17, 108, group.name, anchor="start"))
    count = f"{len(rows)} run{'s' if len(rows) > 1 else ''}"
    words = f"{name} — rank 1 of 2 reads block {REMOTE_BLOCK} in {count}"
    return document(words, 122, [label(LEFT, 20, words, anchor="start", size=13), *parts])


def draw_layers() -> str:
    """Draw the five layers, and what each knows about."""
    parts = [label(LEFT, 20, "Each layer imports only those below it", anchor="start", size=13)]
    for i, (name, where, knows, fill) in enumerate(LAYERS):
        y = 34 + 44 * i
        parts.append(rectangle(LEFT, y, WIDTH - 2 * LEFT, 38, fill))
        parts.append(label(LEFT + 12, y + 24, f"{len(LAYERS) - i} {name}", anchor="start", size=15))
        parts.append(label(LEFT + 180, y + 16, where, anchor="start", size=12))
        parts.append(label(LEFT + 180, y + 31, knows, anchor="start"))
    y = 34 + 44 * len(LAYERS)
    parts.append(rectangle(LEFT, y + 6, WIDTH - 2 * LEFT, 26, "#e0e0e0"))
    words = "NIXL or UCX, found at run time: RDMA, TCP, shared memory, CUDA"
    parts.append(label(LEFT + 180, y + 23, words, anchor="start"))
    return document("The five layers of pynixlkv", y + 44, parts)


def render() -> dict[str, str]:
    """Return the text of every picture by file name."""
    pictures = {f"{axes.lower()}.svg": draw_layout(axes) for axes in LAYOUTS}
    pictures["layers.svg"] = draw_layers()
    pictures["plan.svg"] = draw_plan("KBNHD", "KBHND")
    pictures["state.svg"] = draw_pages("x, B and C of a convolution, two taps", make_state)
    pictures["packed.svg"] = draw_pages("packed data and scales", make_packed)
    pictures["compressed.svg"] = draw_pages("one entry for each four tokens", make_compressed)
    return pictures


def main() -> None:
    """Write all pictures."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, picture in render().items():
        (PICTURES / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
