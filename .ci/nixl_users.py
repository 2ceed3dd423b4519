"""Run other projects' own code on NIXL's Python API, then on `pynixlkv.nixl_api`, and compare.

    python .ci/nixl_users.py                          releases of projects that use NIXL
    python .ci/nixl_users.py --nixl-checkout FOLDER   NIXL's own tests and programs, of its checkout

The first unpacks the Python of releases over the environment `.venv-vllm`, and runs the drivers of
`nixl_drivers.py` on it: states, bytes, counts and names of errors must be the same on both. It
writes a table into docs/nixl_api.md. The second takes the files from the tag of the installed
version, or from HEAD if there is none: what passes on NIXL must pass on `nixl_api`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from matrix import ROOT, fill, read_report, run, unpack
from nixl_drivers import ALONE, DRIVERS, free_ports

WORK = ROOT / "build" / "nixl-users"
SITE = WORK / "site"
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SWITCH = {"NIXL": (), "nixl_api": ("-m", "pynixlkv.nixl_api")}
"""What stands between Python and a program."""
LMCACHE = ("lmcache_files", "lmcache_storage", "lmcache_channel", "lmcache_context")
USERS = (
    (("lmcache==0.5.6",), LMCACHE),
    (("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"), ("dynamo_connect", "dynamo_embeddings")),
    (("modelexpress==0.7.0",), ("modelexpress",)),
    (("sglang==0.5.23",), ("sglang_hicache",)),
    (("kvcr==0.1.1",), ("kvcr",)),
)
"""Releases and their drivers, which share processes: importing takes longer than moving bytes."""
IMPORTED = ("aiofile==3.12.3", "caio==0.12.10", "redis==8.1.0")
"""Imported by the packages of LMCache and Dynamo, in modules that the drivers do not use."""
LEFT_OUT = (
    "LMCache's `cuda_ops`: needs CUDA's libraries, and LMCache goes without.",
    "`sglang/__init__.py`, SGLang's front end: needs IPython.",
    "SGLang's pools of host memory: import torchvision, whose wheels bring CUDA libraries, and the "
    "sources of CUDA kernels; a pool of the driver's stands in.",
    "SGLang's `disaggregation.nixl`: imports torchvision.",
)
PEERS = tuple(f"--mode {mode} --ip 127.0.0.1 --port {{}}" for mode in ("target", "initiator"))
PROGRAMS = (
    ("examples/python/basic_two_peers.py", *PEERS),
    ("examples/python/expanded_two_peers.py", *PEERS),
    ("examples/python/partial_md_example.py", "--init-port {} --target-port {}"),
    ("examples/python/query_mem_example.py", ""),
    ("test/python/desc_perf.py", ""),
    ("test/python/prep_xfer_perf.py", "list"),
    ("test/python/prep_xfer_perf.py", "array"),
)
"""NIXL's programs, with the arguments of each process; {} is a free port."""
PROGRAMS_LEFT_OUT = (
    "`nixl_gds_example.py`, `nixl_p2p_storage_example.py`: need GPU memory or the plugin GDS.",
    "`telemetry_reader.py`: does not use NIXL's API.",
)
DEADLINE_S = 180.0


def fetch() -> None:
    """Unpack what the drivers import, unless these versions are there."""
    pinned = [*(pin for pins, _ in USERS for pin in pins), *IMPORTED]
    stamp = WORK / "pinned.txt"
    if stamp.is_file() and stamp.read_text(encoding="utf-8").split() == pinned:
        return
    shutil.rmtree(WORK, ignore_errors=True)
    for requirement in pinned:
        unpack(requirement, SITE, "lmcache/lmcache_native.*", "dynamo/_core.*")
    (SITE / "sglang" / "__init__.py").unlink()
    stamp.write_text("\n".join(pinned), encoding="utf-8")


def run_on(
    api: str, folder: Path, *programs: tuple[str | Path, ...], ready: str = "", **variables: str
) -> list[tuple[str, str]]:
    """Run programs side by side until a deadline; return how each ended, and what it printed.

    Each starts when the one before has printed `ready`.
    """
    env = {key: value for key, value in os.environ.items() if key != "PYNIXLKV_NIXL_API"}
    env |= {"PYTHONPATH": str(SITE), "PYTHONSAFEPATH": "1", **variables}
    deadline, started, ends = time.monotonic() + DEADLINE_S, [], []
    for number, program in enumerate(programs):
        log = folder / f"{number}.log"
        with log.open("w") as output:
            command = (PYTHON, *SWITCH[api], *program)
            process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
        started.append((process, log))
        while ready not in log.read_text(errors="replace") and process.poll() is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    for process, log in started:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        status = process.poll()
        end = "passed" if status == 0 else f"status {status}"
        if status is None:
            process.kill()
            process.wait()
            end = f"ended after {DEADLINE_S:g} s"
        ends.append((end, log.read_text(errors="replace")))
    return ends


