"""Sphinx configuration: `sphinx-build -W docs docs/_build`."""

import jacstore

project = "jacstore"
author = "the jacstore developers"
version = release = jacstore.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "numpydoc",
    "sphinx_click",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "jacstore"
html_static_path = ["_static"]
exclude_patterns = ["_build"]
templates_path: list[str] = []

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
autosummary_generate = True
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
intersphinx_mapping: dict[str, tuple[str, None]] = {}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
autodoc_mock_imports = ["torch", "flax", "equinox"]  # extras that need not be installed
