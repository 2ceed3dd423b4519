"""A producer and a consumer, and what tests ask of them again and again."""

from __future__ import annotations

import contextlib

from toy_world import World

BEATS_10 = {"lease_duration": 30, "heartbeat_interval": 10}
BEATS_5 = {"lease_duration": 30, "heartbeat_interval": 5}


@contextlib.contextmanager
def pair(mode="pull", *, model=None, producer=None, consumer=None, **config):
    """A world with a producer P and a consumer D."""
    with World(mode, **config) as world:
        prefill = world.engine("P", model, **(producer or {}))
        yield world, prefill, world.engine("D", model, **(consumer or {}))


def connect(world, prefill, decode):
    """Let one short request, d0, connect the engines."""
    start(world, decode, prefill.prefill("p0", 7, 4), request_id="d0", num_tokens=4)
    world.until(received(world, "d0"))


def start(world, decode, params, *, request_id="d1", prompt=7, num_tokens=13, num_computed=0):
    decode.arrive(request_id, prompt, num_tokens, params)
    return decode.schedule(request_id, num_computed)


def received(world, request_id="d1", engine_id="D"):
    return lambda: request_id in world.outcomes[engine_id].received


def arrives(world, decode, request_id="d1"):
    """Wait until a request has been received, and compare its KV."""
    world.until(received(world, request_id))
    assert decode.holds(request_id)


def failed(world, request_id="d1", engine_id="D"):
    return lambda: request_id in world.outcomes[engine_id].failed


def sent(world, request_id="p1", engine_id="P"):
    return lambda: request_id in world.outcomes[engine_id].sent


def errors(world, request_id="d1", engine_id="D"):
    return [end.error for end in world.outcomes[engine_id].failed[request_id]]


def early_params(engine, request_id, **more):
    """What a proxy can tell a consumer while the producer is still at the prompt."""
    host, port = engine.scheduler.address
    return {
        "do_remote_prefill": True,
        "remote_engine_id": engine.id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": engine.parallel.tp,
        "pp_size": engine.parallel.pp,
        "transfer_mode": "push",
        **more,
    }


def start_early(world, prefill, decode, asked="p1", **options):
    """Let a consumer ask for a push of a request that the producer has not begun."""
    start(world, decode, early_params(prefill, asked), **options)
    world.until(lambda: prefill.stats.pushes)
