"""Decode comes when prefill has reused the blocks: never with wrong tokens, whatever the policy."""

import time

import connectors
import pytest
from engines import make_prompts

pytestmark = pytest.mark.timeout(900)

LEASE_S = 3.0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_blocks_reused_after_the_lease(cluster, expected, policy):
    connector = connectors.OURS.with_(policy=policy, extra={"kv_lease_duration": LEASE_S})
    # Eight blocks hold one request of the greatest length; another is vLLM's null block.
    prefill = cluster.prefill(connector, num_gpu_blocks_override=9)
    decode = cluster.decode(connector)
    prompt, tokens = expected[300]
    params = prefill.prefill(prompt)
    time.sleep(2 * LEASE_S)
    for filler in make_prompts([300] * 4, 7):
        prefill.generate(filler, max_tokens=1)
    answer = decode.generate(prompt, params=params)
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
