"""KVCache and Geometry: what tensors become, what goes over the wire, and every refusal."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from typing import ClassVar

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch

from pynixlkv import wire
from pynixlkv.errors import ConfigError, LayoutError, PlanError, StateError, WireError
from pynixlkv.geometry import Axis, Geometry, Group, KVCache, Region, memory_spans
from pynixlkv.plan import TransferPlan
from pynixlkv.types import MemorySpan, MemoryType

EXTENTS = {"L": 3, "K": 2, "B": 5, "H": 4, "N": 8, "D": 16, "C": 32}


def array(axes: str, dtype="float16", **extents: int) -> np.ndarray:
    return np.zeros([(EXTENTS | extents)[letter] for letter in axes], dtype)


def cache(axes: str = "KBHND", *, num_layers: int = 2, kv_heads: int | None = 4, **options):
    tensors = {f"layer.{i}": array(axes) for i in range(num_layers)}
    return KVCache.from_tensors(tensors, axes=axes, kv_heads=kv_heads, **options)


def only(made: KVCache) -> Group:
    (group,) = made.geometry.groups
    return group


def address(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]


def element(region: Region, **at: int) -> int:
    return region.address + sum(
        (index - getattr(region, axis).start) * getattr(region, axis).stride
        for axis, index in at.items()
    )


def test_a_tensor_per_layer() -> None:
    tensors = {"a": array("KBHND"), "b": array("KBHND")}
    made = KVCache.from_tensors(tensors, axes="KBHND", kv_heads=8, tp=(1, 2), layers=[4, 6])
    group = only(made)
    assert (group.name, group.dtype, group.element_bytes) == ("kv", "float16", 2)
    assert (group.block_size, group.num_blocks, group.head_dim) == (8, 5, 16)
    assert (group.kv_heads, group.heads, group.planes) == (8, range(4, 8), 2)
    assert group.layers == (4, 6)
    assert group.block_tokens == 8
    a, b = group.regions
    assert (a.name, b.name) == ("a", "b")
    assert a.layer == Axis(4, 1, 0)
    assert a.head == Axis(4, 4, 8 * 16 * 2)
    assert element(b, kv=1, block=3, head=6, token=5, dim=7) == (
        address(tensors["b"]) + 2 * (((((1 * 5) + 3) * 4 + 2) * 8 + 5) * 16 + 7)
    )
    assert "layers, 5 blocks of 8 tokens, heads 4..7" in repr(made)


@pytest.mark.parametrize(
    "axes",
    [
        *("KBHND", "KBNHD", "BKHND", "BKNHD", "BHKND", "BNKHD", "BHNC", "BNHC", "LBHNC", "BLHNC"),
        *("LKBHND", "DNHBK", "CNHB", "NBHC"),
    ],
)
def test_every_order_of_axes(axes: str) -> None:
    whole = array(axes)
    made = KVCache.from_tensors({"x": whole}, axes=axes, kv_heads=4)
    (region,) = only(made).regions
    where = {"K": 1, "B": 2, "H": 3, "N": 4, "D": 5, "C": 16 + 5, "L": 2}
    index = tuple(where[letter] for letter in axes)
    expected = address(whole) + sum(i * s for i, s in zip(index, whole.strides, strict=True))
    layer = {"layer": 2} if "L" in axes else {}
    assert element(region, kv=1, block=2, head=3, token=4, dim=5, **layer) == expected
    assert only(made).layers == ((0, 1, 2) if "L" in axes else (0,))


def test_latents_are_whole_on_every_rank() -> None:
    group = only(cache("BND", kv_heads=None, tp=(3, 8)))
    assert (group.kv_heads, group.heads, group.planes) == (None, range(1), 1)
    assert only(cache("BND", kv_heads=None)).regions[0].head == Axis()
    named = KVCache.from_tensors({"x": array("BND")}, axes="MLA", kv_heads=None)
    assert only(named).block_size == 8
    squeezed = array("BHND", H=1)
    assert only(KVCache.from_tensors({"x": squeezed}, axes="BHND", kv_heads=None)).head_dim == 16


def test_state_has_no_tokens() -> None:
    state = KVCache.from_tensors(
        {"conv": array("BD")}, axes="BD", kv_heads=4, tp=(2, 4), group="state"
    )
    group = only(state)
    assert (group.name, group.heads) == ("state", range(2, 3))
    assert (group.block_size, group.block_tokens) == (0, 1)


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("HND", (2, 5, 4, 8, 16), "KBHND"),
        ("HND", (5, 2, 4, 8, 16), "BKHND"),
        ("NHD", (2, 5, 8, 4, 16), "KBNHD"),
        ("NHD", (5, 2, 8, 4, 16), "BKNHD"),
    ],
)
def test_names_of_orders(name: str, shape: tuple[int, ...], axes: str) -> None:
    whole = np.zeros(shape, np.int8)
    by_name = KVCache.from_tensors({"x": whole}, axes=name, kv_heads=4)
    assert by_name.geometry == KVCache.from_tensors({"x": whole}, axes=axes, kv_heads=4).geometry


def test_keys_and_values_in_tensors_of_their_own() -> None:
    k, v = array("BNHD"), array("BNHD")
    made = KVCache.from_tensors({"x": (k, v)}, axes="NHD", kv_heads=4)
    keys, values = only(made).regions
    assert (keys.kv, values.kv) == (Axis(0, 1, 0), Axis(1, 1, 0))
    assert (keys.address, values.address) == (address(k), address(v))
    assert only(made).planes == 2


def test_layers_of_a_packed_tensor_may_have_gaps() -> None:
    whole = array("LBHNC")
    group = only(KVCache.from_tensors({"x": whole}, axes="LBHNC", kv_heads=4, layers=[3, 4, 9]))
    first, last = group.regions
    assert group.layers == (3, 4, 9)
    assert (first.layer.start, first.layer.count) == (3, 2)
    assert last.layer == Axis(9, 1, 0)
    assert last.address == address(whole[2])
    assert only(
        KVCache.from_tensors({"x": whole, "y": array("LBHNC")}, axes="LBHNC", kv_heads=4)
    ).layers == tuple(range(6))


def test_permuted_and_padded_views_keep_their_strides() -> None:
    base = array("KBNHD", B=9, N=10)
    view = base[:, 2:7, 1:9].transpose(0, 1, 3, 2, 4)
    (region,) = only(KVCache.from_tensors({"x": view}, axes="KBHND", kv_heads=4)).regions
    assert region.address == address(view)
    strides = region.block.stride, region.head.stride, region.token.stride
    assert strides == view.strides[1:4]


def test_torch_tensors_need_no_numpy_type() -> None:
    whole = torch.zeros(2, 5, 4, 8, 16, dtype=torch.bfloat16)
    group = only(KVCache.from_tensors({"x": whole}, axes="KBHND", kv_heads=4))
    assert (group.dtype, group.element_bytes) == ("bfloat16", 2)
    assert group.regions[0].address == whole.data_ptr()
    assert group.regions[0].block.stride == 4 * 8 * 16 * 2
    disguised = array("KBHND", "uint16")
    named = KVCache.from_tensors({"x": disguised}, axes="KBHND", kv_heads=4, dtype="bfloat16")
    assert only(named).differences(group) == []


def test_big_endian_numbers_are_another_type() -> None:
    swapped = array("KBHND", ">f4")
    assert only(KVCache.from_tensors({"x": swapped}, axes="KBHND", kv_heads=4)).dtype == ">f4"


ML_DTYPES = [
    *("bfloat16", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "int2", "int4", "uint2", "uint4"),
]
NUMPY_TYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
TORCH_TYPES = [
    *(name for name in ML_DTYPES + NUMPY_TYPES if isinstance(getattr(torch, name, 0), torch.dtype)),
    *("float4_e2m1fn_x2", "int7", "uint1"),
]


def of_type(values) -> KVCache:
    return KVCache.from_tensors({"x": values}, axes="BHND", kv_heads=2)


def every_type():
    for name in [*NUMPY_TYPES, ">i2", ">f4", ">c16"]:
        yield name, of_type(np.zeros((3, 2, 4, 8), name))
    for name in ML_DTYPES:
        yield name, of_type(np.zeros((3, 2, 4, 8), getattr(ml_dtypes, name)))
    for name in TORCH_TYPES:
        yield name, of_type(torch.empty((3, 2, 4, 8), dtype=getattr(torch, name)))


def test_element_types_meet_by_name_across_libraries_and_unlike_ones_do_not() -> None:
    made = list(every_type())
    assert len(made) > len({name for name, _ in made}) > 35
    for a, here in made:
        assert only(here).dtype == a
        assert Geometry.from_bytes(here.geometry.to_bytes()) == here.geometry
        for b, there in made:
            found = here.geometry.differences(there.geometry)
            assert found[:1] == ([] if a == b else [("kv.dtype", a, b)])


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("V1", "void8"),
        ([("a", "f4"), ("b", "f4")], "void64"),
        (np.longdouble, "longdouble|float128"),
        ("M8[ns]", r"datetime64\[ns\]"),
        ("m8[s]", r"timedelta64\[s\]"),
        ("S4", "bytes32"),
        ("U1", "str32"),
        (torch.qint8, "qint8"),
        (torch.quint4x2, "quint4x2"),
        (torch.bits8, "bits8"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*quantized")
def test_element_types_without_a_portable_meaning_are_refused_by_name(dtype, name) -> None:
    make = torch.empty if isinstance(dtype, torch.dtype) else np.zeros
    values = make((3, 2, 4, 8), dtype=dtype)
    with pytest.raises(LayoutError, match=f"tensor 'x': '({name})' is no element type"):
        of_type(values)
    assert memory_spans(values)[0].nbytes  # but its memory can be registered


@pytest.mark.parametrize("dtype", ["void16", "half", "nvfp4", "uint16:", "", "V2"])
def test_a_given_element_type_is_a_known_name(dtype) -> None:
    with pytest.raises(LayoutError, match=f"'{dtype}' is no element type"):
        KVCache.from_tensors({"x": array("BHND", "u2")}, axes="BHND", kv_heads=4, dtype=dtype)


def test_a_given_element_type_has_the_size_of_the_tensor_s() -> None:
    with pytest.raises(LayoutError, match="'float8_e5m2' has 1 bytes an element, the array 2"):
        cache(dtype="float8_e5m2")
    untold = KVCache.from_tensors(
        {"x": array("BHND", "V2")}, axes="BHND", kv_heads=4, dtype="bfloat16"
    )
    assert only(untold).dtype == "bfloat16"


def test_a_packing_is_part_of_the_type_and_opaque_heads_need_equal_shards() -> None:
    def made(heads, tp, dtype="uint8:nvfp4", opaque_axes="HND"):
        pages = np.zeros((3, heads, 4, 9), np.uint8)
        options = {"dtype": dtype, "opaque_axes": opaque_axes}
        return KVCache.from_tensors(
            {"x": pages}, axes="BHND", kv_heads=4, tp=tp, **options
        ).geometry

    TransferPlan(made(2, (1, 2)), made(2, (1, 2)))
    with pytest.raises(PlanError, match=r"kv\.dtype is 'uint8:nvfp4' here and 'uint8' there"):
        TransferPlan(made(2, (1, 2)), made(2, (1, 2), "uint8"))
    with pytest.raises(
        PlanError,
        match="heads per rank, indivisible in pages of uint8:nvfp4, is '2 of 4' here and '4 of 4'",
    ):
        TransferPlan(made(2, (1, 2)), made(4, (0, 1)), heads=[2, 3])


def test_a_lazy_conjugate_is_refused() -> None:
    values = torch.zeros(3, 2, 4, 8, dtype=torch.complex64)
    assert only(of_type(values)).dtype == "complex64"
    for lazy in (values.conj(), values.conj().imag):
        with pytest.raises(LayoutError, match="resolve_conj"):
            of_type(lazy)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, numpy as np; from pynixlkv.geometry import KVCache\n"
        "KVCache.from_tensors({'x': np.zeros((2, 3, 4, 8, 16))}, axes='KBHND', kv_heads=4)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class OnDevice(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    kind = "cuda"

    @property
    def device(self):
        return torch.device(f"{self.kind}:3")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_device_memory_is_vram_with_its_ordinal(kind, monkeypatch) -> None:
    monkeypatch.setattr(OnDevice, "kind", kind)
    whole = torch.zeros(2, 5, 4, 8, 16).as_subclass(OnDevice)
    made = KVCache.from_tensors({"x": whole}, axes="KBHND", kv_heads=4)
    (span,) = made.spans
    assert (span.memory, span.device) == (MemoryType.VRAM, 3)
    assert made.geometry.spans == (MemorySpan(span.address, span.nbytes, MemoryType.VRAM, 3),)


def test_an_array_with_the_interface_of_cuda_is_vram_on_its_device() -> None:
    class Array:
        __cuda_array_interface__: ClassVar = {
            "shape": (2, 5, 4, 8, 16),
            "typestr": "<f2",
            "data": (1 << 40, False),
            "version": 3,
        }

    class Placed(Array):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 3

    for array, device in ((Array(), 0), (Placed(), 3)):
        made = KVCache.from_tensors({"x": array}, axes="KBHND", kv_heads=4)
        nbytes = 2 * 5 * 4 * 8 * 16 * 2
        assert made.spans == (MemorySpan(1 << 40, nbytes, MemoryType.VRAM, device),)
        assert made.geometry.groups[0].dtype == "float16"


def test_one_span_per_storage_and_touching_ones_joined() -> None:
    storage = np.zeros(4 * 2 * 5 * 4 * 8 * 16, np.int8)
    views = storage.reshape(4, 2, 5, 4, 8, 16)
    tensors = {"a": views[0], "b": views[3]}
    made = KVCache.from_tensors(tensors, axes="KBHND", kv_heads=4)
    assert [(s.address, s.nbytes) for s in made.spans] == [(address(views), storage.nbytes)]
    # Arrays that are different objects over one buffer, side by side.
    halves = [np.frombuffer(memoryview(storage.data)[i : i + 5120], np.int8) for i in (0, 5120)]
    tensors = {str(i): half.reshape(2, 5, 4, 8, 16)[:, :, :, :, :] for i, half in enumerate(halves)}
    made = KVCache.from_tensors(tensors, axes="KBHND", kv_heads=4)
    assert [(s.address, s.nbytes) for s in made.spans] == [(address(storage), 10240)]
    # With a gap between them.
    halves[1] = np.frombuffer(memoryview(storage.data)[5121:10241], np.int8)
    tensors = {str(i): half.reshape(2, 5, 4, 8, 16) for i, half in enumerate(halves)}
    made = KVCache.from_tensors(tensors, axes="KBHND", kv_heads=4)
    assert [s.nbytes for s in made.spans] == [5120, 5120]
    assert [r.span for r in only(made).regions] == [0, 1]


def test_torch_views_of_one_storage_are_one_span() -> None:
    storage = torch.zeros(3, 5, 4, 8, 32)
    made = KVCache.from_tensors({str(i): storage[i] for i in (0, 2)}, axes="BHNC", kv_heads=4)
    (span,) = made.spans
    assert (span.address, span.nbytes) == (storage.data_ptr(), storage.nbytes)


def test_adjoining_device_memory_stays_apart() -> None:
    whole = np.zeros((2, 5, 4, 8, 32), np.float32)
    pieces = {str(i): torch.from_numpy(whole[i]).as_subclass(OnDevice) for i in range(2)}
    made = KVCache.from_tensors(pieces, axes="BHNC", kv_heads=4)
    assert [s.nbytes for s in made.spans] == [5 * 4 * 8 * 32 * 4] * 2


def test_a_cache_keeps_its_tensors_alive() -> None:
    whole = torch.zeros(2, 5, 4, 8, 16)
    alive = weakref.ref(whole)
    made = KVCache.from_tensors({"x": whole}, axes="KBHND", kv_heads=4)
    del whole
    gc.collect()
    assert alive() is not None
    del made
    gc.collect()
    assert alive() is None


def test_a_read_only_array_is_a_source_and_its_neighbours_are_not() -> None:
    storage = np.zeros(2 * 5120, np.int8)
    parts = [storage[:5120].reshape(2, 5, 4, 8, 16), storage[5120:].reshape(2, 5, 4, 8, 16)]
    parts[1].flags.writeable = False
    for tensors, expected in (([0], [False]), ([1], [True]), ([0, 1], [True])):
        made = KVCache.from_tensors({str(i): parts[i] for i in tensors}, axes="KBHND", kv_heads=4)
        assert [span.read_only for span in made.spans] == expected
    assert [span.read_only for span in memory_spans(parts[1])] == [True]


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_names_memory_is_not_copied(copying) -> None:
    made = cache()
    for thing in (made, made.spans[0], made.geometry, {"a": made}):
        if copying is not copy.copy or thing is made:
            with pytest.raises(StateError, match="neither copied nor pickled"):
                copying(thing)


def test_memory_spans() -> None:
    made = cache()
    assert memory_spans(made) is made.spans
    span = MemorySpan(4096, 10, MemoryType.DRAM, 0)
    assert memory_spans(span) == (span,)
    whole = array("BD")
    (found,) = memory_spans(whole)
    assert (found.address, found.nbytes) == (address(whole), whole.nbytes)
    assert memory_spans(torch.zeros(3))[0].nbytes == 12
    with pytest.raises(ConfigError, match=r"shape \(0, 3\) has no bytes"):
        memory_spans(np.zeros((0, 3)))
    with pytest.raises(LayoutError, match="is not contiguous"):
        memory_spans(whole[:, ::2])
    with pytest.raises(LayoutError, match="expected a torch tensor or a numpy array"):
        memory_spans(b"bytes")


def test_groups_combine_and_keep_their_tables_apart() -> None:
    full = cache(group="full")
    latent = cache("BND", kv_heads=None, group="latent")
    made = KVCache.combine(full, latent)
    assert [g.name for g in made.geometry.groups] == ["full", "latent"]
    assert {s.address for s in made.spans} <= {s.address for s in (*full.spans, *latent.spans)}
    for group, part in zip(made.geometry.groups, (full, latent), strict=True):
        for region, alone in zip(group.regions, only(part).regions, strict=True):
            span = made.geometry.spans[region.span]
            assert region.address == alone.address
            assert span.address <= region.address < span.address + span.nbytes
    with pytest.raises(LayoutError, match=r"group names are \['kv', 'kv'\]"):
        KVCache.combine(cache(), cache())


def test_groups_may_share_a_pool_of_equal_blocks() -> None:
    pool = array("KBHND")
    first = KVCache.from_tensors({"x": pool}, axes="KBHND", kv_heads=4, group="full")
    second = KVCache.from_tensors({"y": pool}, axes="KBHND", kv_heads=4, group="window")
    assert len(KVCache.combine(first, second).spans) == 1
    shifted = KVCache.from_tensors({"y": pool[:, 1:]}, axes="KBHND", kv_heads=4, group="window")
    with pytest.raises(LayoutError, match="overlap in memory at different block numbers"):
        KVCache.combine(first, shifted)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("KBHNX", "unknown letters 'X'; use L K B H N D C"),
        ("kbhnd", "unknown letters 'bdhkn'"),
        ("KBHNN", "repeats 'N'"),
        ("KHND", "must have B, and either D or C"),
        ("KBHN", "must have B, and either D or C"),
        ("BHNDC", "must have B, and either D or C"),
        ("KBHNC", "K beside C"),
        ("KBHND", "names 5 dimensions, the tensor has 4"),
        ("HND", "could mean none that fits; write .* 'BKHND', 'KBHND', 'BHNC'"),
        ("NHD", "could mean none that fits; write .* 'BKNHD', 'KBNHD', 'BNHC'"),
        ("MLA", "names 3 dimensions, the tensor has 4"),
        ("", "must have B"),
    ],
)
def test_axes_that_do_not_fit(axes: str, message: str) -> None:
    whole = array("BHNC")
    with pytest.raises(LayoutError, match=message):
        KVCache.from_tensors({"x": whole}, axes=axes, kv_heads=4)


def test_ambiguous_shapes() -> None:
    with pytest.raises(LayoutError, match="could mean BKHND or KBHND; write"):
        KVCache.from_tensors({"x": array("KBHND", B=2)}, axes="HND", kv_heads=4)
    pair = (array("KBNHD"), array("BNHD"))
    with pytest.raises(LayoutError, match="could mean none that fits; write"):
        KVCache.from_tensors({"x": pair}, axes="NHD", kv_heads=4)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({}, {}, "tensors is a dict without entries"),
        (np.zeros((2, 5, 4, 8, 16)), {}, "tensors is a ndarray without entries"),
        ({"x": [1, 2]}, {}, "tensor 'x' is a int; expected a torch tensor"),
        ({"x": (array("KBHND"),) * 3}, {}, "tensor 'x' is a sequence of 3; expected"),
        ({"x": (array("KBHND"),) * 2}, {}, "has K or C, but K and V are tensors of their own"),
        ({"x": array("KBHND", object)}, {}, "holds Python objects"),
        ({"x": array("LBHNC", L=4097)}, {"axes": "LBHNC"}, "4097 layers; expected at most 4096"),
        ({"x": (array("BHND"), array("BHND", D=8))}, {"axes": "BHND"}, "differ in dimension D"),
        ({"x": array("KBHND", B=0)}, {}, "is empty"),
        ({"x": array("KBHND")[:, ::-1]}, {}, "negative strides"),
        ({"x": array("KBHND", K=3)}, {}, "dimension K is 3, expected 2"),
        ({"x": array("BHNC", C=31)}, {"axes": "BHNC"}, "dimension C is 31, expected an even"),
        ({"x": array("KBHND", H=3)}, {}, "has 3 heads; rank 0 of 1 holds 4 of kv_heads=4"),
        ({"x": array("KBHND")}, {"kv_heads": None}, "has 4 heads; rank 0 of 1 holds 1 of kv_hea"),
        ({"x": array("BND")}, {"axes": "BND"}, "has 1 heads; rank 0 of 1 holds 4"),
        ({"x": array("KBHND")}, {"tp": (0, 5), "kv_heads": 12}, "12 KV heads do not divide over 5"),
        ({"x": array("KBHND")}, {"tp": (2, 2)}, r"tp is \(2, 2\); expected \(rank, size\)"),
        ({"x": array("KBHND")}, {"tp": (1, 2, 3)}, "tp is "),
        ({"x": array("KBHND")}, {"tp": (0.5, 2)}, r"tp is \(0.5, 2\); expected integers"),
        ({"x": array("KBHND")}, {"tp": 1}, "tp is 1; expected integers"),
        ({"x": array("KBHND")}, {"dcp": (-1, 2)}, r"dcp is \(-1, 2\)"),
        ({"x": array("KBHND")}, {"interleave": 3}, "8 tokens per block do not divide into turns"),
        ({"x": array("KBHND")}, {"interleave": -3}, "negative or above"),
        ({"x": array("KBHND")}, {"interleave": 0.5}, "expected integers"),
        ({"x": array("KBHND")}, {"layers": [1, 2]}, r"layers is \[1, 2\]; expected 1 numbers"),
        ({"x": array("KBHND")}, {"layers": [-1]}, r"layers is \[-1\]; expected 1 numbers from 0"),
        *(
            ({"x": array("KBHND")}, {"layers": [layer]}, "layers is .* expected integers")
            for layer in (1.7, True, np.True_, "1")
        ),
        ({"x": array("LBHNC")}, {"axes": "LBHNC", "layers": [1, 2, 1]}, r"lists \[1\] more than"),
        ({"x": array("KBHND")}, {"axes": None}, "axes is None; expected a str"),
        ({"x": array("KBHND")}, {"opaque_axes": 1}, "opaque_axes is 1; expected a str"),
        ({"x": array("KBHND")}, {"group": ""}, "cannot be sent: .*length >= 1.*name"),
        ({"x" * 600: array("KBHND")}, {}, "cannot be sent: .*length <= 512"),
        ({"x": array("KBHND")}, {"dtype": 5}, "dtype is 5; expected a str"),
        ({"x": array("KBHND")}, {"opaque_axes": "X"}, "opaque_axes is 'X'; expected different"),
        ({"x": array("KBHND")}, {"opaque_axes": "NN"}, "opaque_axes is 'NN'"),
        (
            {"x": array("KBHND"), "y": array("KBHND", B=6)},
            {},
            "tensors 'x' and 'y' differ in dimension B: 5 and 6",
        ),
        (
            {"x": array("KBHND"), "y": array("KBHND", "f4")},
            {},
            "tensors 'x' and 'y' differ in dtype: float16 and float32",
        ),
        (
            {"x": (array("BHND"), array("BHND", D=8))},
            {"axes": "HND"},
            "tensors 'x' and 'x' differ in dimension D: 16 and 8",
        ),
        (
            {"x": np.lib.stride_tricks.as_strided(array("KBHND"), None, (0, 2048, 512, 64, 2))},
            {},
            "the stride of its kv axis is 0 bytes",
        ),
    ],
)
def test_what_cannot_be_a_cache(tensors, options, message) -> None:
    with pytest.raises(LayoutError, match=message):
        KVCache.from_tensors(tensors, **({"axes": "KBHND", "kv_heads": 4} | options))


def test_memory_that_layers_share_is_given_once() -> None:
    whole = array("KBHND")
    with pytest.raises(LayoutError, match="tensors 'a' and 'b' begin at the same address"):
        KVCache.from_tensors({"a": whole, "b": whole}, axes="KBHND", kv_heads=4)
    with pytest.raises(LayoutError, match="region 0 of group 0 and region 1 of group 0 overlap"):
        KVCache.from_tensors({"a": whole[:, :4], "b": whole[:, 1:]}, axes="KBHND", kv_heads=4)


def test_tensors_without_addresses() -> None:
    with pytest.raises(LayoutError, match=r"is torch.strided on meta; expected a strided tensor"):
        KVCache.from_tensors(
            {"x": torch.zeros(2, 5, 4, 8, 16, device="meta")}, axes="KBHND", kv_heads=4
        )
    with pytest.raises(LayoutError, match=r"is torch.sparse_coo on cpu"):
        KVCache.from_tensors({"x": torch.zeros(5, 8, 16).to_sparse()}, axes="MLA", kv_heads=None)


def test_geometry_survives_its_bytes() -> None:
    made = KVCache.combine(
        cache("BHNC", kv_heads=8, tp=(1, 2), group="full", opaque_axes="N"),
        cache("BND", kv_heads=None, group="latent", dcp=(1, 2), interleave=4),
    )
    data = made.geometry.to_bytes()
    back = Geometry.from_bytes(data)
    assert back == made.geometry
    assert hash(back) == hash(made.geometry)
    assert Geometry.from_bytes(bytearray(data)) == back  # type: ignore[arg-type]
    assert back.names == ["full", "latent"]
    assert back.select(["latent"]) == [made.geometry.groups[1]]
    assert [g.name for g in back.select(["latent"])] == ["latent"]


def test_damaged_bytes_are_refused() -> None:
    data = cache().geometry.to_bytes()
    for n in range(len(data)):
        with pytest.raises(WireError):
            Geometry.from_bytes(data[:n])
    with pytest.raises(WireError, match="announces"):
        Geometry.from_bytes(data + b"\x00")
    with pytest.raises(WireError, match="not a pynixlkv geometry: it begins with b'nons'"):
        Geometry.from_bytes(b"nonsense" * 8)
    with pytest.raises(WireError, match="digest"):
        Geometry.from_bytes(wire.seal(cache().geometry, "hello"))
    random = np.random.default_rng(0)
    accepted = 0
    body = data[-len(msgspec.msgpack.encode(cache().geometry)) :]
    for _ in range(2000):
        damaged = bytearray(body)
        damaged[random.integers(len(body))] = random.integers(256)
        try:
            other = Geometry.from_bytes(wire.seal(msgspec.Raw(bytes(damaged)), "geometry"))
        except WireError:
            continue
        accepted += 1
        for region in other.groups[0].regions:
            assert region.span < len(other.spans)
    assert accepted  # names and such may change


def changed(geometry: Geometry, **fields) -> bytes:
    """Return a geometry's bytes with fields of its first group changed, unchecked."""
    plain = msgspec.to_builtins(geometry)
    plain["groups"][0].update(fields)
    return wire.seal(plain, "geometry")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_blocks": 6}, "has 5 blocks of 8 tokens, its group 6 of 8"),
        ({"kv_heads": 2}, "head axis is 0 to 3; expected 0 to 1"),
        ({"planes": 1}, "kv axis is 0 to 1; expected 0 to 0"),
        ({"head_dim": 15}, "dim axis is 0 to 15; expected 0 to 14"),
        ({"tp": [1, 1]}, "rank 1 is not in a group of 1"),
        ({"dcp": [2, 2]}, "context ranks is 2"),
        ({"element_bytes": 4}, "'float16' has 2 bytes an element, the array 4"),
        ({"element_bytes": 4, "dtype": "float32"}, "stride of its dim axis is 2 bytes"),
        ({"dtype": "void16"}, "'void16' is no element type that two sides read alike"),
        ({"element_bytes": -1}, "Expected `int` >= 1"),
        ({"block_size": 2**60}, "Expected `int` <= 1152921504606846975"),
        ({"regions": []}, "length >= 1"),
        ({"name": "x" * 513}, "length <= 512"),
        ({"dtype": 7}, "Expected `str`"),
    ],
)
def test_impossible_geometries_from_outside(fields, message) -> None:
    geometry = cache().geometry
    assert Geometry.from_bytes(changed(geometry)) == geometry
    with pytest.raises(WireError, match=message):
        Geometry.from_bytes(changed(geometry, **fields))


