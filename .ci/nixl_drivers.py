"""Drivers of `nixl_users.py`: each runs a project's own classes on the `nixl` that it imports.

    python .ci/nixl_drivers.py SIDE DRIVER...

Drivers with two sides are two such processes in one folder, which talk through a socket there. Each
compares every byte that it moved and prints what came back, as a line of JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import itertools
import json
import mmap
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    Results = dict[str, Any]

PAGE = 4096
TIMEOUT_S = 60.0


def data(num_bytes: int, seed: int) -> bytes:
    """Return bytes that no other seed gives."""
    return np.random.default_rng(seed).bytes(num_bytes)


def tensor(contents: bytes, dtype: str = "uint8") -> Any:  # noqa: ANN401
    """Return a tensor of these bytes."""
    import torch

    return torch.frombuffer(bytearray(contents), dtype=getattr(torch, dtype))


def moved(buffer: Any, expected: bytes) -> str:  # noqa: ANN401
    """Compare every byte, and return what the two runs are compared by."""
    found = bytes(memoryview(buffer.numpy() if hasattr(buffer, "numpy") else buffer).cast("B"))
    assert found == expected, f"{len(found)} bytes differ from the {len(expected)} expected"
    return f"{len(found)} bytes, {hashlib.sha256(found).hexdigest()[:16]}"


def error_of(call: Callable[..., object], *args: object) -> str:
    """Return the name of the error that a call raises."""
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__
    return "no error"


def wait(condition: Callable[[], object]) -> Any:  # noqa: ANN401
    """Wait until a condition holds and return its value."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {TIMEOUT_S} s")
        time.sleep(0.001)
    return value


def connect() -> Connection | None:
    """Return a connection to the other side, or None if that does not listen yet."""
    with suppress(FileNotFoundError, ConnectionRefusedError):
        return Client("socket")
    return None


def free_ports(count: int) -> list[int]:
    """Return ports that are free."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def free_port() -> int:
    """Return a port that is free."""
    return free_ports(1)[0]


def lmcache_channel(peer: Connection, side: int) -> Results:
    """LMCache's `NixlChannel` of its P2P and P/D backends: pages read and written."""
    import torch
    from lmcache.v1.memory_allocators import paged_tensor_memory_allocator as allocators
    from lmcache.v1.transfer_channel import CreateTransferChannel

    owned, sent, order = data(16 * PAGE, 1), data(4 * PAGE, 2), [5, 0, 7, 2]
    buffer = tensor(owned if side == 0 else bytes(8 * PAGE) + sent + bytes(4 * PAGE))
    shapes, dtypes = [torch.Size((2, 1, 16, 64))], [torch.bfloat16]
    allocator = allocators.PagedTensorMemoryAllocator(buffer, shapes, dtypes)
    pages: list[Any] = [allocator.allocate(shapes, dtypes) for _ in range(16)]
    url = None if side else f"127.0.0.1:{free_port()}"
    channel = CreateTransferChannel(
        *("nixl", False, "both", allocator.buffer_ptr, allocator.buffer_size, PAGE, 0),
        peer_init_url=url,
        device="cpu",
        backends=["UCX"],
    )
    if side == 0:
        peer.send(url)
        peer.recv()
        return {"written here": moved(buffer[12 * PAGE :], sent)}
    channel.lazy_init_peer_connection("reader", "owner", peer.recv())
    read = {"sender_id": "owner", "remote_indexes": order}
    write = [{"receiver_id": "owner", "remote_indexes": each} for each in ([12, 13], [14, 15])]
    results: Results = {
        "read": channel.batched_read(pages[:4], read),
        "read in a loop": asyncio.run(channel.async_batched_read(pages[4:8], read)),
        "written": channel.batched_write(pages[8:10], write[0]),
        "written in a loop": asyncio.run(channel.async_batched_write(pages[10:12], write[1])),
        "unequal lists": error_of(channel.batched_read, pages[:2], read),
    }
    expected = b"".join(owned[i * PAGE : (i + 1) * PAGE] for i in order)
    results["bytes"] = moved(buffer[: 8 * PAGE], 2 * expected)
    peer.send("done")
    channel.close()
    return results


