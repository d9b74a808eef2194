"""Sphinx configuration."""

project = "weightclip"
copyright = "the weightclip authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "sphinx_book_theme"
html_title = "weightclip"
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3  # links to headings (SOUNDNESS.md#theorem-7-...) are checked
