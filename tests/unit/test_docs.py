"""The pictures are what their script draws, and the examples in the pages run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "concepts" / "geometry.md"


def test_pictures_are_what_the_script_draws() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures.py"))["render"]()
    folder = DOCS / "concepts" / "pictures"
    committed = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert sorted(committed) == sorted(drawn)
    for name, picture in drawn.items():
        assert committed[name] == picture, f"{name} is stale: run python docs/pictures.py"


def test_every_picture_is_shown() -> None:
    shown = re.findall(r"\(pictures/(\S+\.svg)\)", PAGE.read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(path.name for path in (DOCS / "concepts" / "pictures").iterdir())


def test_examples_run(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    exec("\n".join(blocks), {})
    assert "runs of 256 to 256 bytes" in capsys.readouterr().out
