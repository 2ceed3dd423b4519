"""The memory layout of a rank's KV cache, as boxes with named axes.

`KVCache` is made from the tensors of one rank and keeps them alive. Its `Geometry` is plain data
with addresses in it: comparable, serialisable, and all that a peer needs to plan transfers.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np

from pynixlkv import _native, wire
from pynixlkv._arrays import integers
from pynixlkv._closeable import Uncopied
from pynixlkv.digest import Digest, DigestScope, digest_cache
from pynixlkv.errors import ConfigError, LayoutError
from pynixlkv.topology import held_heads
from pynixlkv.types import MemorySpan, MemoryType

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Axis", "Geometry", "Group", "KVCache", "Part", "Region", "memory_spans"]

_MAX_REGIONS = 4096
_MAX_GROUPS = 64
_MAX_LAYERS = 4096  # of one group; real models have some hundreds

# Letters and names of the axes, in the order of csrc/kv/region.hpp. Letter C, K and D in one
# dimension, has no axis of its own.
_AXES = {"L": "layer", "K": "kv", "B": "block", "H": "head", "N": "token", "D": "dim"}

# Bytes of each element type, by the name that numpy, ml_dtypes and torch share. A type of less than
# a byte has one element in each; only torch's float4_e2m1fn_x2 has two.
_ELEMENT_BYTES = {
    "bool": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": bits // 8 for bits in (16, 32, 64)},
    **{f"complex{bits}": bits // 8 for bits in (32, 64, 128)},
    **dict.fromkeys(("float4_e2m1fn", "float4_e2m1fn_x2", "float6_e2m3fn", "float6_e3m2fn"), 1),
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "bfloat16": 2,
    "bcomplex32": 4,
    **{f">{kind}{size}": size for kind in "iufc" for size in (2, 4, 8)},  # big-endian, in numpy
    ">c16": 16,
}

_Word = Annotated[int, msgspec.Meta(ge=0, lt=2**60)]
_Count = Annotated[int, msgspec.Meta(ge=1, lt=2**60)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Rank = tuple[_Word, _Count]
_T = TypeVar("_T")


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """One axis of a region."""

    start: _Word = 0
    """Global index of its first element; 0 for the block and token axes."""
    count: _Count = 1
    """Number of elements."""
    stride: _Word = 0
    """Bytes from one element to the next; 0 where `count` is 1."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """The addresses of a box of elements.

    The element with global indices (l, k, b, h, n, d) is at ``address`` plus, for each axis,
    ``(index - start) * stride`` bytes.
    """

    name: _Text
    """Name of the tensor, for messages."""
    span: _Word
    """Index into `Geometry.spans` of the memory that holds the whole region."""
    address: _Word
    """Virtual address of the first element."""
    layer: Axis
    kv: Axis
    """0 for K and 1 for V; 0 alone where there is no such axis; any number of planes of state."""
    block: Axis
    head: Axis
    token: Axis
    dim: Axis


class Group(msgspec.Struct, frozen=True, dict=True):
    """What some layers hold of one kind; they share one block table per request."""

    name: _Text
    """Name on this side."""
    kind: _Text
    """What it holds of its layers. Groups of two sides with the same kind meet where they have
    layers in common."""
    table: _Text
    """Name of the block table; groups that have the same one move by the same blocks."""
    dtype: _Text
    """Element type, such as ``"bfloat16"``, or with a packing, such as ``"uint8:nvfp4"``; two sides
    must agree. See `KVCache.from_tensors`."""
    element_bytes: _Count
    block_size: _Word
    """Slots of the token axis; 0 for state that has no token axis and moves block by block."""
    tokens_per_state: _Count
    """Tokens per slot: more than 1 in a compressed cache."""
    num_blocks: _Count
    """Blocks in the pool; block ids are below it."""
    kv_heads: _Count | None
    """KV heads of these layers in the whole model; None if every rank holds the whole cache (an MLA
    latent)."""
    has_exact_heads: bool
    """False if `kv_heads` is an upper bound; see `KVCache.from_tensors`."""
    head_dim: _Count
    """Elements per head and token, or of the latent."""
    planes: _Count
    """Extent of the kv axis: 2 for keys and values, 1 for one latent, any number for state."""
    tp: _Rank
    """Tensor-parallel rank and size."""
    dcp: _Rank
    """Rank and size of the decode-context-parallel group."""
    interleave: _Count
    """Consecutive tokens that one rank of that group holds before the next rank's turn."""
    opaque_axes: Annotated[str, msgspec.Meta(max_length=len(_AXES))]
    """Letters of the axes along which the inside is opaque; see `KVCache.from_tensors`."""
    regions: Annotated[tuple[Region, ...], msgspec.Meta(min_length=1, max_length=_MAX_REGIONS)]
    """The boxes; no element is in two of them."""

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Global indices of the layers held, ascending."""
        return tuple(chain.from_iterable(self._layer_ranges()))

    def _layer_ranges(self) -> list[range]:
        """Return the layers as ascending ranges: regions of a peer may have the same ones."""
        found: list[range] = []
        for start, stop in sorted({(r.layer.start, _stop(r.layer)) for r in self.regions}):
            if found and start <= found[-1].stop:
                found[-1] = range(found[-1].start, max(stop, found[-1].stop))
            else:
                found.append(range(start, stop))
        return found

    @cached_property
    def heads(self) -> range:
        """Global KV heads held; ``range(0, 1)`` if every rank holds the whole cache."""
        return held_heads(*self.tp, self.kv_heads)

    @property
    def block_tokens(self) -> int:
        """Tokens of a sequence per block, the shares of all context-parallel ranks included."""
        return max(self.block_size, 1) * self.tokens_per_state * self.dcp[1]

    def agreed_heads(self, other: Group) -> int | None:
        """Return the KV heads of the model by what two sides know: `kv_heads`, or a lower one."""
        if self.kv_heads is None or other.kv_heads is None:
            return self.kv_heads
        low, high = sorted((self, other), key=lambda group: group.kv_heads or 0)
        is_bound = not high.has_exact_heads and high.tp[1] % (low.kv_heads or 1) == 0
        return low.kv_heads if is_bound else self.kv_heads

    def with_heads(self, kv_heads: int | None) -> Group:
        """Return the group with the number of KV heads that both sides have agreed on."""
        if kv_heads == self.kv_heads:
            return self
        start = held_heads(*self.tp, kv_heads).start
        regions = tuple(
            msgspec.structs.replace(region, head=msgspec.structs.replace(region.head, start=start))
            for region in self.regions
        )
        return msgspec.structs.replace(
            self, kv_heads=kv_heads, has_exact_heads=True, regions=regions
        )

    def differences(self, other: Group) -> list[tuple[str, object, object]]:
        """Return (``"<group>.<field>"``, value here, value there) of all that rules out a plan."""
        agreed = ("dtype", "element_bytes", "head_dim", "planes", "tokens_per_state")
        pairs = [(field, getattr(self, field), getattr(other, field)) for field in agreed]
        if self.agreed_heads(other) != other.agreed_heads(self):
            pairs.append(("kv_heads", self.kv_heads, other.kv_heads))
        pairs.append(("opaque_axes", sorted(self.opaque_axes), sorted(other.opaque_axes)))
        pairs.append(("has_tokens", self.block_size > 0, other.block_size > 0))
        if "H" in self.opaque_axes and "H" in other.opaque_axes:
            field = f"heads per rank, indivisible in pages of {self.dtype},"
            held = [f"{len(group.heads)} of {group.kv_heads}" for group in (self, other)]
            pairs.append((field, held[0], held[1]))
        return [(f"{self.name}.{field}", a, b) for field, a, b in pairs if a != b]

    def __post_init__(self) -> None:
        where = f"group {self.name!r}"
        if set(self.opaque_axes) - set(_AXES) or len(set(self.opaque_axes)) < len(self.opaque_axes):
            raise LayoutError(
                f"{where}: opaque_axes is {self.opaque_axes!r}; expected different letters "
                f"of {''.join(_AXES)!r}"
            )
        _check_dtype(where, self.dtype, self.element_bytes)
        if self.block_size and self.planes > 2:
            raise LayoutError(f"{where}: {self.planes} planes of tokens; expected 2 (K and V) or 1")
        if not self.block_size and self.tokens_per_state > 1:
            raise LayoutError(f"{where}: tokens_per_state needs a token axis; state has none")
        if not self.has_exact_heads and self.kv_heads != self.tp[1]:
            raise LayoutError(
                f"{where}: kv_heads is {self.kv_heads}, an upper bound; expected tp={self.tp[1]}, "
                "as each rank holds one head"
            )
        wholes = {
            "head": self.heads,
            "kv": range(self.planes),
            "dim": range(self.head_dim),
        }
        num_layers = sum(map(len, self._layer_ranges()))
        if num_layers > _MAX_LAYERS:
            raise LayoutError(f"{where}: {num_layers} layers; expected at most {_MAX_LAYERS}")
        for region in self.regions:
            for axis, whole in wholes.items():
                found = getattr(region, axis)
                if found.start < whole.start or _stop(found) > whole.stop:
                    raise LayoutError(
                        f"{where}, region {region.name!r}: {axis} axis is {found.start} to "
                        f"{_stop(found) - 1}; expected {whole.start} to {whole.stop - 1} "
                        f"(kv_heads={self.kv_heads}, tp={self.tp}, head_dim={self.head_dim})"
                    )


class Geometry(msgspec.Struct, frozen=True, dict=True):
    """The layout of a rank's whole KV cache: all that a peer needs to plan transfers.

    Raises
    ------
    LayoutError
        If a region lies outside its span, two regions overlap or hold the same element, or a
        number is out of range.

    Notes
    -----
    Immutable, hashable, safe from several threads. ``==`` compares addresses too; `differences`
    compares what matters to a peer.
    """

    spans: Annotated[tuple[MemorySpan, ...], msgspec.Meta(min_length=1, max_length=_MAX_REGIONS)]
    """Memory to register, ascending and disjoint."""
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1, max_length=_MAX_GROUPS)]
    """Their names differ."""

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.groups):
            raise LayoutError(f"group names are {self.names}; each may appear once")
        kinds = Counter(group.kind for group in self.groups)
        held: dict[tuple[str, int], str] = {}
        with_tokens: dict[str, bool] = {}
        for group in self.groups:
            for layer in group.layers if kinds[group.kind] > 1 else ():
                other = held.setdefault((group.kind, layer), group.name)
                if other != group.name:
                    raise LayoutError(
                        f"groups {other!r} and {group.name!r} both hold {group.kind!r} of layer "
                        f"{layer}; give them kinds of their own, or other layers"
                    )
            has_tokens = group.block_size > 0
            if with_tokens.setdefault(group.table, has_tokens) != has_tokens:
                raise LayoutError(
                    f"group {group.name!r} shares table {group.table!r}, but of the two only one "
                    "has a token axis; the table of state is not by position"
                )
        self._native  # noqa: B018 - its constructor checks the rest

    @cached_property
    def _native(self) -> _native.kv.Geometry:
        return _native.kv.Geometry(self)

    def to_bytes(self) -> bytes:
        """Serialise for a peer, in the envelope of `pynixlkv.wire`."""
        return wire.seal(self, "geometry")

    @classmethod
    def from_bytes(cls, data: bytes) -> Geometry:
        """Read what `to_bytes` wrote; safe on untrusted bytes, checked as a geometry made here.

        Parameters
        ----------
        data : bytes-like
            The whole message.

        Raises
        ------
        ProtocolVersionError
            If another version wrote it.
        WireError
            If it is damaged, truncated, or impossible.
        """
        return wire.unseal(data, cls, "geometry")

    @property
    def names(self) -> list[str]:
        """Names of the groups, in their order."""
        return [group.name for group in self.groups]

    def select(self, names: Iterable[str]) -> list[Group]:
        """Return the groups of these names, in this order."""
        by_name = {group.name: group for group in self.groups}
        return [by_name[name] for name in names]

    def with_groups(self, groups: Iterable[Group]) -> Geometry:
        """Return this geometry with some groups replaced by others of their names."""
        changed: dict[str, Group] = {}
        for group in groups:
            if changed.setdefault(group.name, group).kv_heads != group.kv_heads:
                raise LayoutError(
                    f"group {group.name!r} meets groups of unlike numbers of KV heads: "
                    f"{changed[group.name].kv_heads} and {group.kv_heads}"
                )
        made = tuple(changed.get(group.name, group) for group in self.groups)
        same = all(a is b for a, b in zip(made, self.groups, strict=True))
        return self if same else Geometry(self.spans, made)

    def differences(self, other: Geometry) -> list[tuple[str, object, object]]:
        """Return the differences that rule out transfers between two caches.

        Layouts, block sizes, pool sizes, ranks and names of tensors may differ freely.

        Returns
        -------
        list of (str, object, object)
            Field (``"groups"`` or ``"<group>.<field>"``), value here, value there.
        """
        mine, theirs = ({group.kind for group in side.groups} for side in (self, other))
        found: list[tuple[str, object, object]] = []
        if mine != theirs:
            found.append(("groups", sorted(mine), sorted(theirs)))
        for here, there, _ in meetings(self.groups, other.groups):
            found.extend(here.differences(there))
        return found


def meetings(
    local: Iterable[Group], remote: Iterable[Group]
) -> list[tuple[Group, Group, tuple[int, ...]]]:
    """Return the groups of two sides that hold the same of some layers, and these layers."""
    theirs = [(group, set(group.layers)) for group in remote]
    found = []
    for here in local:
        for there, held in theirs:
            if here.kind == there.kind:
                layers = tuple(layer for layer in here.layers if layer in held)
                if layers:
                    found.append((here, there, layers))
    return found


def for_group(value: Mapping[str, _T], group: Group) -> _T | None:
    """Return what a mapping has for a group, by its name or that of its table."""
    return value[group.name] if group.name in value else value.get(group.table)


def _stop(axis: Axis) -> int:
    return axis.start + axis.count


def _check_dtype(where: str, dtype: str, element_bytes: int) -> None:
    element, colon, packing = dtype.partition(":")
    expected = _ELEMENT_BYTES.get(element)
    if expected is None or (colon and not packing):
        raise LayoutError(
            f"{where}: {dtype!r} is no element type that two sides read alike; expected a number "
            "type of numpy, ml_dtypes or torch by its name, such as 'bfloat16' or 'float8_e4m3fn', "
            "alone or with a packing, as in 'uint8:nvfp4'; give it as dtype= if the array's own "
            "type does not tell"
        )
    if expected != element_bytes:
        raise LayoutError(
            f"{where}: dtype {dtype!r} has {expected} bytes an element, the array {element_bytes}"
        )


@dataclass(frozen=True)
class _Array:
    """Address, layout and owner of a tensor or array."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    dtype: str
    memory: MemoryType
    device: int
    storage: object
    owner: object
    read_only: bool = False


