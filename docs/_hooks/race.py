"""Makes assets/race.html, the page of the demo's race, and the home page's link to it."""

import sys
from pathlib import Path

from mkdocs.structure.files import File

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = "assets/race.html"


def on_files(files, config):
    sys.path.insert(0, str(EXAMPLES))
    try:
        import demo_picture
    finally:
        sys.path.remove(str(EXAMPLES))
    made = demo_picture.page(demo_picture.read())
    files.append(File.generated(config, PAGE, content=made))
    return files


def on_page_markdown(markdown, page, **_):
    if page.file.src_uri == "index.md":
        return markdown.replace(f"`{PAGE}`", f"[`{PAGE}`]({PAGE})")
    return markdown