def make_folder(*parts: str) -> Path:
    """Make an empty folder."""
    folder = WORK.joinpath("runs", *parts)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def drive(api: str, drivers: tuple[str, ...], tries: int = 3) -> dict[str, Any]:
    """Run drivers on an API; return their results by driver, side and name.

    Those that fail are run again: on a busy machine a program may miss a deadline of its own.
    """
    sides = 1 if set(drivers) <= set(ALONE) else 2
    folder = make_folder(api, drivers[0])
    program: tuple[str | Path, ...] = (Path(__file__).with_name("nixl_drivers.py"),)
    ends = run_on(api, folder, *((*program, str(side), *drivers) for side in range(sides)))
    results: dict[str, Any] = {}
    for side, (end, output) in enumerate(ends):
        for line in output.splitlines():
            if line.startswith('{"driver"'):
                said = json.loads(line)
                assert said["nixl"].startswith("pynixlkv.") == (api == "nixl_api"), said["nixl"]
                for name, value in said["results"].items():
                    results[f"{said['driver']}: {name} ({side})"] = value
        if end != "passed":
            print(output, file=sys.stderr)
            results["end"] = end
    if "end" in results and tries > 1:
        print(f"{', '.join(drivers)} failed on {api} and are run again", flush=True)
        return drive(api, drivers, tries - 1)
    return results


def compare_users() -> tuple[list[str], bool]:
    """Run all drivers on both; return the table and whether all is the same."""
    fetch()
    lines = ["| package | what ran | on NIXL | on `nixl_api` |", "| --- | --- | --- | --- |"]
    is_good = True
    for pins, drivers in USERS:
        theirs, ours = (drive(api, drivers) for api in SWITCH)
        for driver in drivers:
            seen = [
                {name: value for name, value in each.items() if name.startswith((driver, "end"))}
                for each in (theirs, ours)
            ]
            names = sorted({*seen[0], *seen[1]})
            unlike = [name for name in names if seen[0].get(name) != seen[1].get(name)]
            for name in unlike:
                print(f"{name}: {seen[0].get(name)} on NIXL, {seen[1].get(name)} on nixl_api")
            failed = [f"failed: {each['end']}" if "end" in each else "" for each in seen]
            cells = [
                " ".join(pin.replace("==", " ") for pin in pins),
                (DRIVERS[driver].__doc__ or "").rstrip("."),
                failed[0] or f"{len(seen[0])} results",
                failed[1] or (f"{len(unlike)} unlike" if unlike else "the same"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
            is_good &= bool(seen[0]) and not unlike and not any(failed)
    return [*lines, "", "Not run:", "", *(f"* {line}" for line in LEFT_OUT)], is_good


def compare_checkout(checkout: Path, version: str) -> tuple[list[str], bool]:
    """Run NIXL's own files on both; return the table and whether what passes there passes here."""
    git = ("git", "-C", checkout)
    has_tag = run(*git, "tag", "--list", f"v{version}").strip()
    ref, archive = f"v{version}" if has_tag else "HEAD", WORK / "nixl.tar"
    WORK.mkdir(parents=True, exist_ok=True)
    run(*git, "archive", "-o", archive, ref, "test/python", "examples/python")
    ends: dict[str, dict[str, str]] = {}
    for api in SWITCH:
        folder = make_folder(api, "checkout")
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
        pytest = ("-m", "pytest", "-c", os.devnull, "-q", "test/python", "--junitxml=report.xml")
        ((_, output),) = run_on(api, folder, pytest)
        report = folder / "report.xml"
        seen = read_report(report) if report.is_file() else {}
        if "passed" not in seen.values():
            print(output, file=sys.stderr)
        for name, *arguments in PROGRAMS:
            ports = free_ports(2)
            programs = [(name, *each.format(*ports).split()) for each in arguments]
            # One example deletes this variable, and does not check that it is there.
            given = {"NIXL_ETCD_ENDPOINTS": "none"} if "partial_md" in name else {}
            done = run_on(api, folder, *programs, ready="Running test", **given)
            # Examples that find wrong bytes say so and end with status 0.
            wrong = {"wrong bytes" for _, output in done if "verification failed" in output}
            title = " ".join([name, *(each for each in arguments if "{" not in each)]).strip()
            seen[title] = ", ".join(sorted({end for end, _ in done} | wrong))
        for name, end in seen.items():
            ends.setdefault(name, dict.fromkeys(SWITCH, "did not run"))[api] = end
    lines = [f"| test or program of {ref} | on NIXL | on `nixl_api` |", "| --- | --- | --- |"]
    lines += [f"| {name} | {' | '.join(each.values())} |" for name, each in ends.items()]
    good = [each["nixl_api"] == "passed" for each in ends.values() if each["NIXL"] == "passed"]
    is_good = bool(good) and all(good)
    return [*lines, "", "Not run:", "", *(f"* {line}" for line in PROGRAMS_LEFT_OUT)], is_good


def main(*arguments: str) -> int:
    """Run one of the two and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nixl-checkout", type=Path, help="run NIXL's own tests and programs")
    checkout = parser.parse_args(arguments).nixl_checkout
    code = "import importlib.metadata as m; print(m.version('nixl-cu12'))"
    version = run(PYTHON, "-I", "-c", code).strip()
    head = f"With NIXL {version}:"
    if checkout is None:
        lines, is_good = compare_users()
        fill(ROOT / "docs" / "nixl_api.md", "nixl-users", [head, "", *lines])
    else:
        lines, is_good = compare_checkout(checkout, version)
        print("\n".join([head, "", *lines]))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
