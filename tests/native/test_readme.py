"""The example in the README runs as written."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs_as_written(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    result, notifications = capsys.readouterr().out.splitlines()
    assert f"bytes={2 * 3 * 8 * 16 * 128 * 2}" in result
    assert "decode-0" in notifications
    assert "b'req-7'" in notifications
