"""The result of an audit of a clip function."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torchzero_clip.core.plurals import counted


@dataclass(frozen=True)
class ClipRow:
    """The result of one case.

    Attributes:
        case: The name of the case.
        right: Whether the norm, the gradients and the used memory are correct.
        expected: The norm of the gradients.
        found: The norm that the function returned on the first rank with a problem. If no rank has
            a problem, the norm on rank 0. None if the function returned nothing or raised an error.
        fresh: The peak of the new memory that the function used, divided by the memory of the
            gradients of a rank. None if the gradients are too small to compare.
        why: The error, with the likely cause if the cause is known. "" if everything is right.
    """

    case: str
    right: bool
    expected: float
    found: float | None
    fresh: float | None
    why: str = ""


@dataclass(frozen=True)
class ClipReport:
    """The result of `audit_clip`. `print(report)` shows it as a table.

    Attributes:
        name: The name of the function.
        rows: The result of each case.
    """

    name: str
    rows: list[ClipRow]

    @property
    def right(self) -> bool:
        """Whether all cases are right."""
        return all([row.right for row in self.rows])

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for example for JSON."""
        return {"function": self.name, "cases": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        width = max([len(row.case) for row in self.rows], default=0)
        right = sum([row.right for row in self.rows])
        lines = [f"{self.name}: right in {right} of {counted(len(self.rows), 'case')}"]
        lines.append(f"  {'':<{width}}   {'expected':>10} {'found':>10} {'memory':>7}")
        for row in self.rows:
            found = "none" if row.found is None else f"{row.found:.5g}"
            mark = "✓" if row.right else "✗"
            fresh = "" if row.fresh is None else f"{row.fresh:.2f}"
            numbers = f"{row.expected:>10.5g} {found:>10} {fresh:>7}"
            lines.append(f"{mark} {row.case:<{width}}   {numbers}  {row.why}".rstrip())
        return "\n".join(lines)
