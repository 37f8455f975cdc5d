"""Statements that put several reasons on one line: the library has none, and each kind is found."""

import pytest

from scripts.package_sizes import files, label
from scripts.style import findings
from tests.helpers import at_once


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("tuple", "a, b = 1, 2"),
        ("tuple", "self.count, self.links = 0, links"),
        ("tuple", "first, *rest = (x, *others)"),
        ("factor", "def f(wide: bool): return [1] * wide"),
        ("factor", "rows = [a, b] * (not empty)"),
        ("factor", "total = size * (size > 3)"),
        ("factor", "many = len(x) > 1\ntext = 's' * many"),
        ("nested", "x = a if b else c if d else e"),
        ("nested", "x = a if (b if c else d) else e"),
        ("called", "{'a': lambda: 1, 'b': lambda: 2}[name]()"),
        ("called", "(lambda x: x + 1)(2)"),
    ],
)
def test_each_kind_of_packed_statement_is_found(kind, source):
    assert [finding.kind for finding in findings(source)] == [kind]


@at_once(
    "source",
    [
        "a, b = b, a",
        "a[i], a[j] = a[j], a[i]",
        "a, b = pair()",
        "for a, b in rows: pass",
        "a = 1, 2",
        "x = [0.0] * count",
        "x = a if b else c",
        "x = {'a': f, 'b': g}[name]",
    ],
)
def test_plain_statements_are_not_found(source):
    assert list(findings(source)) == []


@at_once("path", files())
def test_no_file_of_the_library_has_a_packed_statement(path):
    assert [f"{label(path)}:{x.line}: {x.code}" for x in findings(path.read_text())] == []