def lmcache_context(peer: Connection, side: int) -> Results:
    """LMCache's `NixlTransferChannelContext` of its servers: pages read both ways."""
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.distributed.transfer_channel.impl.nixl_impl import NixlTransferChannelContext

    buffer, there = tensor(data(8 * PAGE, side) + bytes(8 * PAGE)), data(8 * PAGE, 1 - side)
    memory, url = L1MemoryDesc(buffer.data_ptr(), buffer.nbytes, PAGE), f"127.0.0.1:{free_port()}"
    context = NixlTransferChannelContext(memory, url, url, ["UCX"])
    peer.send(url)
    other = peer.recv()
    if side == 0:  # The handshake of one side makes the client of the other, too.
        wait(context.get_num_connected_clients)
    client = context.get_transfer_channel_client(other)
    remote = context.get_transfer_channel_address([(5 * PAGE, PAGE), (0, 2 * PAGE + 100)])
    local = context.get_transfer_channel_address([(8 * PAGE, PAGE), (9 * PAGE, 2 * PAGE + 100)])
    task = client.submit_read(local, remote)
    done = wait(lambda: (status := client.query_read_status(task)).finished and status)
    expected = there[5 * PAGE : 6 * PAGE] + there[: 3 * PAGE]
    results = {
        "succeeded": done.succeeded_mask,
        "bytes": moved(buffer[8 * PAGE : 12 * PAGE], expected),
        "unknown task": error_of(client.query_read_status, 99),
        "clients": context.get_num_connected_clients(),
    }
    peer.send("done")
    peer.recv()
    context.close()
    return results


def lmcache_files(*_: object) -> Results:
    """LMCache's L2 adapters: objects stored in files, found, loaded, deleted."""
    import torch
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.distributed.l2_adapters import nixl_store_dynamic_l2_adapter as dynamic
    from lmcache.v1.distributed.l2_adapters import nixl_store_l2_adapter as static
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

    stored, size = data(8 * PAGE, 3), 2 * PAGE
    buffer = torch.frombuffer(mmap.mmap(-1, 16 * PAGE), dtype=torch.uint8)
    memory = L1MemoryDesc(buffer.data_ptr(), buffer.nbytes, PAGE)
    objects = []
    for at in range(0, 8 * size, size):
        metadata = MemoryObjMetadata(torch.Size((size,)), torch.uint8, at, size, 1)
        objects.append(TensorMemoryObj(buffer[at : at + size], metadata, None))
    keys = [ObjectKey(bytes([i] * 32), "model", 0) for i in range(5)]
    options = {"file_path": "objects", "use_direct_io": "false", "max_capacity_gb": "1"}
    make: list[Callable[[], Any]] = [
        lambda: static.NixlStoreL2Adapter(
            static.NixlStoreL2AdapterConfig("POSIX", options, 8), memory
        ),
        lambda: dynamic.DynamicNixlStoreL2Adapter(
            dynamic.DynamicNixlStoreL2AdapterConfig("POSIX", options), memory
        ),
    ]
    results: Results = {}
    for adapter in (each() for each in make):
        name = type(adapter).__name__
        buffer[: 4 * size] = tensor(stored)
        buffer[4 * size :] = 0
        stores = adapter.submit_store_task(keys[:4], objects[:4])
        results[f"{name} stored"] = str(wait(adapter.pop_completed_store_tasks)[stores])
        looks = adapter.submit_lookup_and_lock_task(keys, {})
        found = wait(lambda: adapter.query_lookup_and_lock_result(looks))  # noqa: B023
        loads = adapter.submit_load_task(keys[3::-1], objects[4:])
        loaded = wait(lambda: adapter.query_load_result(loads))  # noqa: B023
        results[f"{name} found"] = [[found.test(i) for i in range(5)], loaded.popcount()]
        expected = b"".join(stored[at : at + size] for at in range(3 * size, -1, -size))
        results[f"{name} bytes"] = moved(buffer[4 * size :], expected)
        adapter.submit_unlock(keys[:4])
        wait(lambda: not adapter.report_status()["pinned_object_count"])  # noqa: B023
        adapter.delete(keys[:2])
        results[f"{name} left"] = adapter.report_status()["stored_object_count"]
        adapter.close()
    return results


