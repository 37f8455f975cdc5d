"""Turns formulas into MathML while the docs are built: no script, and no network for the reader."""

import html as entities
import re

from latex2mathml.converter import convert
from mkdocs.plugins import get_plugin_logger

logger = get_plugin_logger("maths")

# What pymdownx.arithmatex leaves of `$…$` and `$$…$$`.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html, page, **_):
    def render(match):
        tag, tex = match[1], entities.unescape(match[2]).strip()
        mathml = convert(tex, display="inline" if tag == "span" else "block").replace(r"\_", "_")
        if "\\" in mathml:
            logger.warning("%s: not all of this formula is known: %s", page.file.src_uri, tex)
        mathml = mathml.replace("<math ", f'<math alttext="{entities.escape(tex)}" ', 1)
        return f'<{tag} class="arithmatex">{mathml}</{tag}>'

    return FORMULA.sub(render, html)
