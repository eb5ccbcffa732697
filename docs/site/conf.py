"""Sphinx's settings for the site; scripts/make_docs.py lays the pages out and builds it."""

project = "Metafleet"
html_title = "Metafleet"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["site"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
nitpicky = True
html_theme = "furo"
html_static_path = ["static"]
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6b8f", "color-brand-content": "#0b6b8f"},
    "dark_css_variables": {"color-brand-primary": "#62bfe2", "color-brand-content": "#62bfe2"},
}


def setup(app):
    """Pygments knows no CSV."""
    from pygments.lexers.special import TextLexer

    app.add_lexer("csv", TextLexer)
