"""Everything that a card can show, in one report: ``make gpu`` runs this on a machine with one.

Conformance and kills over device memory by both transfer backends, transfers next to a copy inside
the card, and two vLLM engines on one card. Each part has a deadline, and the report is complete up
to the part that ended it. ``--rehearse`` runs the same parts where there is no card, with a few
cases each: over the driver of tests/cuda_stub, or over ordinary memory. vLLM's engines need a card.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN_LINES = 60
STUB_DEVICE = "card:1"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=-ra --benchmark-disable")


@dataclass(frozen=True)
class Part:
    """A command of this Python, and some arguments that make it short."""

    title: str
    arguments: tuple[str, ...]
    deadline_s: float
    short: tuple[str, ...] = ()
    needs_engines: bool = False


def parts(device):
    """Return what the report is made of."""
    return [
        Part("What is installed", ("-m", "pynixlkv", "info"), 120),
        Part(
            "Conformance, kills, contexts and kinds of device memory",
            (*PYTEST, "tests/cuda", "-m", "not stub"),
            1800,
            ("-k", "not Host and (test_read_moves or test_killed_after) or test_threads_of"),
        ),
        Part("Blocks of two processes, every byte compared", (*PYTEST, "tests/gpu"), 1800),
        Part(
            "Transfers, next to a copy inside the card",
            ("-m", "bench.gpu", "--device", device),
            900,
            ("--quick",),
        ),
        Part(
            "Two vLLM engines on one card, tokens compared",
            (*PYTEST, "tests/vllm/test_hand_off.py", "-k", "OURS or UCX"),
            3600,
            needs_engines=True,
        ),
    ]


def has_stub():
    """Return whether the CUDA driver is that of tests/cuda_stub."""
    return "cuda_stub" in os.environ.get("LD_LIBRARY_PATH", "")


def environment():
    """Return the environment of the parts."""
    env = {**os.environ, "PYNIXLKV_TEST_CARD": "1", "COLUMNS": "100"}
    paths = (os.environ.get("PYTHONPATH"), str(ROOT / "tests/support"))
    env["PYTHONPATH"] = ":".join(filter(None, paths))
    # UCX takes device memory for host memory without libcudart, which comes with torch.
    spec = importlib.util.find_spec("nvidia")
    folders = {
        str(path.parent)
        for place in (spec.submodule_search_locations or () if spec else ())
        for path in Path(place).glob("*/lib/libcudart.so.*")
    }
    env["LD_LIBRARY_PATH"] = ":".join(filter(None, [env.get("LD_LIBRARY_PATH"), *sorted(folders)]))
    return env


def run(command, deadline_s, env):
    """Run a command; return its exit status, None after the deadline, and its output."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


def describe(title, command, status, output, seconds):
    """Return the section of a part."""
    verdict = {0: "ok", None: "STOPPED at its deadline"}.get(status, f"FAILED, status {status}")
    lines = output.rstrip().splitlines()
    left_out = len(lines) - SHOWN_LINES
    shown = [f"({left_out} lines before)"] * (left_out > 0) + lines[-SHOWN_LINES:]
    shell = " ".join(command)
    return "\n".join(
        [f"## {title}: {verdict}, {seconds:.0f} s", "", f"`{shell}`", "", "```", *shown, "```", ""]
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="a device of torch (default: cuda:0)")
    parser.add_argument("--report", type=Path, default=ROOT / "build/gpu-report.md")
    parser.add_argument("--rehearse", action="store_true", help="few cases; needs no card")
    options = parser.parse_args(arguments)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    env = environment()
    is_ok = True
    with options.report.open("w", encoding="utf-8") as report:

        def add(text):
            report.write(text + "\n")
            report.flush()

        about = "On a card."
        if options.rehearse:
            what = f"the driver of tests/cuda_stub ({STUB_DEVICE})" if has_stub() else "host memory"
            about = (
                f"A rehearsal over {what}: no card was used, times mean nothing, and no vLLM "
                "engine was started, because its kernels need a card."
            )
        add(f"# pynixlkv over device memory\n\n{about}\n")
        if shutil.which("nvidia-smi"):
            add(describe("Cards", ["nvidia-smi"], *run(["nvidia-smi"], 60, env), 0))
        device = options.device
        if options.rehearse:
            device = STUB_DEVICE if has_stub() else "cpu"
        for part in parts(device):
            if part.needs_engines and (options.rehearse or not importlib.util.find_spec("vllm")):
                why = "a rehearsal starts none" if options.rehearse else "vllm is not installed"
                add(f"## {part.title}: left out, {why}\n")
                print(f"{part.title}: left out, {why}")
                continue
            command = [sys.executable, *part.arguments, *(part.short if options.rehearse else ())]
            print(f"{part.title} ...", flush=True)
            began = time.monotonic()
            # A rehearsal measures nothing, and may share its processors with anything.
            deadline_s = part.deadline_s * (10 if options.rehearse else 1)
            status, output = run(command, deadline_s, env)
            is_ok = is_ok and status == 0
            section = describe(part.title, command[1:], status, output, time.monotonic() - began)
            add(section)
            print(section, flush=True)
    print(f"{'all parts are ok' if is_ok else 'some parts FAILED'}: {options.report}")
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
