"""Expectations: the kind and the size of the step that a user has configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from torchzero_clip.audit.update.kinds import KINDS
from torchzero_clip.core.names import hint


@dataclass(frozen=True)
class Expected:
    """An expectation about the step of some parameters, for `audit_update`.

    Args:
        kind: The kind of the step: "gradient", "sign", "orthogonal", "decay", "other", or "still"
            for parameters that should not move. None accepts every kind.
        rms: The root mean square of the step without weight decay, over the elements that moved.
            For the first step of Adam, this is the learning rate. None accepts every size.
        tolerance: The relative difference from `rms` that is still as expected.

    Example:
        >>> from torchzero_clip.audit import Expected
        >>> Expected("sign", rms=1e-3)
        Expected(kind='sign', rms=0.001, tolerance=0.2)
    """

    kind: str | None = None
    rms: float | None = None
    tolerance: float = 0.2

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(
                f"audit_update: a kind in expect= must be one of {', '.join(KINDS)}, got "
                f"{self.kind!r}{hint(self.kind, KINDS)}"
            )


def expected_of(
    params: Mapping[str, Tensor], expect: Mapping[str, str | Expected] | None
) -> dict[str, Expected]:
    """Return the expectation about each parameter. The first matching pattern wins.

    A pattern is a glob, or several globs with `|` between them. A glob that checks nothing raises
    ValueError: it matches no name, or only frozen parameters that are expected to move.
    """
    names = list(params)
    expected = dict.fromkeys(names, Expected())
    for pattern, value in reversed(list((expect or {}).items())):
        wanted = value if isinstance(value, Expected) else Expected(value)
        for glob in map(str.strip, pattern.split("|")):
            matched = [name for name in names if fnmatchcase(name, glob)]
            if not matched:
                raise ValueError(
                    f"audit_update: {glob!r} in expect matches no parameter"
                    f"{hint(glob.replace('*', ''), names)}"
                )
            if wanted.kind != "still" and not any([params[name].requires_grad for name in matched]):
                raise ValueError(
                    f"audit_update: {glob!r} in expect matches only parameters that require no "
                    'gradient; expect "still" of them'
                )
            expected.update(dict.fromkeys(matched, wanted))
    return expected
