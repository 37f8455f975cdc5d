"""The result of `audit_update`: rows of parameters that behave alike, and findings."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torchzero_clip.audit.update.kinds import StepKind
from torchzero_clip.audit.update.step_sums import StepSums
from torchzero_clip.core.names import NUMBER, without_numbers
from torchzero_clip.core.plurals import counted

CODES = {
    "no-step": "the optimizer made no step in the block",
    "several-steps": "the optimizer made another number of steps than expected",
    "not-in-optimizer": "no group of the optimizer has the parameter",
    "not-in-model": "the optimizer has a parameter that the model does not have",
    "in-two-groups": "two groups have the parameter",
    "nonfinite-weight": "a weight is infinite or NaN after the step",
    "nonfinite-state": "the state of the optimizer is infinite or NaN",
    "nonfinite-gradient": "the gradient is infinite or NaN, and the parameter did not move",
    "moved-outside-step": "the parameter changed in the block before the step",
    "moved-without-gradient": "the parameter moved without a gradient",
    "no-gradient": "the parameter has no gradient, and did not move",
    "zero-gradient": "the gradient is zero, and the parameter did not move",
    "unmoved": "the parameter has a gradient, and did not move",
    "rounding": "the update is too small for the dtype of the weight",
    "decay-only": "only weight decay moved the parameter, although it has a gradient",
    "unexpected-kind": "the step is of another kind than expected",
    "unexpected-size": "the step has another size than expected",
    "large-step": "the norm of the step is more than max_ratio times the norm of the weight",
    "state-unchanged": "the optimizer has state for the parameter, and did not change it",
    "state-outside-step": "the state changed in the block before the step",
    "replicas-differ": "the weight differs between ranks that should have equal weights",
}
"""The code of each finding, with its meaning. Reports list findings in this order."""

WIDTH = 110
"""The width of the text of findings."""
NAMES_SHOWN = 6
"""A message shows at most so many names, or patterns of names."""

NUMBERS_SHOWN = 4
"""A pattern of names lists at most so many numbers that are not a range."""


@dataclass(frozen=True)
class UpdateFinding:
    """Something that an optimizer should not have done, or should have done and did not do.

    Attributes:
        code: The code of the finding, one of `torchzero_clip.audit.CODES`.
        message: A description of the problem, with the names of the parameters.
        names: The names of all parameters that the finding is about. Empty if it is about the
            whole step.
    """

    code: str
    message: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True)
class UpdateRow:
    """Parameters that behave alike in a step.

    Sizes are root mean squares. They are pairs of the smallest and the largest parameter.

    Attributes:
        pattern: The common name. Numbers that differ are in brackets, such as "layers.[0-3].bias".
        names: The names of the parameters.
        shape: The shape of each parameter.
        dtype: The dtype of each parameter.
        groups: The numbers of the groups in the optimizer. With several optimizers, each number
            follows the class of its optimizer.
        gradient: The size of the gradient. None if there is no gradient.
        moved: The shares of the elements that moved.
        step: The size of the step, without weight decay, over the elements that moved.
        weight: The size of the weights before the step.
        ratio: The norm of the step divided by the norm of the weights. None if all weights were
            zero before the step.
        kind: The kind of the step, or why it is not judged.
        state: The change of the state of the optimizer.
    """

    pattern: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    groups: tuple[str, ...]
    gradient: tuple[float, float] | None
    moved: tuple[float, float]
    step: tuple[float, float]
    weight: tuple[float, float]
    ratio: tuple[float, float] | None
    kind: str
    state: str

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row in a table."""
        gradient = "none" if self.gradient is None else _span(self.gradient)
        ratio = "-" if self.ratio is None else _span(self.ratio)
        low, high = self.moved
        moved = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
        return (
            with_count(self.names),
            " x ".join(map(str, self.shape)) or "scalar",
            ", ".join(self.groups) or "-",
            gradient,
            moved,
            _span(self.step),
            _span(self.weight),
            ratio,
            self.kind,
            self.state,
        )


