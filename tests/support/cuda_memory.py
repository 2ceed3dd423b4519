"""Memory of the cards of tests/cuda_stub, and what its driver says."""

import contextlib
import ctypes
from functools import cache

import numpy as np

from pynixlkv.testing.remote import Pool

Address = ctypes.c_ulonglong
_POSIX_FD = 1
_VMM_UNIT = 2 << 20


@cache
def driver():
    """Return the driver, started."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cudaStubView.restype = ctypes.c_void_p
    library.cudaStubView.argtypes = [Address]
    check(library.cuInit(0))
    return library


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


class DeviceArray:
    """An array in memory of a card; `view` is what the processor may look at.

    `shareable` is None for memory of cuMemAlloc; for memory of the VMM functions, whether other
    processes may open it.
    """

    def __init__(self, shape, dtype=np.uint16, device=0, shareable=None):
        self.device = device
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.nbytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self._is_vmm = shareable is not None
        address = Address()
        with current(device):
            if self._is_vmm:
                address = self._reserve(shareable)
            else:
                check(driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(self.nbytes)))
        self.address = address.value
        place = (ctypes.c_uint8 * self.nbytes).from_address(driver().cudaStubView(self.address))
        self.view = np.frombuffer(place, self.dtype).reshape(self.shape)

    def _reserve(self, shareable):
        size = ctypes.c_size_t(-(-self.nbytes // _VMM_UNIT) * _VMM_UNIT)
        address, handle = Address(), Address()
        prop = (ctypes.c_int * 8)(1, _POSIX_FD if shareable else 0, 1, self.device)
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

    def free(self):
        with current(self.device):
            check(driver().cuMemFree_v2(Address(self.address)))


class DevicePool(Pool):
    """A pool in memory of the first card; its array is a view through the stub."""

    device = 0
    shareable = None

    def _allocate(self, shape):
        tensor = DeviceArray(shape, device=self.device, shareable=self.shareable)
        return tensor.view, tensor


class SecondDevicePool(DevicePool):
    device = 1


class VmmPool(DevicePool):
    shareable = True


class PrivateVmmPool(DevicePool):
    shareable = False
