"""What two engines must agree on, from vLLM's own configurations. No engine is started."""

import shutil
import types

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from pynixlkv.errors import CompatMismatch
from pynixlkv.handshake import message
from pynixlkv.vllm.facts import compatibility, fp8_format

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def engine(model):
    """Return the configuration of an engine of the small model, with other arguments."""

    def make(**changes):
        transfer = KVTransferConfig(kv_connector="PyNixlKVConnector", kv_role="kv_both")
        arguments = {"max_model_len": 512, "skip_tokenizer_init": True, "model": str(model)}
        return EngineArgs(
            kv_transfer_config=transfer, **{**arguments, **changes}
        ).create_engine_config()

    return make


@pytest.fixture(scope="module")
def plain(engine):
    return compatibility(engine(dtype="float32"))


def differing(mine, theirs):
    """Return the fields that the handshake names when it refuses."""
    here, there = (message.check_identity("e", facts) for facts in (mine, theirs))
    with pytest.raises(CompatMismatch) as caught:
        message.compare(here, there, "peer")
    for field in caught.value.fields:
        assert f"{field} is " in str(caught.value)
    return caught.value.fields


ROPE = {"rope_type": "default", "rope_theta": 5e5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
FP8 = ["cache_dtype", "fp8_format", "quantization_mode", "scales"]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"dtype": "bfloat16"}, ["cache_dtype", "dtype"]),
        ({"kv_cache_dtype": "bfloat16"}, ["cache_dtype"]),
        ({"kv_cache_dtype": "fp8"}, FP8),
        ({"kv_cache_dtype": "nvfp4"}, FP8),
        (
            {"hf_overrides": {"rope_parameters": ROPE}},
            ["config.rope_parameters.rope_theta"],
        ),
        (
            {"hf_overrides": {"rope_parameters": YARN}},
            ["config.rope_parameters.factor", "config.rope_parameters.rope_type"],
        ),
        ({"hf_overrides": {"sliding_window": 64}}, ["config.sliding_window"]),
        ({"hf_overrides": {"rms_norm_eps": 1e-3}}, ["config.rms_norm_eps"]),
        ({"code_revision": "abc"}, ["code_revision"]),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_engines_that_differ_are_refused_with_the_names_of_the_facts(
    engine, plain, changes, fields
):
    found = differing(plain, compatibility(engine(**{"dtype": "float32", **changes})))
    assert set(fields) <= set(found)
    assert len(found) == len(fields) or "hf_overrides" in changes


def test_what_need_not_agree_is_not_compared(engine, plain):
    changed = engine(
        dtype="float32",
        max_model_len=256,
        block_size=32,
        max_num_seqs=3,
        tensor_parallel_size=2,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 3,
        },
        hf_overrides={"eos_token_id": 7, "initializer_range": 0.5},
    )
    assert compatibility(changed) == plain


def test_fn_and_fnuz_platforms_differ_and_names_of_one_format_do_not(engine, monkeypatch):
    fn, also_fn, e5m2 = (
        compatibility(engine(kv_cache_dtype=name)) for name in ("fp8", "fp8_e4m3", "fp8_e5m2")
    )
    assert fn == also_fn
    assert fn["cache_dtype"] == "float8_e4m3fn"
    assert differing(fn, e5m2) == ["cache_dtype", "fp8_format"]
    per_token = engine(kv_cache_dtype="fp8_per_token_head")
    packed = compatibility(per_token)
    assert packed["scales"] == "in the pages"
    monkeypatch.setattr(current_platform, "fp8_dtype", lambda: torch.float8_e4m3fnuz)
    assert fp8_format("fp8") == "float8_e4m3fnuz"
    fnuz = compatibility(engine(kv_cache_dtype="fp8"))
    assert differing(fn, fnuz) == ["cache_dtype", "fp8_format"]
    assert differing(packed, compatibility(per_token)) == ["fp8_format"]


def test_the_draft_model_is_compared_where_it_has_a_cache(engine, plain):
    def with_draft(**changes):
        config = engine(dtype="float32")
        draft = config.model_config
        fields = {"method": "eagle3", "draft_model_config": draft, "kv_cache_dtype": None}
        config.speculative_config = types.SimpleNamespace(
            **{**fields, **changes}, uses_draft_kv_cache=lambda: True
        )
        return compatibility(config)

    drafted = with_draft()
    assert {"speculative_method", "draft_weights"} <= {*differing(plain, drafted)}
    assert with_draft(kv_cache_dtype="float32") == drafted
    assert differing(drafted, with_draft(method="mtp")) == ["speculative_method"]
    other = engine(dtype="float32", hf_overrides={"hidden_act": "gelu"}).model_config
    other.model, other.revision = "another", "r2"
    assert differing(drafted, with_draft(draft_model_config=other)) == [
        "draft_config.hidden_act",
        "draft_weights",
    ]


def test_weights_are_known_by_their_bytes_and_not_by_their_folder(engine, plain, model, tmp_path):
    def facts_of(folder):
        return compatibility(engine(model=str(folder), dtype="float32"))

    moved, tuned = tmp_path / "moved", tmp_path / "tuned"
    for copy in (moved, tuned):
        shutil.copytree(model, copy)
    assert facts_of(moved) == plain
    (weights,) = tuned.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-4096:] = bytes(4096)
    weights.write_bytes(data)
    assert differing(plain, facts_of(tuned)) == ["weights"]
    dummy = compatibility(engine(dtype="float32", load_format="dummy"))
    assert differing(plain, dummy) == ["weights"]
    assert str(model) in dummy["weights"]


def test_of_neighbouring_releases_only_the_pages_of_the_cpu_differ(engine, plain, monkeypatch):
    config = engine(dtype="float32")
    monkeypatch.setattr("vllm.__version__", "0.99.1")
    assert differing(plain, compatibility(config)) == ["cpu_pages"]
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    newer = compatibility(config)
    monkeypatch.undo()
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert compatibility(config) == newer