HEADER = (
    "parameter",
    "shape",
    "group",
    "gradient",
    "moved",
    "step",
    "weight",
    "ratio",
    "kind",
    "state",
)


class Behavior(NamedTuple):
    """The step of one parameter.

    Attributes:
        sums: The sums over its elements.
        kind: The kind of its step.
        shape: Its shape.
        dtype: Its dtype.
        groups: Its groups, as in `UpdateRow`.
        state: The change of the state of the optimizer.
        size: The size of the step, without weight decay.
    """

    sums: StepSums
    kind: StepKind
    shape: tuple[int, ...]
    dtype: str
    groups: tuple[str, ...]
    state: str
    size: float


@dataclass
class UpdateReport:
    """The result of `audit_update`. `print(report)` shows it as text.

    The report is empty until the block has ended, and stays empty if the block raises an error.

    Attributes:
        optimizer: The class of the optimizer.
        steps: The number of steps that the optimizer made.
        copied: The number of bytes of the copies of weights and gradients.
        rows: One row for the parameters that behave alike.
        findings: The findings, in the order of `torchzero_clip.audit.CODES`.
        notes: The expectations that were not checked, because the step could not be judged.
        ended: Whether the block has ended without an error.
    """

    optimizer: str = ""
    steps: int = 0
    copied: int = 0
    rows: list[UpdateRow] = field(default_factory=list)
    findings: list[UpdateFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended: bool = False

    def fill(self, steps: Sequence[int], behaviors: dict[str, Behavior], found: Findings) -> None:
        """Fill the report after the block."""
        self.steps = max(steps)
        self.rows = rows_of(behaviors)
        self.findings = found.joined()
        self.notes = found.joined_notes()
        self.ended = True

    def of(self, *codes: str) -> list[UpdateFinding]:
        """Return the findings with the given codes."""
        return [finding for finding in self.findings if finding.code in codes]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for example for JSON. None replaces infinity and NaN."""
        return _without_nonfinite(asdict(self))

    def __str__(self) -> str:
        if not self.ended:
            return "audit_update: the block has not ended, or it raised an error"
        steps = counted(self.steps, "step")
        count = sum([len(row.names) for row in self.rows])
        parameters = counted(count, "parameter")
        lines = [f"{steps} of {self.optimizer}, {parameters}:"]
        lines += _table([HEADER, *[row.cells() for row in self.rows]])
        if self.notes:
            lines.append("Not checked:")
            lines += _wrapped(self.notes)
        if self.findings:
            lines.append(f"{counted(len(self.findings), 'finding')}:")
            lines += _wrapped(map(str, self.findings))
        else:
            lines.append("No findings.")
        return "\n".join(lines)


def _without_nonfinite(value: Any) -> Any:
    """Return plain data with None in place of infinite numbers and NaN, which JSON has not."""
    if isinstance(value, dict):
        return {key: _without_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _wrapped(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of texts in a report."""
    for text in texts:
        yield from textwrap.wrap(
            text,
            WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _span(ends: tuple[float, float]) -> str:
    """Return the smallest value, and the largest value if both differ, as text."""
    texts = dict.fromkeys([f"{end:.2g}" for end in ends])
    return " to ".join(texts)


def rows_of(behaviors: dict[str, Behavior]) -> list[UpdateRow]:
    """Return a row for the parameters that differ only in numbers: in their names and sizes."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, one in behaviors.items():
        sums = one.sums
        moved = 0 if not sums.moved else 1 + (sums.moved == sums.elements)
        key = (
            without_numbers(name),
            one.shape,
            one.dtype,
            _owners(one),
            bool(sums.gradients),
            bool(sums.gradient_square),
            bool(sums.weight_square),
            moved,
            str(one.kind),
            one.state,
        )
        alike.setdefault(key, []).append(name)
    return [_row(names, [behaviors[name] for name in names]) for names in alike.values()]


def _owners(one: Behavior) -> tuple[str, ...]:
    """Return the optimizers in the labels of the groups of a parameter. "" is the only one."""
    return tuple([label.rpartition(" ")[0] for label in one.groups])


def _row(names: Sequence[str], behaviors: Sequence[Behavior]) -> UpdateRow:
    first = behaviors[0]
    sums = [one.sums for one in behaviors]
    gradient = None
    if first.sums.gradients:
        gradient = _ends([each.gradient_rms for each in sums])
    ratios = [each.ratio for each in sums if each.ratio is not None]
    return UpdateRow(
        pattern=pattern_of(names),
        names=tuple(names),
        shape=first.shape,
        dtype=first.dtype,
        groups=tuple(sorted({g for one in behaviors for g in one.groups})),
        gradient=gradient,
        moved=_ends([each.moved / max(each.elements, 1) for each in sums]),
        step=_ends([one.size for one in behaviors]),
        weight=_ends([each.weight_rms for each in sums]),
        ratio=_ends(ratios) if ratios else None,
        kind=str(first.kind),
        state=first.state,
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


class Findings:
    """Collects findings about single parameters, and joins findings that differ only in names."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[tuple[str, tuple[float, ...]]]] = {}
        self._notes: dict[str, list[str]] = {}

    def add(self, code: str, what: str, name: str = "", *numbers: float) -> None:
        """Add a finding.

        Args:
            code: The code of the finding.
            what: What happened, with `{}` for each number.
            name: The name of the parameter, or "" if the finding is about the whole step.
            *numbers: The numbers in the text. Joined findings show a range.
        """
        self._found.setdefault((code, what), []).append((name, numbers))

    def note(self, what: str, name: str) -> None:
        """Add a note about an expectation that was not checked."""
        self._notes.setdefault(what, []).append(name)

    def joined_notes(self) -> list[str]:
        """Return the notes."""
        return [f"{shown(names)}: {what}" for what, names in self._notes.items()]

    def joined(self) -> list[UpdateFinding]:
        """Return the findings in the order of `CODES`."""
        order = list(CODES)
        findings = []
        for (code, what), found in self._found.items():
            columns = zip(*[numbers for _, numbers in found], strict=True)
            message = what.format(*[_span(_ends(column)) for column in columns])
            names = tuple([name for name, _ in found if name])
            if names:
                message = f"{shown(names)}: {message}"
            findings.append(UpdateFinding(code, message, names))
        return sorted(findings, key=lambda finding: order.index(finding.code))


def shown(names: Sequence[str]) -> str:
    """Return names as text. Many names are shown as patterns, each with its count."""
    if len(names) <= NAMES_SHOWN:
        return ", ".join(names)
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(without_numbers(name), []).append(name)
    texts = [with_count(each) for each in alike.values()]
    more = [f"{len(texts) - NAMES_SHOWN} more"] if len(texts) > NAMES_SHOWN else []
    return f"{counted(len(names), 'parameter')}: {', '.join([*texts[:NAMES_SHOWN], *more])}"


def with_count(names: Sequence[str]) -> str:
    """Return the pattern of names that differ only in numbers, with their count."""
    pattern = pattern_of(names)
    return f"{pattern} ({len(names)})" if len(names) > 1 else pattern


def pattern_of(names: Sequence[str]) -> str:
    """Return the common pattern of names that differ only in numbers, with these numbers.

    For example, the pattern of "a.0.b" and "a.1.b" is "a.[0-1].b".
    """
    texts = NUMBER.split(names[0])
    columns = zip(*[NUMBER.findall(name) for name in names], strict=True)
    numbers = [_numbers_shown(sorted(set(map(int, column)))) for column in columns]
    return "".join([*itertools.chain(*zip(texts, numbers, strict=False)), texts[-1]])


def _numbers_shown(numbers: Sequence[int]) -> str:
    """Return different numbers as text: one number, a range, a few numbers, or `*`."""
    first = numbers[0]
    last = numbers[-1]
    if first == last:
        return str(first)
    if last - first == len(numbers) - 1:
        return f"[{first}-{last}]"
    if len(numbers) <= NUMBERS_SHOWN:
        return f"[{','.join(map(str, numbers))}]"
    return "*"
