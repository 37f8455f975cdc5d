"""Counts with their nouns, such as "1 step" and "2 steps", for messages and reports."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count and a noun, such as "1 step" or "1,024 elements".

    Args:
        count: The count.
        noun: The noun in the singular.
        plural: The noun in the plural, if it does not end with "s".
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {plural or noun + 's'}"