def _read_array(name: str, array: Any) -> _Array:  # noqa: ANN401
    if isinstance(array, _Array):
        return array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _read_tensor(name, array)
    on_device = hasattr(array, "__cuda_array_interface__")
    face = "__cuda_array_interface__" if on_device else "__array_interface__"
    interface = getattr(array, face, None)
    if not isinstance(interface, Mapping):
        raise LayoutError(
            f"tensor {name!r} is a {type(array).__name__}; expected a torch tensor or a numpy "
            "array, or an array of CUDA memory"
        )
    dtype = getattr(array, "dtype", None)  # the string of a type of ml_dtypes does not name it
    if not isinstance(dtype, np.dtype):
        try:
            dtype = np.dtype(interface["typestr"])
        except TypeError as error:
            raise LayoutError(f"tensor {name!r}: {error}") from error
    if dtype.hasobject:
        raise LayoutError(f"tensor {name!r} holds Python objects; expected numbers")
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        strides = np.cumprod((dtype.itemsize, *shape[:0:-1]))[::-1].tolist()
    storage = array
    while isinstance(getattr(storage, "base", None), np.ndarray):
        storage = storage.base
    return _Array(
        address=interface["data"][0],
        shape=shape,
        strides=tuple(strides),
        element_bytes=dtype.itemsize,
        dtype=dtype.str if dtype.str[0] == ">" else dtype.name,
        memory=MemoryType.VRAM if on_device else MemoryType.DRAM,
        # CUDA's interface does not name the device; agents check what is registered.
        device=getattr(array, "__dlpack_device__", lambda: (0, 0))()[1] if on_device else 0,
        storage=id(storage),
        owner=array,
        read_only=bool(interface["data"][1]),
    )


