"""The site: ``make docs``. The source folder is the repository, so that links work there and here alike."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("_extensions")))

project = "hyfreedp"
author = "The hyfreedp developers"
release = metadata.version("hyfreedp")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "course_site",
]
root_doc = "docs/index"
templates_path = ["_templates"]
html_additional_pages = {"index": "landing.html"}  # index.html at the site's root; the table of contents lies in docs/
html_context = {"master_doc": "index"}  # the page that the site's name in the margin leads to
include_patterns = [
    "*.md",
    "docs/*.md",
    "data/README.md",
    "notebooks/[0-9]*.ipynb",
    "notebooks/**/[0-9]*.ipynb",
]

nb_execution_mode = "off"  # the outputs are those that are committed
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a notebook's last parts are headings of their own

python_maximum_signature_line_length = 88  # a longer one has a line for each argument
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True

html_theme = "furo"
html_title = "hyfreedp"
html_static_path = ["_static", "../hyfreedp/experiments/book/step.js"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = True  # which is how a notebook can be downloaded from its page
html_sourcelink_suffix = ""
html_show_sourcelink = False
html_show_copyright = False
