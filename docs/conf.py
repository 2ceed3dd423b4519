"""How the site is built: `make docs`, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from generate import api_pages

import pynixlkv

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "pynixlkv"
author = "The pynixlkv developers"
copyright = author
version = release = pynixlkv.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
html_theme = "furo"
html_title = f"pynixlkv {version}"
default_role = "py:obj"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # numpydoc's sections have them in words
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False


def setup(app: Sphinx) -> None:
    """Write the API pages before any page is read."""
    app.connect("builder-inited", lambda _app: api_pages())
