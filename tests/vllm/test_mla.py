"""A model whose cache holds latents, which every worker has whole.

On the CPU vLLM computes with latents in two ways that do not agree: from a prompt and the tokens
that it has made of it, a plain engine goes on in another way. So what decode makes of a hand-off
cannot be compared with a plain engine; it is compared with what it makes under vLLM's own
connector.
"""

import connectors
import pytest
from engines import LENGTHS, make_model, make_prompts

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("deepseek", tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def answers(cluster):
    """Tokens by connector and length of a prompt."""
    found = {}
    for name in ("OURS", "NIXL_API"):
        connector = getattr(connectors, name)
        prefill, decode = cluster.prefill(connector), cluster.decode(connector)
        for prompt in make_prompts(LENGTHS, 1):
            params = prefill.prefill(prompt)
            found[name, len(prompt)] = decode.generate(prompt, params=params).tokens
        prefill.close()
        decode.close()
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_continues_from_latents(answers, length):
    assert answers["OURS", length]
    assert answers["OURS", length] == answers["NIXL_API", length]
