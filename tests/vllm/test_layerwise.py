"""Prefill pushes each layer of each chunk of a prompt to a decode engine that has asked before."""

import connectors
import pytest
from engines import MAX_TOKENS, PREFILL_PARAMS, make_prompts, wait_for

pytestmark = pytest.mark.timeout(900)

CHUNK = 128
COUNTER = "vllm:pynixlkv_transfers"


@pytest.fixture(scope="module")
def pair(cluster):
    # Ids that a proxy can foresee; and TCP, so that one can see what has come to a frozen process.
    env = {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1", "UCX_TLS": "tcp"}
    connector = connectors.LAYERWISE.with_(env=env)
    return (
        cluster.prefill(connector, max_num_batched_tokens=CHUNK, enable_prefix_caching=False),
        cluster.decode(connector, enable_prefix_caching=False),
    )


def test_layers_are_pushed_while_the_prompt_is_computed(pair, expected):
    prefill, decode = pair
    (other,) = make_prompts([33], 6)
    known = prefill.prefill(other)
    assert decode.generate(other, params=known).finish == "length"
    early = {
        key: known[key]
        for key in (
            *("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port"),
            "transfer_mode",
        )
    }
    early["remote_request_id"] = str(int(known["remote_request_id"]) + 1)
    prompt, tokens = expected[300]
    before = prefill.metrics()[COUNTER]
    prefill.freeze()
    decode.start_generating([prompt], params=early)
    wait_for(lambda: prefill.unread_bytes(decode), "the request for blocks")
    prefill.thaw()
    params = prefill.prefill(prompt)
    assert params["remote_request_id"] == early["remote_request_id"]
    (answer,) = decode.answers()
    assert answer.tokens == tokens
    assert len(answer.tokens) == MAX_TOKENS
    prefill.generate(other, max_tokens=1, params=PREFILL_PARAMS)  # brings its counters
    # In one piece it would be one. As it was pushed: each chunk by layers, of which there are 3.
    assert prefill.metrics()[COUNTER] - before > 2