def test_a_geometry_cannot_point_outside_its_spans() -> None:
    geometry = cache(num_layers=1).geometry
    (span,) = geometry.spans
    short = msgspec.structs.replace(span, nbytes=span.nbytes - 1)
    with pytest.raises(LayoutError, match="outside its span"):
        Geometry((short,), geometry.groups)
    with pytest.raises(LayoutError, match="negative or above"):
        Geometry((msgspec.structs.replace(span, address=-1),), geometry.groups)


def test_differences_name_the_field_and_both_values() -> None:
    mine = cache().geometry
    assert mine.differences(cache("BHNC", num_layers=1).geometry) == []
    other = KVCache.from_tensors(
        {"x": array("BHD", "f4", D=8)}, axes="BHD", kv_heads=4, opaque_axes="H"
    ).geometry
    assert mine.differences(other) == [
        ("kv.dtype", "float16", "float32"),
        ("kv.element_bytes", 2, 4),
        ("kv.head_dim", 16, 8),
        ("kv.planes", 2, 1),
        ("kv.opaque_axes", [], ["H"]),
        ("kv.has_tokens", True, False),
    ]
    more = KVCache.combine(cache(), cache("BND", kv_heads=None, group="latent")).geometry
    assert mine.differences(more) == [("groups", ["kv"], ["kv", "latent"])]
    assert more.differences(mine) == [("groups", ["kv", "latent"], ["kv"])]


def test_there_must_be_caches_to_combine() -> None:
    with pytest.raises(LayoutError, match="no caches to combine"):
        KVCache.combine()
