"""The documentation: `make docs` builds it into build/docs, plain files that open from disk."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

import focalkern

project = "focalkern"
author = "The focalkern developers"
copyright = "The focalkern developers; MIT licence"
version = release = focalkern.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
    "complete",
    "constants",
    "row_losses",
    "fold",
    "public_types",
]
templates_path = ["_templates"]
exclude_patterns = ["_extensions", "_static", "_templates"]
root_doc = "index"

# MyST: Markdown with directives.
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the change log is a file of its own and begins where its include begins

# Tutorials are executed in the build; a cell that raises or takes a minute ends it.
nb_execution_mode = "force"
nb_execution_timeout = 600  # of one cell, on a busy machine
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "remove"  # warnings of other packages, with paths of the machine that builds
nb_render_image_options = {"alt": "drawn by the cell above"}

# Docstrings: Google's sections. A single backtick is a name of this library where there is one, and code elsewhere.
default_role = "py:obj"
add_function_parentheses = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # Args has types with shapes and dtypes
autodoc_preserve_defaults = True
# torchmetrics imports torchvision where it is installed, perhaps for another torch; transformers and ray are not in
# the extra docs.
autodoc_mock_imports = ["ray", "torchvision", "transformers"]
autosummary_generate = True  # a page per object, in reference/api
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = f"focalkern {release}"
html_static_path = ["_static"]
html_css_files = ["focalkern.css"]
html_show_sourcelink = False
html_copy_source = False
html_math_renderer = "mathml"
html_sidebars = {name: [] for name in ("index", "install", "get_started", "changes", "sources")}
html_theme_options = {
    "header_links_before_dropdown": 7,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "show_prev_next": True,
    "show_toc_level": 2,
    # The pages with the widest tables have the whole width.
    "secondary_sidebar_items": {"**": ["page-toc"], "evidence/speed": [], "evidence/calibrators": []},
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_exclude = ".linenos, .gp, .go"
