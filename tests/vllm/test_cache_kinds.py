"""Models whose caches are not of plain attention: decode goes on as one engine would.

What vLLM's CPU kernels cannot run, like the scan of Mamba 1, is moved in test_caches.py, at the
level of specs and tensors.
"""

from pathlib import Path

import connectors
import pytest
from engines import MAX_TOKENS, make_model, make_prompts

pytestmark = pytest.mark.timeout(1200)

# A window of 64 tokens, and a chunk of 128, end where a block of 128 does.
LENGTHS = (5, 128, 191, 300)
# The CPU's kernels know no checkpoints of state.
NO_CHECKPOINTS = {"enable_prefix_caching": False}
HYBRID = {"disable_hybrid_kv_cache_manager": False}

IN_BFLOAT16 = {"qwen3-next"}

# A model of `engines.MODELS`, prefill's TP size, and options of both engines.
CASES = {
    "mamba2": ("mamba2", 1, NO_CHECKPOINTS),
    "mamba2-2-to-1": ("mamba2", 2, NO_CHECKPOINTS),
    "gdn": ("qwen3-next", 1, {**NO_CHECKPOINTS, "dtype": "bfloat16"}),
    "gdn-2-to-1": ("qwen3-next", 2, {**NO_CHECKPOINTS, "dtype": "bfloat16"}),
    "window": ("gemma", 1, HYBRID),
    "chunk": ("llama4", 1, HYBRID),
    "own-heads": ("gemma4", 1, HYBRID),
    "own-heads-2-to-1": ("gemma4", 2, HYBRID),
    "fp8": ("llama", 1, {"kv_cache_dtype": "fp8"}),
}


@pytest.fixture(
    scope="module", params=[pytest.param("mamba2", marks=pytest.mark.ci), *list(CASES)[1:]]
)
def case(request):
    if request.param == "fp8" and "avx512f" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("vLLM's fp8 caches need AVX-512 on the CPU, which this one does not have")
    return CASES[request.param]


@pytest.fixture(scope="module")
def model(case, tmp_path_factory):
    return make_model(case[0], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(case, cluster):
    _, tp, options = case
    prefill = cluster.prefill(connectors.OURS, tensor_parallel_size=tp, **options)
    return prefill, cluster.decode(connectors.OURS, **options)


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_continues_from_each_kind_of_cache(case, pair, length):
    prefill, decode = pair
    (prompt,) = make_prompts([length], length)  # no prefix of another
    before = decode.metrics()
    answer = decode.generate(prompt, params=prefill.prefill(prompt))
    after = decode.metrics()
    if case[0] in IN_BFLOAT16:  # the likeliest tokens lie closer than the rounding is fine
        assert len(answer.tokens) == MAX_TOKENS
        assert max(prefill.judge(prompt, answer.tokens)) < 0.25
    else:
        assert answer.tokens == prefill.generate(prompt).tokens
    key = "vllm:prompt_tokens_by_source[{}]"
    fetched, computed = (
        after.get(key.format(source), 0) - before.get(key.format(source), 0)
        for source in ("external_kv_transfer", "local_compute")
    )
    assert fetched >= length - 1
    assert computed <= 1
