"""Models whose caches are not of plain attention: decode goes on as one engine would.

What the CPU cannot run is moved in test_caches.py, at the level of vLLM's specs and tensors.
"""

import connectors
import pytest
from engines import answer_plainly, make_model

pytestmark = pytest.mark.timeout(1200)

# A window of 64 tokens, and a chunk of 128, end where a block of 128 does.
LENGTHS = (5, 128, 191, 300)

# The engine's options; by model of `engines.MODELS`, and what else makes the case.
CASES = {
    # The CPU's kernels of Mamba 2 know no checkpoints of state.
    "mamba2": {"enable_prefix_caching": False},
    "mamba1": {},
    "gdn": {},
    "gemma": {"disable_hybrid_kv_cache_manager": False},
    "llama4": {"disable_hybrid_kv_cache_manager": False},
    "gemma4": {"disable_hybrid_kv_cache_manager": False},
    "llama fp8": {"kv_cache_dtype": "fp8"},
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def model(case, tmp_path_factory):
    return make_model(case.partition(" ")[0], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(case, model, tmp_path_factory):
    return answer_plainly(model, tmp_path_factory.mktemp("plain"), LENGTHS, **CASES[case])


@pytest.fixture(scope="module")
def pair(case, cluster):
    options = CASES[case]
    return cluster.prefill(connectors.OURS, **options), cluster.decode(connectors.OURS, **options)


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_continues_from_each_kind_of_cache(pair, expected, length):
    prefill, decode = pair
    prompt, tokens = expected[length]
    before = decode.metrics()
    assert decode.generate(prompt, params=prefill.prefill(prompt)).tokens == tokens
    after = decode.metrics()
    key = "vllm:prompt_tokens_by_source[{}]"
    fetched, computed = (
        after.get(key.format(source), 0) - before.get(key.format(source), 0)
        for source in ("external_kv_transfer", "local_compute")
    )
    assert fetched >= length - 1
    assert computed <= 1
