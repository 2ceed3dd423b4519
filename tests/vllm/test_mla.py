"""A model whose cache holds latents, which every worker has whole."""

import connectors
import pytest
from engines import LENGTHS, answer_plainly, make_model, make_prompts

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("deepseek", tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    return answer_plainly(model, tmp_path_factory.mktemp("plain-deepseek"))


@pytest.fixture(scope="module")
def pair(expected, cluster):
    return cluster.prefill(connectors.OURS), cluster.decode(connectors.OURS)


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_continues_from_latents(pair, expected, length):
    prefill, decode = pair
    prompt, tokens = expected[length]
    (other,) = make_prompts([length], 2)
    other[-1] = prompt[-1]
    assert decode.generate(prompt, params=prefill.prefill(prompt)).tokens == tokens
    assert decode.generate(other, params=prefill.prefill(prompt)).tokens == tokens