def _read_tensor(name: str, tensor: Any) -> _Array:  # noqa: ANN401
    memories = {"cpu": MemoryType.DRAM, "cuda": MemoryType.VRAM, "xpu": MemoryType.VRAM}
    if str(tensor.layout) != "torch.strided" or tensor.device.type not in memories:
        raise LayoutError(
            f"tensor {name!r} is {tensor.layout} on {tensor.device}; expected a strided tensor "
            "on cpu, cuda or xpu"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise LayoutError(
            f"tensor {name!r} is a lazy conjugate or negative, whose memory holds other values; "
            "pass tensor.resolve_conj().resolve_neg()"
        )
    element_bytes = tensor.element_size()
    storage = tensor.untyped_storage()
    return _Array(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * element_bytes for stride in tensor.stride()),
        element_bytes=element_bytes,
        dtype=str(tensor.dtype).removeprefix("torch."),
        memory=memories[tensor.device.type],
        device=tensor.device.index or 0,
        storage=(storage.data_ptr(), storage.nbytes()),
        owner=tensor,
    )


def _resolve_axes(name: str, axes: str, shape: tuple[int, ...], *, apart: bool) -> str:
    """Return the letters of an array's dimensions. `apart`: K and V are in separate arrays."""
    where = f"tensor {name!r} of shape {shape}: axes {axes!r}"
    if axes in ("HND", "NHD"):
        candidates = ["B" + axes] if apart else ["BK" + axes, "KB" + axes]
        fitting = [
            letters
            for letters in candidates
            if len(shape) == len(letters) and ("K" not in letters or shape[letters.index("K")] == 2)
        ]
        if len(fitting) != 1:
            packed = "B" + axes[:2] + "C"
            raise LayoutError(
                f"{where} could mean {' or '.join(fitting or ['none that fits'])}; write the order "
                f"of the dimensions, such as {', '.join(map(repr, [*candidates, packed]))}"
            )
        return fitting[0]
    letters = "BND" if axes == "MLA" else axes
    unknown = sorted(set(letters) - set("LKBHNDC"))
    if unknown:
        raise LayoutError(f"{where} has unknown letters {''.join(unknown)!r}; use L K B H N D C")
    repeated = sorted({letter for letter in letters if letters.count(letter) > 1})
    if repeated:
        raise LayoutError(f"{where} repeats {''.join(repeated)!r}; each letter may appear once")
    if "B" not in letters or ("D" in letters) == ("C" in letters):
        raise LayoutError(f"{where} must have B, and either D or C")
    if "C" in letters and "K" in letters:
        raise LayoutError(f"{where} has K beside C; C holds K and V already")
    if apart and set(letters) & set("KC"):
        raise LayoutError(f"{where} has K or C, but K and V are tensors of their own")
    if len(letters) != len(shape):
        raise LayoutError(f"{where} names {len(letters)} dimensions, the tensor has {len(shape)}")
    return letters


