"""Pages that have another name now: their old addresses lead to the new ones."""

from pathlib import Path

MOVED = {"muon": "matrices", "replays": "repeats"}
PAGE = (
    '<!doctype html>\n<meta charset="utf-8">\n<title>Moved</title>\n'
    '<meta http-equiv="refresh" content="0; url=../{new}/">\n'
    '<link rel="canonical" href="../{new}/">\n<a href="../{new}/">This page is there now.</a>\n'
)


def on_post_build(config, **_):
    for old, new in MOVED.items():
        page = Path(config["site_dir"]) / old / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(PAGE.format(new=new), encoding="utf-8")
