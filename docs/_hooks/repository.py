"""Shows a link to a file of the repository as text: the built site does not have this file."""

import re
from pathlib import Path

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown, page, config, **_):
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_uri).parent

    def shown(link):
        text, address = link.groups()
        target = (folder / address.partition("#")[0]).resolve()
        return link[0] if docs in target.parents else text

    return LINK.sub(shown, markdown)