def lmcache_storage(*_: object) -> Results:
    """LMCache's `NixlStorageBackend`, static and dynamic: chunks put into files and got."""
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.nixl_storage_backend import NixlStorageBackend

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    shape, results = (2, 2, 16, 4, 8), {}
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=16)
    keys = [CacheEngineKey("model", 1, 0, i, torch.bfloat16) for i in range(5)]
    for pool in (8, 0):
        Path(f"chunks{pool}").mkdir()
        extra = {"enable_nixl_storage": True, "nixl_backend": "POSIX", "nixl_pool_size": pool}
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=16,
            local_cpu=False,
            max_local_cpu_size=0.001,
            nixl_buffer_device="cpu",
            extra_config={**extra, "nixl_path": f"chunks{pool}"},
        )
        host = LocalCPUBackend(config, metadata, "cpu")
        backend = NixlStorageBackend.CreateNixlStorageBackend(config, loop, metadata, host)
        for i, key in enumerate(keys[:4]):
            chunk = backend.allocate(torch.Size(shape), torch.bfloat16)
            memoryview(chunk.byte_array).cast("B")[:] = data(len(chunk.byte_array), i)
            backend.batched_submit_put_task([key], [chunk])
            wait(lambda: not backend.exists_in_put_tasks(key))  # noqa: B023
            chunk.ref_count_down()
        name = type(backend).__name__
        results[f"{name} held"] = [backend.contains(key) for key in keys]
        got = [chunk.byte_array for chunk in backend.batched_get_blocking(keys[:4])]
        results[f"{name} bytes"] = [moved(each, data(len(each), i)) for i, each in enumerate(got)]
        results[f"{name} removed"] = [backend.remove(keys[0]), backend.contains(keys[0])]
        backend.close()
    return results


def dynamo_connect(peer: Connection, side: int) -> Results:
    """Dynamo's `nixl_connect`: tensors and arrays read and written."""
    from dynamo import nixl_connect

    connector, sizes = nixl_connect.Connector(f"worker{side}"), (3 * PAGE, 5000, 13200)

    def describe(*contents: bytes) -> tuple[list[Any], list[Any]]:
        buffers = [tensor(contents[0], "int16"), np.frombuffer(bytearray(contents[1]), np.uint8)]
        return buffers, [
            nixl_connect.Descriptor(each) for each in (buffers[0], (buffers[1], "cpu"))
        ]

    async def owner() -> Results:
        _, several = describe(*(data(size, 1) for size in sizes[:2]))
        target = tensor(bytes(sizes[2]), "float32")
        results: Results = {}
        for operation in (
            await connector.create_readable(several),
            await connector.create_writable(nixl_connect.Descriptor(target)),
            await connector.create_readable(several),
        ):
            peer.send(operation.metadata().model_dump())
            await operation.wait_for_completion()
            results[f"end {len(results)}"] = str(operation.status)
        return {**results, "written here": moved(target, data(sizes[2], 2))}

    async def user() -> Results:
        results: Results = {}
        for step in ("read", "write", "read again"):
            metadata = nixl_connect.RdmaMetadata.model_validate(peer.recv())
            buffers, several = describe(*(bytes(size) for size in sizes[:2]))
            if step == "write":
                source = nixl_connect.Descriptor(tensor(data(sizes[2], 2), "float32"))
                operation = await connector.begin_write(source, metadata)
            else:
                operation = await connector.begin_read(metadata, several)
            await operation.wait_for_completion()
            results[step] = str(operation.status)
            if step != "write":
                results[f"{step} bytes"] = [moved(each, data(each.nbytes, 1)) for each in buffers]
            del operation
        return results

    return asyncio.run(user() if side else owner())


