"""Checks that the numbers of each page are up to date, and shows its drawings.

A drawing becomes a part of the page, so that it takes the colours that the reader has chosen. The
page of the atlas gets the table of all results, which `assets/atlas.js` sorts.
"""

import re
import sys
from pathlib import Path

from mkdocs.plugins import get_plugin_logger

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts import refresh
from scripts.pages import evidence

logger = get_plugin_logger("refreshed")
DOCS = refresh.ROOT / "docs"
ATLAS = re.compile(r"<!-- atlas: table -->.*?<!-- /atlas -->", re.DOTALL)
ENTRY = re.compile(r"^<!-- atlas entry: .+ -->\n+", re.MULTILINE)
DRAWINGS = re.compile(r"^(?:!\[.*\]\(\S+\.svg\)\n?)+$", re.MULTILINE)
ADDRESS = re.compile(r"\]\((\S+\.svg)\)$", re.MULTILINE)


def on_page_markdown(markdown, page, **_):
    source = DOCS / page.file.src_uri
    for path, _ in refresh.Refreshed(source).stale():
        logger.warning("%s is not up to date: run python scripts/refresh.py", path.name)
    markdown = ATLAS.sub(lambda match: evidence.atlas_table(), ENTRY.sub("", markdown))
    markdown = refresh.MARKED.sub(r"\3", markdown)
    return DRAWINGS.sub(lambda match: drawn(match[0], source.parent), markdown)


def drawn(images, folder):
    """The drawings of a paragraph, beside each other where there is room."""
    files = [folder / address for address in ADDRESS.findall(images)]
    kind = "picture panels" if len(files) > 1 else "picture"
    svgs = "\n".join([file.read_text(encoding="utf-8").strip() for file in files])
    return f'<figure class="{kind}">\n{svgs}\n</figure>\n'
