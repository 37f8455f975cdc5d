"""Puts our chains in place before pytest imports a suite, and leaves out what is not about them."""

from __future__ import annotations

import importlib
import os
import re

import pytest

suite = importlib.import_module(f"suites.{os.environ['SUITE']}")
suite.put_ours()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("SUITE_PART") == "quick":
        config.hook.pytest_deselected(items=[x for x in items if not suite.quick(x.name)])
        items[:] = [item for item in items if suite.quick(item.name)]
    for item in items:
        for pattern, why in suite.LEFT_OUT.items():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=why))
                break
