"""Audit real steps of any optimizer: which parameters moved, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchzero_clip.attach import Attached
from torchzero_clip.audit.update.expected import Expected, expected_of
from torchzero_clip.audit.update.kinds import StepKind, singular_kind, stacks_of
from torchzero_clip.audit.update.step_watch import StepWatch
from torchzero_clip.audit.update.update_findings import judge
from torchzero_clip.audit.update.update_report import UpdateReport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MatrixFunctions = Mapping[str, Callable[[Tensor], Tensor]]


@contextmanager
def audit_update(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    expect: Mapping[str, str | Expected] | None = None,
    steps: int = 1,
    max_ratio: float = 2.0,
    matrices: MatrixFunctions | None = None,
    largest_matrix: int = 4096,
    replicas: ProcessGroup | bool | None = None,
    quiet: bool = False,
) -> Iterator[UpdateReport]:
    """Report which parameters moved in a block of code with an optimizer step, and how.

    The audit works with any optimizer of torch, on the real model and device. It changes nothing:
    parameters, gradients and state are bitwise identical to a run without the audit. It needs
    memory for copies of the weights and gradients of the parameters that require a gradient. A line
    on stderr states the number of bytes before the copies are made.

    If the model is sharded or replicated, all ranks must run the audit.

    Args:
        model: The model. All its parameters should be in the optimizer.
        optimizer: The optimizer, or a list of several optimizers.
        expect: For patterns of parameter names, the kind of step that you configured: "gradient",
            "sign", "orthogonal", "decay", "other" or "still". An `Expected` also states the size.
            A pattern is a glob, or several globs with `|` between them. The first match wins.
        steps: The number of steps that each optimizer should make in the block.
        max_ratio: The norm of a step may be this many times the norm of the weight. The audit does
            not check this for weights that are zero before the step.
        matrices: For patterns of parameter names, a function that turns the whole parameter into a
            stack of matrices `(..., rows, columns)`. Without it, a parameter with two dims is one
            matrix, and a parameter with more dims is a stack of matrices or a convolution.
        largest_matrix: Singular values are not computed if both sides of a matrix are longer.
        replicas: A process group whose ranks should have equal parameters, or True for all ranks.
            Not needed for DTensor and DistributedDataParallel, because the audit finds their group.
        quiet: Whether to print no line about the memory.

    Yields:
        An `UpdateReport`. It is filled when the block ends. `print(report)` shows it as text.

    Example:
        >>> import torch
        >>> from torchzero_clip.audit import audit_update
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        >>> optimizer = torch.optim.AdamW(model[0].parameters())
        >>> with audit_update(model, optimizer, quiet=True) as report:
        ...     loss = model(torch.ones(4, 16)).square().sum()
        ...     loss.backward()
        ...     optimizer.step()
        >>> for finding in report.findings:
        ...     print(finding)
        not-in-optimizer: 1.weight, 1.bias: no group of the optimizer has this parameter
    """
    optimizers = _optimizers(optimizer)
    watch = StepWatch(model, optimizers, quiet)
    expected = expected_of(watch.params, expect)
    functions = _functions_by_name(watch.params, matrices)

    def singular(name: str, step: Tensor) -> StepKind:
        stacks = stacks_of(step)
        if name in functions:
            stack = functions[name](step)
            stacks = [stack.reshape(-1, *stack.shape[-2:])]
        return singular_kind(stacks, largest_matrix)

    report = UpdateReport(
        optimizer=", ".join([type(each).__name__ for each in optimizers]),
        copied=watch.weight_bytes + watch.gradient_bytes,
    )
    with watch:
        yield report
        with torch.no_grad():
            behaviors, findings = judge(
                model, watch, expected, steps, max_ratio, singular, replicas
            )
        report.fill(watch.steps, behaviors, findings)


@contextmanager
def assert_update(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **options: Any
) -> Iterator[UpdateReport]:
    """Raise an `AssertionError` with the report if `audit_update` has a finding.

    Use this function in a test.

    Args:
        model: The model, as for `audit_update`.
        optimizer: The optimizer or the optimizers, as for `audit_update`.
        **options: The other arguments of `audit_update`, such as `expect`.

    Example:
        >>> import torch
        >>> from torchzero_clip.audit import assert_update
        >>> model = torch.nn.Linear(16, 16)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with assert_update(model, optimizer, expect={"*": "sign"}, quiet=True):
        ...     loss = model(torch.randn(32, 16)).square().sum()
        ...     loss.backward()
        ...     optimizer.step()
    """
    with audit_update(model, optimizer, **options) as report:
        yield report
    if report.findings:
        raise AssertionError(f"the step is not as expected\n{report}")


def _optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers whose step does the update."""
    given: list[Any] = [optimizer] if not isinstance(optimizer, (list, tuple)) else [*optimizer]
    found: list[Optimizer] = []
    for each in given:
        if isinstance(each, Attached):
            raise TypeError(
                "audit_update: pass the optimizer that the handle was attached to, not the handle"
            )
        inner = getattr(each, "optimizer", None)  # Accelerate, Lightning and DeepSpeed wrap it
        if isinstance(inner, Optimizer):
            each = inner
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"audit_update: optimizer must be a torch.optim.Optimizer, or a list of several, "
                f"got {type(each).__name__}"
            )
        found.append(each)
    return found


def _functions_by_name(
    names: Mapping[str, Tensor], matrices: MatrixFunctions | None
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the function that gives the matrices of a parameter, by the name of the parameter."""
    functions = {}
    for pattern, function in reversed(list((matrices or {}).items())):
        globs = [glob.strip() for glob in pattern.split("|")]
        matched = [name for name in names if any([fnmatchcase(name, glob) for glob in globs])]
        if not matched:
            raise ValueError(f"audit_update: {pattern!r} in matrices matches no parameter")
        functions.update(dict.fromkeys(matched, function))
    return functions
