"""Frameworks take seconds to import: these files are collected where the marker asks for them."""

from __future__ import annotations

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return True if "not frameworks" in config.getoption("markexpr") else None
