"""Decode comes for blocks that prefill has given to others since: never with their tokens."""

import time

import connectors
import pytest
from engines import make_prompts

pytestmark = pytest.mark.timeout(900)

LEASE_S = 6  # vLLM's own connector wants whole seconds


def come_late(cluster, connector, prompt):
    """Decode a prompt whose blocks prefill has used again; returns both engines and the answer."""
    connector = connector.with_(extra={"kv_lease_duration": LEASE_S})
    # Eight blocks hold one request of the greatest length; another is vLLM's null block.
    prefill = cluster.prefill(connector, num_gpu_blocks_override=9)
    decode = cluster.decode(connector)
    params = prefill.prefill(prompt)
    expiry = time.monotonic() + 2 * LEASE_S
    seed = 100
    while time.monotonic() < expiry:  # keeps prefill at work until the lease is surely over
        prefill.start_generating(make_prompts([300] * 4, seed), max_tokens=1)
        prefill.answers()
        seed += 1
    return prefill, decode, decode.generate(prompt, params=params)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_expired_blocks_end_as_the_policy_says(cluster, expected, policy):
    prompt, tokens = expected[300]
    prefill, decode, answer = come_late(cluster, connectors.OURS.with_(policy=policy), prompt)
    if policy == "fail":
        assert answer.finish == "error"
    else:
        assert (answer.finish, answer.tokens) == ("length", tokens)
    assert decode.metrics()["vllm:pynixlkv_requests_expired"] == 1
    assert prefill.metrics()["vllm:pynixlkv_leases_expired"] == 1
    # Both go on.
    assert decode.generate(prompt, params=prefill.prefill(prompt)).tokens == tokens
    prefill.close()
    decode.close()


@pytest.mark.xfail(
    reason="vLLM's NixlConnector reads blocks without asking whether they are still its"
)
def test_expired_blocks_under_vllms_own_connector(cluster, expected):
    """The demonstration of what the lease's word is for; the same on NIXL's own package."""
    prompt, tokens = expected[300]
    _, _, answer = come_late(cluster, connectors.NIXL_API, prompt)
    assert answer.finish == "error" or answer.tokens == tokens