@dataclass(frozen=True)
class _Box:
    """An array with its axes; layers count from 0."""

    name: str
    array: _Array
    axes: dict[str, Axis]
    planes: int
    has_tokens: bool


def _read_box(name: str, value: Any, axes: str, kv: int | None) -> _Box:  # noqa: ANN401
    array = _read_array(name, value)
    letters = _resolve_axes(name, axes, array.shape, apart=kv is not None)
    where = f"tensor {name!r} of shape {array.shape}"
    if min(array.shape) < 1:
        raise LayoutError(f"{where} is empty")
    if min(array.strides) < 0:
        raise LayoutError(f"{where} has negative strides {array.strides}; pass it unflipped")
    found = {
        letter: Axis(0, count, stride if count > 1 else 0)
        for letter, count, stride in zip(letters, array.shape, array.strides, strict=True)
    }
    if "K" in found and "N" in found and found["K"].count != 2:
        raise LayoutError(f"{where}: dimension K is {found['K'].count}, expected 2 (K and V)")
    if "C" in found:
        content = found.pop("C")
        if content.count % 2:
            raise LayoutError(f"{where}: dimension C is {content.count}, expected an even number")
        half = content.count // 2
        found["K"] = Axis(0, 2, half * content.stride)
        found["D"] = Axis(0, half, content.stride if half > 1 else 0)
    planes = 2 if kv is not None else found["K"].count if "K" in found else 1
    if kv is not None:
        found["K"] = Axis(kv, 1, 0)
    complete = {letter: found.get(letter, Axis()) for letter in _AXES}
    return _Box(name, array, complete, planes, "N" in letters)


