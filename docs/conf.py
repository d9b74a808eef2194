"""Sphinx configuration."""

import sys
from pathlib import Path

import weightclip

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "docs" / "_extensions"), str(ROOT / "tools")]

from proofs import source_of  # noqa: E402

project = "weightclip"
author = copyright = "the weightclip authors"
version = release = weightclip.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.linkcode", "proofs"]
exclude_patterns = ["_build", "_extensions"]
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # attributes as a list, not as entries of the index
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88  # longer ones have a line for each argument
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # links to headings (SOUNDNESS.md#theorem-7-...) are checked
suppress_warnings = ["misc.highlighting_failure"]  # certificates and transcripts are shown as text


def linkcode_resolve(domain, info):
    """Where the reference links a name's source to; its pages lie in one folder."""
    place = source_of(info["module"], info["fullname"]) if domain == "py" else None
    return f"../{place}" if place else None


html_theme = "sphinx_book_theme"
html_title = f"weightclip {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
}
