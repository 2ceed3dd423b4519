"""Engines that split the model's heads among unlike numbers of workers."""

import connectors
import pytest

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["2-to-1", "1-to-2"])
def pair(request, cluster):
    """A prefill and a decode engine of these numbers of workers."""
    many, few = request.param
    engines = (
        cluster.prefill(connectors.OURS, tensor_parallel_size=many),
        cluster.decode(connectors.OURS, tensor_parallel_size=few),
    )
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("length", [40, 300])
def test_decode_continues_from_all_heads(pair, expected, length):
    prefill, decode = pair
    prompt, tokens = expected[length]
    before = decode.metrics()["vllm:prompt_tokens_by_source[external_kv_transfer]"]
    assert decode.generate(prompt, params=prefill.prefill(prompt)).tokens == tokens
    after = decode.metrics()["vllm:prompt_tokens_by_source[external_kv_transfer]"]
    assert after - before == length
