"""A rehearsal of the command for a card's owner, over the driver of tests/cuda_stub."""

import pytest

from bench import gpu_report

pytestmark = [pytest.mark.stub, pytest.mark.timeout(3600)]


def test_the_report_of_a_rehearsal_has_every_part(tmp_path):
    path = tmp_path / "report.md"
    status = gpu_report.main(["--rehearse", "--report", str(path)])
    text = path.read_text()
    assert status == 0, text
    for part in gpu_report.parts("cpu"):
        assert f"## {part.title}: {'left out' if part.needs_engines else 'ok'}" in text
    assert "A rehearsal over the driver of tests/cuda_stub (card:1)" in text
    assert "no vLLM engine was started" in text
    assert "3 passed" in text
    assert "card:1 <- card:1" in text
    assert "no run failed, all bytes that arrived are equal" in text


def test_the_report_names_parts_that_fail_and_parts_that_hang(tmp_path, monkeypatch, capsys):
    path = tmp_path / "report.md"
    commands = ("-c", "print('so far')\nraise SystemExit(3)"), ("-c", "while True: pass")
    failing = [
        gpu_report.Part(f"part {i}", each, deadline_s)
        for i, (each, deadline_s) in enumerate(zip(commands, (600.0, 1.0), strict=True))
    ]
    monkeypatch.setattr(gpu_report, "parts", lambda _: failing)
    assert gpu_report.main(["--report", str(path)]) == 1
    text = path.read_text()
    assert "## part 0: FAILED, status 3" in text
    assert "so far" in text
    assert "## part 1: STOPPED at its deadline" in text
    assert "some parts FAILED" in capsys.readouterr().out
