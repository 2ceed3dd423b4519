"""The files that hosted CI reads can be read, and run nothing that others can change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_jobs_with_limits_and_few_rights(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        assert job["steps"], name
        assert set(job.get("needs", [])) <= set(workflow["jobs"]), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_to_a_commit(path: Path) -> None:
    uses = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert uses
    for each in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each


def steps(workflow: str) -> list[str]:
    """Return the make targets that a workflow runs, a job for each."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text(encoding="utf-8"))
    return jobs["jobs"]["check"]["strategy"]["matrix"]["step"]


def test_hosted_ci_runs_the_steps_of_make_ci() -> None:
    (listed,) = re.findall(r"^CI_STEPS := (.*)$", MAKEFILE, re.MULTILINE)
    assert steps("ci.yml") == listed.split()


def test_what_ci_leaves_out_runs_at_night() -> None:
    assert {"asan", "tsan", "tidy", "cov", "test-vllm"} <= set(steps("nightly.yml"))


def test_workflows_call_make_targets_that_exist() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    words = [word for line in re.findall(r"run: make (.*)", text) for word in line.split()]
    called = [word for word in words if re.fullmatch(r"[a-z-]+", word)]
    for target in [*called, *steps("ci.yml"), *steps("nightly.yml")]:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_can_be_read(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert "body" in form or path.name == "config.yml"