def dynamo_embeddings(peer: Connection, side: int) -> Results:
    """Dynamo's embedding senders and receivers: by NIXL's write, and by its read."""
    import torch
    from dynamo.common.multimodal import embedding_transfer as transfer

    cases = (((7, 64), "bfloat16"), ((1, 8), "float32"), ((130, 96), "float16"))
    sources = [
        tensor(data(PAGE * 8, i), dtype)[: shape[0] * shape[1]].reshape(shape)
        for i, (shape, dtype) in enumerate(cases)
    ]
    kinds = ("NixlWriteEmbedding", "NixlReadEmbedding")

    async def send(sender: Any, staged: bool) -> list[object]:  # noqa: ANN401
        sent = [await sender.send_embeddings(each, staged) for each in sources]
        peer.send([request.model_dump() for request, _ in sent])
        ends = [await asyncio.wait_for(end, TIMEOUT_S) for _, end in sent]
        await asyncio.to_thread(peer.recv)
        return ends

    async def receive(receiver: Any, _: bool) -> list[object]:  # noqa: ANN401
        results: list[object] = []
        for given, source in zip(peer.recv(), sources, strict=True):
            number, got = await receiver.receive_embeddings(transfer.TransferRequest(**given))
            expected = source.view(torch.uint8).numpy().tobytes()
            results.append(moved(got.view(torch.uint8), expected))
            receiver.release_tensor(number)
        peer.send("received")
        return results

    async def run() -> Results:
        results: Results = {}
        for kind, options in zip(kinds, ((PAGE * 32,), (PAGE, 32, 2)), strict=True):
            cls = getattr(transfer, kind + ("Receiver" if side else "Sender"))
            end = cls(*options) if side else cls()
            for staged in (False, True):
                results[f"{kind} {staged}"] = await (receive if side else send)(end, staged)
        return results

    return asyncio.run(run())


def modelexpress(peer: Connection, side: int) -> Results:
    """ModelExpress's `NixlTransferManager` and reshard transport: weights, ranges, a lost peer."""
    from modelexpress.accelerators import CudaAcceleratorBackend
    from modelexpress.nixl_transfer import NixlTransferManager
    from modelexpress.refit.reshard.transport.base import ReadDescriptor
    from modelexpress.refit.reshard.transport.nixl import NixlReshardTransport

    class Host(CudaAcceleratorBackend):  # type: ignore[misc]  # host memory behind its interface
        nixl_mem_type = "DRAM"
        set_device = synchronize = lambda *_: None

    sizes = {"embed": 3 * PAGE, "layers.0": 70_000, "norm": 96}
    contents = {name: data(size, size) for name, size in sizes.items()}
    tensors = {name: tensor(bytes(len(each)) if side else each) for name, each in contents.items()}
    port = 0 if side else free_port()
    manager = NixlTransferManager(f"side{side}", 0, port, Host())
    manager.initialize()
    manager.register_tensors(tensors)
    staged = data(2 * PAGE, 9)
    buffer = tensor(bytes(2 * PAGE) if side else staged)
    registered = manager.register_dram_buffer(buffer)
    if side == 0:
        described = manager.nixl_metadata, manager.tensor_descriptors
        peer.send((*described, buffer.data_ptr(), port, os.getpid()))
        peer.recv()
        return {"healthy": manager.is_healthy()}
    metadata, described, address, port, pid = peer.recv()
    results: Results = {
        "received": manager.receive_from_source(metadata, described, TIMEOUT_S)[:2],
        "bytes": [moved(tensors[name], each) for name, each in contents.items()],
    }
    manager.receive_dram_into_buffer("side0", address, buffer, 2 * PAGE, 0, "DRAM", TIMEOUT_S)
    results["buffer"] = moved(buffer, staged)
    transport = NixlReshardTransport(manager, {"s": "side0"}, {"s": 0}, None, TIMEOUT_S)
    source, weights = described[1].addr, tensors["layers.0"].zero_()
    target, expected = weights.data_ptr(), bytearray(weights.nbytes)
    runs = range(0, 50_000, 100)
    transport.read([ReadDescriptor("s", source + at, target + at, 64) for at in runs])
    for at in runs:
        expected[at : at + 64] = contents["layers.0"][at : at + 64]
    results["ranges"] = [transport.reads_issued, moved(weights, bytes(expected))]
    for name, agent, row in (
        ("not registered there", "side0", (1 << 40, target, 64, 0)),
        ("not registered here", "side0", (source, 1 << 40, 64, 0)),
        ("unknown agent", "nobody", (source, target, 64, 0)),
    ):
        results[name] = error_of(manager.execute_read_batch, agent, [row])
    results["disconnected"] = manager.disconnect_remote_agents()
    results["and then"] = error_of(manager.execute_read_batch, "side0", [(source, target, 64, 0)])
    manager.fetch_remote_and_wait("side0", "127.0.0.1", port, TIMEOUT_S)
    again = manager.receive_from_source(b"", described, TIMEOUT_S, "side0")[:2]
    results["fetched"] = [again, moved(weights, contents["layers.0"])]
    manager.deregister_memory(registered)
    peer.send("done")
    wait(lambda: not Path(f"/proc/{pid}").exists())
    results["lost"] = error_of(manager.execute_read_batch, "side0", [(source, target, 64, 0)])
    results["removed"] = [manager.remove_remote_agent(name) for name in ("side0", "side0")]
    manager.shutdown()
    return results


