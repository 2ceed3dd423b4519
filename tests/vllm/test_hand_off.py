"""A prefill and a decode engine: decode continues from the blocks that prefill has made."""

import connectors
import pytest
from engines import LENGTHS, make_prompts

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=["OURS", "PUSH", "STAGED", "UCX", "UCX_PUSH", "NIXL_API"])
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
def test_decode_computes_nothing_of_the_prompt_itself(pair, expected, length):
    """Handed another prompt, it must still continue the one whose blocks it gets."""
    prefill, decode = pair
    prompt, tokens = expected[length]
    (other,) = make_prompts([length], 2)
    other[-1] = prompt[-1]
    answer = decode.generate(other, params=prefill.prefill(prompt))
    assert answer.tokens == tokens


def test_the_engines_run_on_this_package(request, pair):
    on_nixl = "ucx" not in request.node.callspec.id.lower()
    for engine in pair:
        libraries = engine.libraries()
        assert any(name.startswith("_native.") for name in libraries)
        assert ("libnixl_capi.so" in libraries) == on_nixl
        assert not any(name.startswith("_bindings.") for name in libraries)
