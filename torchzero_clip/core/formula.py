"""Find the formula in the docstring of a rule, for generated files, tables and the command line."""

from __future__ import annotations

import inspect


def formula_paragraph(docstring: str) -> str:
    """Return the paragraph of a docstring that is its formula, or an empty string."""
    description = docstring.partition("\nArgs:\n")[0]
    paragraphs = [paragraph.strip() for paragraph in description.split("\n\n")]
    return next((p for p in paragraphs if "←" in p and not p.endswith(".")), "")


def formula_of(rule: type) -> str:
    """Return the formula of a rule on one line, or the summary of a rule without a formula."""
    docstring = inspect.getdoc(rule) or ""
    text = formula_paragraph(docstring) or docstring.partition("\n\n")[0]
    return " ".join(text.split())
