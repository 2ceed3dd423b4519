"""Pages agree with the code: pictures, error texts, variables, links."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_generated" not in path.parts)


def test_pictures_are_what_the_script_draws() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures.py"))["render"]()
    folder = DOCS / "concepts" / "pictures"
    committed = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert sorted(committed) == sorted(drawn)
    for name, picture in drawn.items():
        assert committed[name] == picture, f"{name} is stale: run python docs/pictures.py"


def test_every_picture_is_shown() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = re.findall(r"\((?:concepts/)?pictures/(\S+\.svg)\)", pages)
    assert sorted(shown) == sorted(path.name for path in (DOCS / "concepts" / "pictures").iterdir())


def test_pages_can_be_read_without_the_site() -> None:
    """Nothing but a table of contents is left to Sphinx."""
    for page in PAGES:
        fences = re.findall(r"^```\{(.+?)\}", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(fences) <= {"toctree"}, page


def test_the_first_page_links_to_every_page() -> None:
    index = DOCS / "index.md"
    links = re.findall(r"\]\(([^)#:\s]+\.md)\)", index.read_text(encoding="utf-8"))
    linked = {(DOCS / link).resolve() for link in links} | {index}
    assert {page for page in PAGES if page.parent.name != "decisions"} <= linked


def error_texts() -> list[str]:
    """Return the first column of each table of the troubleshooting page."""
    page = (DOCS / "reference" / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)


def source_text() -> str:
    """Return the sources with string literals that go on in the next line joined."""
    files = [*ROOT.glob("pynixlkv/**/*.py"), *ROOT.glob("csrc/**/*.?pp"), ROOT / "CMakeLists.txt"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(files))
    return re.sub(r'"\s*\n\s*f?"', "", text)


SOURCE = source_text()


@pytest.mark.parametrize("text", error_texts())
def test_the_text_of_an_error_is_in_the_source(text: str) -> None:
    parts = [part.strip() for part in text.split("…")]
    assert max(map(len, parts)) >= 10, "too little to be recognised"
    missing = [part for part in parts if part not in SOURCE]
    assert not missing, f"the source does not say {missing}; the page shows users {text!r}"


def test_there_are_error_texts() -> None:
    assert len(error_texts()) > 30


def variables_in(pattern: str) -> set[str]:
    """Return the variables that files name."""
    text = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob(pattern))
    return set(re.findall(r"\bPYNIXLKV_[A-Z_]+\b", text))


def test_every_environment_variable_is_in_the_tables() -> None:
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(PYNIXLKV_\w+)` \|", page, re.MULTILINE))
    used = variables_in("pynixlkv/**/*.py")
    assert used <= listed
    assert listed - used <= variables_in("tests/**/*.py")


def test_the_readme_shows_the_table_of_tested_versions() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    support = (DOCS / "reference" / "support.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- support -->\n(.*?)<!-- end -->", readme, re.DOTALL)
    (written,) = re.findall(r"<!-- support -->\n(.*?)<!-- end -->", support, re.DOTALL)
    assert shown == written, "run make matrix, or copy the table of docs/reference/support.md"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md")]:
        for link in re.findall(r"\]\(([^)#:\s]+)[)#]", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"
