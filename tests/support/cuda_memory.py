"""Memory of CUDA cards without torch, and what the driver of tests/cuda_stub says."""

import contextlib
import ctypes
import os
from functools import cache

import numpy as np

from pynixlkv.testing.contents import random_bytes
from pynixlkv.testing.remote import Pool

Address = ctypes.c_ulonglong
_POSIX_FD = 1
_VMM_UNIT = 2 << 20
_DLPACK_NAME = ctypes.create_string_buffer(b"dltensor")


@cache
def driver():
    """Return the driver, started."""
    library = ctypes.CDLL("libcuda.so.1")
    check(library.cuInit(0))
    return library


IS_STUB = "cuda_stub" in os.environ.get("LD_LIBRARY_PATH", "")
"""Whether the driver is that of tests/cuda_stub, which tests can hold up and ask."""


def check(status):
    assert status == 0, f"CUDA error {status}"


def count(what):
    """Return how often something happened in this process."""
    return driver().cudaStubCount(what.encode())


@cache
def primary(device):
    """Return the primary context of a device, which this process keeps, as torch does."""
    context = ctypes.c_void_p()
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    return context


@contextlib.contextmanager
def current(device):
    check(driver().cuCtxPushCurrent_v2(primary(device)))
    yield
    check(driver().cuCtxPopCurrent_v2(None))


def current_context():
    context = ctypes.c_void_p()
    check(driver().cuCtxGetCurrent(ctypes.byref(context)))
    return context.value


def num_cards():
    number = ctypes.c_int()
    check(driver().cuDeviceGetCount(ctypes.byref(number)))
    return number.value


class _DLTensor(ctypes.Structure):
    """The beginning of a ``DLManagedTensor``, as DLPack's specification lays it out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("owner", ctypes.c_void_p * 2),
    )


class DeviceArray:
    """An array in memory of a card. `kind` is how it is allocated."""

    def __init__(self, shape, dtype=np.uint16, device=0, kind="plain"):
        self.device = device
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        address, size = Address(), ctypes.c_size_t(self.nbytes)
        with current(device):
            if kind == "plain":
                check(driver().cuMemAlloc_v2(ctypes.byref(address), size))
            elif kind == "managed":
                check(driver().cuMemAllocManaged(ctypes.byref(address), size, 1))
            elif kind == "pool":
                check(driver().cuMemAllocAsync(ctypes.byref(address), size, make_stream(device)))
            else:
                address = self._reserve()
        self.address = address.value
        self.write(np.zeros(self.shape, self.dtype))

    def write(self, values):
        values = np.ascontiguousarray(values, self.dtype)
        to, size = Address(self.address), ctypes.c_size_t(self.nbytes)
        with current(self.device):
            check(driver().cuMemcpyHtoD_v2(to, ctypes.c_void_p(values.ctypes.data), size))

    def read(self):
        values = np.empty(self.shape, self.dtype)
        start, size = Address(self.address), ctypes.c_size_t(self.nbytes)
        with current(self.device):
            check(driver().cuMemcpyDtoH_v2(ctypes.c_void_p(values.ctypes.data), start, size))
        return values

    def _reserve(self):
        size = ctypes.c_size_t(-(-self.nbytes // _VMM_UNIT) * _VMM_UNIT)
        address, handle = Address(), Address()
        prop = (ctypes.c_int * 8)(1, _POSIX_FD, 1, self.device)
        access = (ctypes.c_int * 3)(1, self.device, 3)
        check(driver().cuMemCreate(ctypes.byref(handle), size, prop, Address(0)))
        check(driver().cuMemAddressReserve(ctypes.byref(address), size, 0, Address(0), Address(0)))
        check(driver().cuMemMap(address, size, 0, handle, Address(0)))
        check(driver().cuMemSetAccess(address, size, access, 1))
        return address

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self):
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        kind = 1, 8 * self.dtype.itemsize, 1, 0
        device = self.__dlpack_device__()
        self._lent = _DLTensor(self.address, device, len(self.shape), kind, shape)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
        return new(ctypes.addressof(self._lent), _DLPACK_NAME, None)

    def free(self):
        with current(self.device):
            check(driver().cuMemFree_v2(Address(self.address)))


class DevicePool(Pool):
    """A pool in memory of the first card; its array is a copy."""

    device = 0
    kind = "plain"

    def _allocate(self, shape):
        self.tensor = DeviceArray(shape, device=self.device, kind=self.kind)
        return None, self.tensor

    @property
    def array(self):
        return self.tensor.read()

    @array.setter
    def array(self, _):
        pass

    def fill(self, seed):
        self.tensor.write(
            random_bytes(self.tensor.nbytes, seed).view(np.uint16).reshape(self.tensor.shape)
        )


class SecondDevicePool(DevicePool):
    device = 1


class VmmPool(DevicePool):
    kind = "vmm"


class StreamOrderedPool(DevicePool):
    kind = "pool"


# ---- streams


@cache
def make_stream(device=0):
    """Return the stream of this process on a card for the work of an engine."""
    stream = ctypes.c_void_p()
    with current(device):
        check(driver().cuStreamCreate(ctypes.byref(stream), 1))
    return stream


def launch(to, start, nbytes, device=0):
    """Append a copy to the stream of a card."""
    size = ctypes.c_size_t(nbytes)
    with current(device):
        check(driver().cuMemcpyAsync(Address(to), Address(start), size, make_stream(device)))


def allow(steps=-1, device=0):
    """Let so many steps of the stream of a card run, or all."""
    driver().cudaStubAllow(make_stream(device), steps)


class CardEvent:
    """A ``torch.Event`` on the cards' streams."""

    def __init__(self, device_type):
        assert device_type == "cuda"
        self._event = ctypes.c_void_p()
        check(driver().cuEventCreate(ctypes.byref(self._event), 2))

    def record(self, stream):
        check(driver().cuEventRecord(self._event, stream))

    def query(self):
        assert current_context() is not None, "torch would make a context on the first card"
        status = driver().cuEventQuery(self._event)
        assert status in (0, 600)
        return status == 0


def current_stream():
    device = ctypes.c_int()
    check(driver().cuCtxGetDevice(ctypes.byref(device)))
    return make_stream(device.value)


# ---- torch


class CardTensor:
    """What ``torch.as_tensor`` makes of a `DeviceArray`, as far as digests use it."""

    def __init__(self, array):
        self.array, self.device = array, "cpu"

    def view(self, _):
        return self

    def storage_offset(self):
        return 0

    def data_ptr(self):
        return self.array.address

    def as_strided(self, *place):
        import torch

        words = np.dtype(f"i{self.array.dtype.itemsize}")
        return torch.from_numpy(self.array.read().reshape(-1).view(words)).as_strided(*place)


def use_cards(monkeypatch):
    """Let torch, which has no CUDA here, use the cards."""
    import torch

    as_tensor = torch.as_tensor

    def on_card(data, **options):
        if not isinstance(data, DeviceArray):
            return as_tensor(data, **options)
        # Torch copies what is on another device.
        assert torch.device(options["device"]) == torch.device("cuda", data.device)
        return CardTensor(data)

    monkeypatch.setattr(torch, "as_tensor", on_card)
    monkeypatch.setattr(torch, "Event", CardEvent)
    monkeypatch.setattr(torch.accelerator, "device_index", current)
    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
