"""A router gives requests each other's hand-offs: never with each other's tokens."""

import connectors
import pytest
from engines import make_prompts

pytestmark = pytest.mark.timeout(900)


def test_mixed_up_prompts_are_computed_where_the_policy_says_so(cluster):
    prefill = cluster.prefill(connectors.OURS)
    decode = cluster.decode(connectors.OURS.with_(policy="recompute"))
    prompts = make_prompts([300, 300], 20)
    right = [prefill.generate(prompt).tokens for prompt in prompts]
    params = [prefill.prefill(prompt) for prompt in prompts]
    decode.start_generating(prompts, params=params[::-1])
    assert [answer.tokens for answer in decode.answers()] == right
    log = decode.log.read_text()
    assert all(f"is {each['content']}; expected" in log for each in params)
    assert all(f"; expected {each['content']}" in log for each in params)
    before = decode.metrics()
    assert not before.get("vllm:pynixlkv_requests_received")
    assert [decode.generate(prompt).tokens for prompt in prompts] == right