def _layer_numbers(boxes: Sequence[list[_Box]], layers: Sequence[int] | None) -> list[list[int]]:
    counts = [tensor[0].axes["L"].count for tensor in boxes]
    numbers = list(range(sum(counts))) if layers is None else _integers("layers", layers)
    if len(numbers) != sum(counts) or min(numbers) < 0:
        raise LayoutError(
            f"layers is {numbers}; expected {sum(counts)} numbers from 0 on, one for each layer of "
            f"the tensors {[tensor[0].name for tensor in boxes]}"
        )
    if len(set(numbers)) < len(numbers):
        twice = sorted({layer for layer in numbers if numbers.count(layer) > 1})
        raise LayoutError(f"layers lists {twice} more than once")
    starts = np.cumsum([0, *counts]).tolist()
    return [numbers[start : start + count] for start, count in zip(starts, counts, strict=False)]


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (index, count) of each stretch of consecutive numbers."""
    cuts = [0, *(i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1)]
    return [(a, b - a) for a, b in zip(cuts, [*cuts[1:], len(numbers)], strict=True)]


def _extent(array: _Array) -> tuple[int, int]:
    reach = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
    return array.address, array.address + reach + array.element_bytes


def _find_spans(arrays: Sequence[_Array]) -> tuple[MemorySpan, ...]:
    """Return one range per storage, with touching ones joined."""
    extents: dict[tuple[MemoryType, int, object], tuple[int, int, bool]] = {}
    for array in arrays:
        key = (array.memory, array.device, array.storage)
        begin, end = _extent(array)
        low, high, read_only = extents.get(key, (begin, end, False))
        extents[key] = min(low, begin), max(high, end), read_only or array.read_only
    spans: list[MemorySpan] = []
    ordered = sorted(extents.items(), key=lambda item: item[1])
    for (memory, device, _), (begin, end, read_only) in ordered:
        if spans and (spans[-1].memory, spans[-1].device) == (memory, device):
            last = spans[-1]
            last_end = last.address + last.nbytes
            # Adjoining allocations of device memory are registered separately.
            touches = begin == last_end and read_only == last.read_only
            if begin < last_end or (touches and memory is MemoryType.DRAM):
                spans.pop()
                begin, end = last.address, max(end, last_end)
                read_only |= last.read_only
        spans.append(MemorySpan(begin, end - begin, memory, device, read_only))
    return tuple(spans)


def memory_spans(memory: object) -> tuple[MemorySpan, ...]:
    """Return the ranges of memory to register for a cache, span, tensor or array.

    The caller keeps the memory.

    Raises
    ------
    LayoutError
        If `memory` has another type, or is a tensor or array with gaps.
    ConfigError
        If `memory` has no bytes.
    """
    if isinstance(memory, KVCache):
        return memory.spans
    if isinstance(memory, MemorySpan):
        return (memory,)
    array = _read_array("", memory)
    nbytes = math.prod(array.shape) * array.element_bytes
    if nbytes == 0:
        raise ConfigError(f"an array of shape {array.shape} has no bytes to register")
    begin, end = _extent(array)
    if end - begin != nbytes:
        raise LayoutError(
            f"an array of shape {array.shape} and strides {array.strides} bytes is not contiguous; "
            "register the array that it is a view of, or make a contiguous copy"
        )
    return (MemorySpan(begin, nbytes, array.memory, array.device, array.read_only),)


@dataclass(frozen=True)
class Part:
    """One of several arrays that lie side by side in dimension P of a tensor.

    Such as x, B and C of a convolution's channels, q, k and v, or the data and the scales of a
    page.
    """

    name: str
    axes: str
    """Its dimensions, outermost first, by the letters of `KVCache.from_tensors`."""
    sizes: Mapping[str, int]
    """Extent of each letter but H, of which a rank has the heads that it holds."""
    kv_heads: int | None
    """Heads, or equal shards, of the whole model; None if every rank holds the whole part."""
    dtype: str | None = None
    """Element type, if it is not that of the tensor."""

    def extents(self, tp: tuple[int, int]) -> list[int]:
        """Return the extent of each dimension on a rank."""
        sizes = {**self.sizes, "H": len(held_heads(*tp, self.kv_heads))}
        missing = [letter for letter in self.axes if letter not in sizes]
        if missing or not self.axes:
            raise LayoutError(
                f"part {self.name!r} has axes {self.axes!r} and sizes {dict(self.sizes)!r}; "
                "expected a size for each letter but H"
            )
        return _integers(f"sizes of part {self.name!r}", [sizes[letter] for letter in self.axes])


def _join(name: str, value: object, at: int, count: int) -> _Array:
    """Return an array with `count` dimensions from `at` on as one."""
    array = _read_array(name, value)
    inside = list(zip(array.shape, array.strides, strict=True))[at : at + count]
    steps = [(n, stride) for n, stride in inside if n > 1] or [(1, array.element_bytes)]
    length = 1
    for n, stride in reversed(steps):
        if stride != length * steps[-1][1]:
            raise LayoutError(
                f"tensor {name!r} of shape {array.shape} and strides {array.strides} is not "
                f"contiguous in dimensions {at} to {at + count - 1}, which hold parts"
            )
        length *= n
    return replace(
        array,
        shape=(*array.shape[:at], length, *array.shape[at + count :]),
        strides=(*array.strides[:at], steps[-1][1], *array.strides[at + count :]),
    )


def _narrow(name: str, array: _Array, at: int, begin: int, extents: Sequence[int]) -> _Array:
    """Return the part of an array that begins at an element of dimension `at`."""
    if begin + math.prod(extents) > array.shape[at]:
        raise LayoutError(
            f"tensor {name!r}: dimension P has {array.shape[at]} elements; a part of shape "
            f"{tuple(extents)} from {begin} on does not fit"
        )
    step = array.strides[at]
    inside = [step * math.prod(extents[i + 1 :]) for i in range(len(extents))]
    return replace(
        array,
        address=array.address + begin * step,
        shape=(*array.shape[:at], *extents, *array.shape[at + 1 :]),
        strides=(*array.strides[:at], *inside, *array.strides[at + 1 :]),
    )


class KVCache(Uncopied):
    """The KV cache of one rank: its tensors, kept alive, and their geometry.

    Make one with `from_tensors`; join several groups with `combine`. Immutable. Nothing is copied:
    transfers move bytes in and out of the tensors that were given.
    """

    __slots__ = ("_arrays", "geometry")

    geometry: Geometry
    """The layout; send ``geometry.to_bytes()`` to the peer."""

    DEFAULT_GROUP: ClassVar[str] = "kv"

    def __init__(self, arrays: Sequence[_Array], groups: Sequence[Group]) -> None:
        self._arrays = tuple(arrays)
        spans = _find_spans(arrays)
        self.geometry = Geometry(spans, tuple(_place(group, spans) for group in groups))
        try:  # refuse here what a peer would refuse
            msgspec.convert(msgspec.to_builtins(self.geometry), Geometry)
        except msgspec.ValidationError as error:
            raise LayoutError(f"the geometry cannot be sent: {error}") from error

    @property
    def spans(self) -> tuple[MemorySpan, ...]:
        """Memory to register with an agent; the cache holds the tensors."""
        return self.geometry.spans

    def with_tables(self, tables: Mapping[str, str]) -> KVCache:
        """Return this cache with other names of its block tables."""
        return KVCache(
            self._arrays,
            [
                msgspec.structs.replace(group, table=tables.get(group.table, group.table))
                for group in self.geometry.groups
            ],
        )

    def owner_of(self, region: Region, element_bytes: int) -> object:
        """Return the tensor that holds a region; groups may share memory, as other elements."""
        fitting = [
            array
            for array in self._arrays
            if array.address <= region.address and array.element_bytes == element_bytes
        ]
        return max(fitting, key=lambda array: array.address).owner

    def __repr__(self) -> str:
        groups = ", ".join(
            f"{g.name}: {len(g.layers)} layers, {g.num_blocks} blocks of {g.block_size} tokens, "
            f"heads {g.heads.start}..{g.heads.stop - 1}"
            for g in self.geometry.groups
        )
        return f"<KVCache {groups}; {sum(s.nbytes for s in self.spans)} bytes>"

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Any],
        *,
        axes: str,
        kv_heads: int | None,
        tp: tuple[int, int] = (0, 1),
        layers: Sequence[int] | None = None,
        group: str = DEFAULT_GROUP,
        kind: str | None = None,
        table: str | None = None,
        dtype: str | None = None,
        has_exact_heads: bool = True,
        tokens_per_state: int = 1,
        dcp: tuple[int, int] = (0, 1),
        interleave: int = 1,
        opaque_axes: str = "",
    ) -> KVCache:
        """Describe the tensors of one group of layers.

        Parameters
        ----------
        tensors : mapping of str to tensor or pair of tensors
            Torch tensors (cpu or cuda, any dtype) or numpy arrays, by layer name. Elements must
            not overlap; views, permuted and padded tensors are fine. A pair holds K and V of a
            layer in separate tensors. All must agree in dtype, number of blocks, tokens per block
            and head size.
        axes : str
            The dimensions of each tensor, in its order, one letter each: ``L`` layer, ``K`` K or V
            (of size 2; of state any number of planes, such as the taps of a convolution), ``B``
            block, ``H`` KV head, ``N`` token, ``D`` element of a head or of
            the latent; ``C``, instead of K and D, K's elements and then V's. Each letter at most
            once; B and one of D and C are required. Without ``N`` the group is state that moves
            block by block. ``"HND"`` and ``"NHD"`` stand for ``"BK"`` or ``"KB"`` and these
            letters, whichever alone fits the shape, or for ``"B"`` and these letters for pairs;
            ``"MLA"`` stands for ``"BND"``.
        kv_heads : int or None
            KV heads (or equal shards of state) that these layers have in the whole model; None if
            every rank holds the whole (MLA), whatever `tp` is. Dimension H must be as long as
            `pynixlkv.topology.held_heads` says, and may be left out if that is 1.
        tp : tuple of (int, int)
            Tensor-parallel rank and size.
        layers : sequence of int, optional
            Global index of each layer, in the order of the mapping and, inside a tensor, of its
            dimension L. By default 0, 1, 2, …. Both sides of a transfer must use the same
            numbers; a pipeline stage uses those of the whole model. Two attention modules of one
            layer get numbers of their own, or groups of two kinds.
        group : str
            Name of the group.
        kind : str, optional
            What the group holds of its layers, by default its name. Groups of two sides meet where
            they hold the same kind of the same layers, whatever their names are.
        table : str, optional
            Name of the group's block table, by default that of the group. What rides with other
            data, such as scales beside it, names the same table.
        dtype : str, optional
            Name of the element type if the tensor's own does not tell (a ``uint16`` view of
            bfloat16), of the same size. Types are known by the name that numpy, ml_dtypes and torch
            share; types below a byte take one each. Elements whose meaning depends on others, such
            as packed data and scales, get the name of the packing after a colon:
            ``"uint8:nvfp4"``. Void, structured, object, ``longdouble``, time and torch's quantised
            and bits types have no name that two sides read alike, and are refused without `dtype`.
        has_exact_heads : bool
            False if the rank holds one head and does not know how many the model has: `kv_heads` is
            then the size of `tp`, and two sides agree on the lower of their numbers.
        tokens_per_state : int
            Tokens of the sequence for each entry of dimension N, in a compressed cache; the same on
            both sides. An entry moves if one of its tokens does.
        dcp : tuple of (int, int)
            Rank and size of the decode-context-parallel group, over which tokens are interleaved.
        interleave : int
            Consecutive tokens per turn in that group; divides the tokens per block.
        opaque_axes : str
            Letters of axes along which the inside of the cache is opaque. Along such an axis and
            all axes of smaller stride, both sides must have the same layout and extent, and
            everything moves whole. ``"N"`` moves whole blocks of tokens: a tail is rounded up.

        Raises
        ------
        LayoutError
            If the tensors, the axes and the numbers do not fit each other.
        """
        entries = list(tensors.items()) if hasattr(tensors, "items") else []
        if not entries:
            raise LayoutError(
                f"tensors is a {type(tensors).__name__} without entries; expected a mapping of "
                "layer name to tensor"
            )
        texts: dict[str, object] = {"axes": axes, "group": group, "opaque_axes": opaque_axes}
        kind, table = group if kind is None else kind, group if table is None else table
        texts |= {"kind": kind, "table": table} | ({} if dtype is None else {"dtype": dtype})
        for what, text in texts.items():
            if not isinstance(text, str):
                raise LayoutError(f"{what} is {text!r}; expected a str")
        tp, dcp = _pair("tp", tp), _pair("dcp", dcp)
        held = held_heads(*tp, kv_heads)
        boxes = [_read_layer(str(name), value, axes) for name, value in entries]
        _check_distinct([box for tensor in boxes for box in tensor])
        first = boxes[0][0]
        dtype = first.array.dtype if dtype is None else dtype
        _check_dtype(f"tensor {first.name!r}", dtype, first.array.element_bytes)
        regions: list[Region] = []
        for tensor, numbers in zip(boxes, _layer_numbers(boxes, layers), strict=True):
            for box in tensor:
                _check_alike(first, box)
                if box.axes["H"].count != len(held):
                    raise LayoutError(
                        f"tensor {box.name!r} has {box.axes['H'].count} heads; rank {tp[0]} of "
                        f"{tp[1]} holds {len(held)} of kv_heads={kv_heads} "
                        f"({held.start} to {held.stop - 1})"
                    )
                regions.extend(_regions(box, numbers, held))
        made = Group(
            name=group,
            kind=kind,
            table=table,
            dtype=dtype,
            element_bytes=first.array.element_bytes,
            block_size=first.axes["N"].count if first.has_tokens else 0,
            tokens_per_state=_integers("tokens_per_state", [tokens_per_state])[0],
            num_blocks=first.axes["B"].count,
            kv_heads=kv_heads,
            has_exact_heads=has_exact_heads,
            head_dim=first.axes["D"].count,
            planes=first.planes,
            tp=tp,
            dcp=dcp,
            interleave=_integers("interleave", [interleave])[0],
            opaque_axes=opaque_axes,
            regions=tuple(regions),
        )
        return cls([box.array for tensor in boxes for box in tensor], [made])

    @classmethod
    def from_parts(
        cls,
        tensors: Mapping[str, Any],
        *,
        axes: str,
        parts: Sequence[Part],
        group: str = DEFAULT_GROUP,
        kind: str | None = None,
        table: str | None = None,
        **options: Any,  # noqa: ANN401
    ) -> KVCache:
        """Describe tensors that hold several things side by side, each sharded by its own rule.

        Parameters
        ----------
        tensors : mapping of str to tensor
            As for `from_tensors`.
        axes : str
            As for `from_tensors`, with ``P`` for the dimension in which the parts follow each
            other. Adjoining dimensions that are contiguous may all be ``P``.
        parts : sequence of Part
            The parts, in the order of the memory.
        group, kind : str
            Each part becomes a group, whose name and kind are these, a dot, and the part's name.
        table : str, optional
            Name of the block table of all parts, by default `group`.
        **options
            `tp`, `layers`, `dcp`, `interleave`, `tokens_per_state`, `opaque_axes` of
            `from_tensors`, for all parts.

        Raises
        ------
        LayoutError
            If the parts do not fill dimension P, or do not fit the numbers.

        Examples
        --------
        The convolution state of Mamba 2 on rank 1 of 2, with three taps: 8 heads of 4 channels are
        sharded, and B and C of one group are on every rank.

        >>> state = np.zeros((16, 3, 4 * 4 + 2 + 2), np.float32)
        >>> parts = [Part("x", "HD", {"D": 4}, 8), Part("B", "HD", {"D": 2}, 1)]
        >>> parts += [Part("C", "HD", {"D": 2}, 1)]
        >>> KVCache.from_parts({"0": state}, axes="BKP", parts=parts, tp=(1, 2), group="conv")
        <KVCache conv.x: 1 layers, 16 blocks of 0 tokens, heads 4..7; ...
        """
        table = group if table is None else table
        where, tp = f"axes {axes!r}", _pair("tp", options.get("tp", (0, 1)))
        count = axes.count("P")
        if not count or "P" * count not in axes:
            raise LayoutError(f"{where}: expected one dimension P of parts, or several in a row")
        at = axes.index("P")
        arrays = {str(name): _join(str(name), value, at, count) for name, value in tensors.items()}
        caches, begin = [], 0
        for part in parts:
            extents = part.extents(tp)
            caches.append(
                cls.from_tensors(
                    {n: _narrow(n, array, at, begin, extents) for n, array in arrays.items()},
                    axes=axes.replace("P" * count, part.axes),
                    kv_heads=part.kv_heads,
                    group=f"{group}.{part.name}",
                    kind=f"{group if kind is None else kind}.{part.name}",
                    table=table,
                    dtype=part.dtype,
                    **options,
                )
            )
            begin += math.prod(extents)
        for name, array in arrays.items():
            if array.shape[at] != begin:
                raise LayoutError(
                    f"tensor {name!r}: dimension P has {array.shape[at]} elements, the parts "
                    f"{[part.name for part in parts]} {begin}"
                )
        return cls.combine(*caches)

    @classmethod
    def combine(cls, *caches: KVCache) -> KVCache:
        """Join caches into one; each group keeps its own block table.

        Groups may share memory (a pool of blocks) if equal block numbers mean equal bytes.

        Raises
        ------
        LayoutError
            If there are no caches, a name appears twice, or groups overlap at different block
            numbers.
        """
        if not caches:
            raise LayoutError("there are no caches to combine; give one or more")
        return cls(
            [array for cache in caches for array in cache._arrays],
            [group for cache in caches for group in cache.geometry.groups],
        )

    def digest(
        self,
        blocks: ArrayLike | Mapping[str, ArrayLike],
        *,
        start: int | Mapping[str, int] = 0,
        num_tokens: int | Mapping[str, int] | None = None,
        unit: int | Mapping[str, int] | None = None,
        units: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        scopes: Iterable[DigestScope] | None = None,
    ) -> Digest:
        """Compute digests of the bytes in some blocks, by layer, K or V, head and unit of tokens.

        Equal contents have equal digests in any layout, block size and place in the pool, and on
        any rank. Swapped tokens, heads, layers, or K and V have different ones.

        Parameters
        ----------
        blocks : array_like of int, or mapping of str to array_like
            Block table of one sequence, which the caller holds; tables by group name if the cache
            has several groups. Options may be mappings of group name, too.
        start : int
            Token position of the first block.
        num_tokens : int, optional
            Valid tokens of the sequence, from position 0; by default all that the blocks hold.
        unit : int, optional
            Tokens per digest, by default those of a block. Both sides must use the same.
        units : sequence of int, optional
            Units to digest, by default all; unit i begins at token ``i * unit``.
        layers, heads : sequence of int, optional
            Global layers and KV heads, by default all that are held.
        scopes : iterable of DigestScope, optional
            All of this but `blocks` and `start`, as `TransferPlan.digest_scopes` makes them.

        Raises
        ------
        PlanError
            If a block number is out of range, or the blocks do not hold what is wanted.
        NativeError
            If device memory could not be copied.

        Notes
        -----
        Safe from any thread; releases the GIL. Device memory is copied to the host first, on
        torch's current stream: the digested blocks only, at most 64 MiB at a time.
        """
        return digest_cache(
            self,
            blocks,
            start,
            num_tokens,
            scopes,
            unit=unit,
            units=units,
            layers=layers,
            heads=heads,
        )


def _regions(box: _Box, numbers: list[int], held: range) -> Iterator[Region]:
    """Make a region of each stretch of consecutive layers."""
    axes = {name: box.axes[letter] for letter, name in _AXES.items()}
    axes["head"] = msgspec.structs.replace(axes["head"], start=held.start)
    stride = axes["layer"].stride
    for at, count in runs(numbers):
        axes["layer"] = Axis(numbers[at], count, stride if count > 1 else 0)
        yield Region(box.name, 0, box.array.address + at * stride, **axes)


def _place(group: Group, spans: Sequence[MemorySpan]) -> Group:
    """Return a group whose regions name their spans."""
    starts = [span.address for span in spans]
    regions = tuple(
        msgspec.structs.replace(region, span=bisect_right(starts, region.address) - 1)
        for region in group.regions
    )
    return msgspec.structs.replace(group, regions=regions)


def _read_layer(name: str, value: Any, axes: str) -> list[_Box]:  # noqa: ANN401
    if not isinstance(value, (tuple, list)):
        return [_read_box(name, value, axes, None)]
    if len(value) != 2:
        raise LayoutError(f"tensor {name!r} is a sequence of {len(value)}; expected (K, V)")
    pair = [_read_box(name, half, axes, kv) for kv, half in enumerate(value)]
    _check_alike(pair[0], pair[1], "BNDL")
    return pair


def _check_alike(first: _Box, other: _Box, letters: str = "BND") -> None:
    facts: dict[str, tuple[object, object]] = {
        "dtype": (first.array.dtype, other.array.dtype),
        "K and V": (first.planes, other.planes),
    }
    for letter in letters:
        counts = (first.axes[letter].count, other.axes[letter].count)
        facts[f"dimension {letter}"] = counts
    for what, (a, b) in facts.items():
        if a != b:
            raise LayoutError(
                f"tensors {first.name!r} and {other.name!r} differ in {what}: {a} and {b}; "
                "layers that differ go into groups of their own (see KVCache.combine)"
            )


def _check_distinct(boxes: Sequence[_Box]) -> None:
    names: dict[int, str] = {}
    for box in boxes:
        other = names.setdefault(box.array.address, box.name)
        if other is not box.name:
            raise LayoutError(
                f"tensors {other!r} and {box.name!r} begin at the same address "
                f"{box.array.address:#x}; give memory that layers share once"
            )


def _pair(what: str, value: tuple[int, int]) -> tuple[int, int]:
    pair = _integers(what, value)
    if len(pair) != 2 or not 0 <= pair[0] < pair[1]:
        raise LayoutError(f"{what} is {value!r}; expected (rank, size) with 0 <= rank < size")
    return pair[0], pair[1]


def _integers(what: str, values: Iterable[int]) -> list[int]:
    try:
        numbers: list[int] = integers(what, list(values), LayoutError).tolist()
        return numbers
    except (TypeError, LayoutError) as error:
        raise LayoutError(f"{what} is {values!r}; expected integers") from error
