"""Two vLLM engines on one card: the decode engine continues what the prefill engine computed."""

import importlib.util

import pytest
from connectors import OURS, UCX
from engines import LENGTHS, Cluster, answer_plainly, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
SHARE = {"gpu_memory_utilization": 0.25}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if not pytest.importorskip("torch", reason="torch is not installed").cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return make_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    return answer_plainly(model, tmp_path_factory.mktemp("plain"), **SHARE)


@pytest.mark.parametrize("connector", [OURS, UCX], ids=["nixl", "ucx"])
def test_tokens_of_two_engines_on_one_card_are_those_of_one(connector, model, expected, tmp_path):
    cluster = Cluster(model, tmp_path)
    try:
        prefill, decode = cluster.prefill(connector, **SHARE), cluster.decode(connector, **SHARE)
        for length in LENGTHS:
            prompt, tokens = expected[length]
            answer = decode.generate(prompt, params=prefill.prefill(prompt))
            assert answer.tokens == tokens
        assert decode.metrics()["vllm:pynixlkv_transfers"] > 0
    finally:
        cluster.close()
