"""A prefill and a decode engine: decode continues from the blocks that prefill has made."""

import connectors
import pytest
from engines import LENGTHS, make_prompts

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("OURS", marks=pytest.mark.ci),
        "PUSH",
        "STAGED",
        "UCX",
        "UCX_PUSH",
        "NIXL_API",
    ],
)
def pair(request, cluster):
    """A prefill and a decode engine."""
    connector = getattr(connectors, request.param)
    engines = cluster.prefill(connector), cluster.decode(connector)
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_continues_as_a_plain_engine_would(pair, expected, length):
    prefill, decode = pair
    prompt, tokens = expected[length]
    before = decode.metrics()
    answer = decode.generate(prompt, params=prefill.prefill(prompt))
    after = decode.metrics()
    assert answer.tokens == tokens

    def counted(source):
        key = f"vllm:prompt_tokens_by_source[{source}]"
        return after.get(key, 0) - before.get(key, 0)

    assert counted("external_kv_transfer") == length
    assert counted("local_compute") == counted("local_cache_hit") == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_the_blocks_of_another_prompt_are_refused(request, pair, expected, length):
    prefill, decode = pair
    prompt, tokens = expected[length]
    (other,) = make_prompts([length], 2)
    other[-1] = prompt[-1]
    params = prefill.prefill(prompt)
    answer = decode.generate(other, params=params)
    if "NIXL_API" in request.node.callspec.id:
        # vLLM's own connector does not notice; decode computes nothing of the prompt itself.
        assert answer.tokens == tokens
        return
    assert answer.finish == "error"
    assert params["content"] in decode.log.read_text()
    assert decode.generate(other).tokens == prefill.generate(other).tokens
    # They stay held for their own request.
    assert decode.generate(prompt, params=params).tokens == tokens


def test_the_engines_run_on_this_package(request, pair):
    on_nixl = "ucx" not in request.node.callspec.id.lower()
    for engine in pair:
        libraries = engine.libraries()
        assert any(name.startswith("_native.") for name in libraries)
        assert ("libnixl_capi.so" in libraries) == on_nixl
        assert not any(name.startswith("_bindings.") for name in libraries)
