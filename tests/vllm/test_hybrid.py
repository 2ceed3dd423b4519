"""A model with two kinds of attention: each kind has a block table of its own."""

import connectors
import pytest
from engines import LENGTHS, answer_plainly, make_model, make_prompts

pytestmark = pytest.mark.timeout(900)

HYBRID = {"disable_hybrid_kv_cache_manager": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("gemma", tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    return answer_plainly(model, tmp_path_factory.mktemp("plain-gemma"), **HYBRID)


@pytest.fixture(scope="module")
def pair(cluster):
    return (
        cluster.prefill(connectors.OURS, **HYBRID),
        cluster.decode(connectors.OURS, **HYBRID),
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_continues_from_both_groups(pair, expected, length):
    prefill, decode = pair
    prompt, tokens = expected[length]
    params = prefill.prefill(prompt)
    assert len(params["remote_block_ids"]) == 2
    (other,) = make_prompts([length], 2)
    other[-1] = prompt[-1]
    assert decode.generate(prompt, params=params).tokens == tokens
    assert decode.generate(other, params=prefill.prefill(prompt)).tokens == tokens
