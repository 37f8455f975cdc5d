"""What an audit of a clip function found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ClipRow:
    """What one case found.

    Attributes:
        case: Its name.
        right: Whether all is as it should be.
        expected: The norm of the gradients.
        found: The norm that the function returned on the first rank where it was wrong, or on
            rank 0; None where it returned nothing or raised.
        fresh: The most memory that it took at once, in gradients of a rank; None where these are
            too few to say.
        why: What is wrong, and the likely cause where it is known.
    """

    case: str
    right: bool
    expected: float
    found: float | None
    fresh: float | None
    why: str = ""


@dataclass(frozen=True)
class ClipReport:
    """What an audit found; as text a table.

    Attributes:
        name: The function.
        rows: One for each case.
    """

    name: str
    rows: list[ClipRow]

    @property
    def right(self) -> bool:
        """Whether every case is."""
        return all([row.right for row in self.rows])

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"function": self.name, "cases": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        wide = max([len(row.case) for row in self.rows], default=0)
        lines = [f"{self.name}: {sum([row.right for row in self.rows])} of {len(self.rows)} right"]
        lines.append(f"  {'':<{wide}}   {'expected':>10} {'found':>10} {'memory':>7}")
        for row in self.rows:
            found = "none" if row.found is None else f"{row.found:.5g}"
            mark = "✓" if row.right else "✗"
            fresh = "" if row.fresh is None else f"{row.fresh:.2f}"
            numbers = f"{row.expected:>10.5g} {found:>10} {fresh:>7}"
            lines.append(f"{mark} {row.case:<{wide}}   {numbers}  {row.why}".rstrip())
        return "\n".join(lines)
