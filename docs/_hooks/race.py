"""Makes assets/race.html, the page of the demo's race, of what happened in it."""

import sys
from pathlib import Path

from mkdocs.structure.files import File

EXAMPLES = Path(__file__).parents[2] / "examples"


def on_files(files, config):
    sys.path.insert(0, str(EXAMPLES))
    try:
        import demo_picture
    finally:
        sys.path.remove(str(EXAMPLES))
    made = demo_picture.page(demo_picture.read())
    files.append(File.generated(config, "assets/race.html", content=made))
    return files