def sglang_hicache(*_: object) -> Results:
    """SGLang's `HiCacheNixl` and `NixlRegistry`: pages set in files, found, got, by 8 threads."""
    import torch

    # Pools of memory, which only annotations name, and which cannot be imported without CUDA.
    sys.modules["sglang.srt.mem_cache.pool_host"] = SimpleNamespace(HostKVCache=object)  # type: ignore[assignment]
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    class Pool:  # pages of one token, keys and values apart
        layout, page_size, kv_buffer = "page_first", 1, torch.zeros(2, 8, PAGE, dtype=torch.uint8)

        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:  # noqa: ANN401
            places = [self.kv_buffer[half, page] for page in indices for half in (0, 1)]
            return [place.data_ptr() for place in places], [PAGE] * len(places)

    pool, stored, indices = Pool(), data(16 * PAGE, 4), torch.arange(8)
    # Its cleaner removes pages where the disk is four fifths full.
    extra = {
        "plugin": {"posix": {"active": True}},
        "use_direct_io": False,
        "l3_cleaner_enabled": False,
    }
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "m", extra_config=extra)
    storage = HiCacheNixl(config, "pages")
    storage.register_mem_pool_host(pool)
    pool.kv_buffer.view(-1)[:] = tensor(stored)
    keys = [f"{i:064x}" for i in range(16)]
    results: Results = {
        "modes": [storage.registry.path_mode, storage.is_zero_copy],
        "before": storage.batch_exists(keys),
        "set": storage.batch_set_v1(keys[:6], indices[:6]),
        "after": [storage.batch_exists(keys), storage.exists(keys[7])],
    }
    pool.kv_buffer[:, :6] = 0
    results["got"] = storage.batch_get_v1(keys[5::-1], indices[:6])
    pool.kv_buffer[:, :6] = pool.kv_buffer[:, :6].flip(1)
    results["bytes"] = moved(pool.kv_buffer, stored)
    results["missing"] = storage.batch_get_v1(keys[6:7], indices[:1])
    each = [[key] for key in keys[8:]], list(indices[:, None])
    with ThreadPoolExecutor(8) as threads:
        results["set by threads"] = [*threads.map(storage.batch_set_v1, *each)]
        pool.kv_buffer.zero_()
        results["got by threads"] = [*threads.map(storage.batch_get_v1, *each)]
    results["bytes by threads"] = moved(pool.kv_buffer, stored)
    storage.close()
    return results


