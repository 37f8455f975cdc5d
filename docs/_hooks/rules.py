"""Puts the pages of the rules into the navigation, after their index."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.pages import rules


def on_config(config, **_):
    (section,) = (section["Rules"] for section in config.nav if "Rules" in section)
    (kinds,) = (entry for entry in section if "By kind" in entry)
    kinds["By kind"] = [*rules.navigation()]
    return config