def kvcr(peer: Connection, side: int) -> Results:
    """KVCR: blocks delivered and fetched from another process, deposited, moved to a file."""
    import ctypes

    from kvcr import KVCR, KVCRBindings, config
    from kvcr.types import MemoryRef, RegionDescriptor

    name, keys = f"runner{side}", [i.to_bytes(8, "big") for i in range(8)]
    frame, own = mmap.mmap(-1, 8 * PAGE), mmap.mmap(-1, 4 * PAGE)
    start, own_start = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (frame, own))

    def places(*numbers: int) -> dict[bytes, Any]:
        return {keys[i]: [MemoryRef(end_point_name=name, element_index=i)] for i in numbers}

    answers: list[tuple[int, Any]] = []
    pins = itertools.count()

    def pin(wanted: Any) -> int:  # noqa: ANN401
        number = next(pins)
        answers.append((number, (f"pin{number}", places(*map(keys.index, wanted)))))
        return number

    def poll() -> list[tuple[int, Any]]:
        return [answers.pop(0) for _ in answers[:]]

    def send(_: str, message: bytes) -> bool:
        peer.send_bytes(message)
        return True

    control = SimpleNamespace(
        endpoint=name, send=send, recv=lambda: [peer.recv_bytes() for _ in iter(peer.poll, False)]
    )
    adapter = SimpleNamespace(decode=lambda key: int.from_bytes(key, "big"))
    runner = KVCR(
        config.KVCRConfig(name, [("", PAGE)], False, 20_000, 40_000, nixl_listen_port=0),
        KVCRBindings(pin, poll, lambda _: True, None, control, adapter),
        config.KVCRBackendConfigs(
            [RegionDescriptor(addr=start, count=8, size=PAGE)],
            config.LocalDramOptions([("", own_start, 4 * PAGE)]),
            config.G3Options(
                paths=(Path(f"blocks{side}"),), capacity_bytes_per_file=8 * PAGE, backend="POSIX"
            ),
        ),
    )

    def finish(operation: int) -> list[str]:
        (done,) = wait(lambda: [r for handle, r in runner.poll_completed() if handle == operation])
        runner.release([entry.release_handle for entry in done.values() if entry.release_handle])
        return [done[key].status.name for key in keys if key in done]

    def tiers(request: str | None = None) -> list[str]:
        return [f"{status.name} {tier}" for status, tier in runner.query(keys, request)]

    blocks, over = data(8 * PAGE, 5), Path("over")
    if side == 0:
        frame[:] = blocks
        wait(lambda: [*runner.poll_completed()] or over.exists())
        runner.close()
        return {"pinned": next(pins)}
    hint = {"source_control_endpoint": "runner0", "block_hashes": list(range(6))}
    action = {"action_type": "kv.fetch", "action_version": "1.0", "payload": hint}
    runner.submit_hint({"protocol_version": "0.1", "actions": [action]}, "request")
    results: Results = {
        "hinted": tiers("request"),
        "delivered": finish(runner.deliver(places(0, 1, 2), "request")),
        "bytes": moved(frame[: 3 * PAGE], blocks[: 3 * PAGE]),
        "fetched": finish(runner.fetch(keys[3:6], "request")),
        # More than fit into memory: the oldest move into the file.
        "deposited": finish(runner.deposit(places(0, 1, 2))),
        "tiers": sorted(tiers()),
    }
    frame[:] = bytes(8 * PAGE)
    results["from memory and the file"] = finish(runner.deliver(places(*range(6))))
    results["all bytes"] = moved(frame[: 6 * PAGE], blocks[: 6 * PAGE])
    results["unknown"] = finish(runner.deliver(places(7)))
    over.touch()
    runner.close()
    return results


DRIVERS: dict[str, Callable[[Any, int], Results]] = {
    driver.__name__: driver
    for driver in (
        *(lmcache_files, lmcache_storage, lmcache_channel, lmcache_context),
        *(dynamo_connect, dynamo_embeddings, modelexpress, sglang_hicache, kvcr),
    )
}
ALONE = {"lmcache_files", "lmcache_storage", "sglang_hicache"}
"""Drivers with one side."""


def main(side: str, *names: str) -> None:
    """Run one side of drivers and print their results."""
    peer: Any = None
    if not ALONE.issuperset(names):
        if side == "0":
            with Listener("socket") as listener:
                peer = listener.accept()
        else:
            peer = wait(connect)
    for name in names if side == "0" else (name for name in names if name not in ALONE):
        results = DRIVERS[name](peer, int(side))
        used = importlib.import_module("nixl._api").nixl_agent.__module__
        print("\n" + json.dumps({"driver": name, "nixl": used, "results": results}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
