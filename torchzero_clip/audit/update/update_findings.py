"""Judge the step of each parameter, and collect the findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from torchzero_clip.audit.update.expected import Expected
from torchzero_clip.audit.update.fingerprints import fingerprint, tensors_in
from torchzero_clip.audit.update.kinds import KINDS, UNJUDGED, StepKind, kind_of
from torchzero_clip.audit.update.replicas import drifted, groups_of_replicas
from torchzero_clip.audit.update.step_sums import Observed, Rates, StepSums, measured
from torchzero_clip.audit.update.step_watch import StepWatch, gradient_of
from torchzero_clip.audit.update.update_report import Behavior, Findings
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.sharding.layout import local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STATES_SHOWN = 2
"""A row names at most so many state tensors that did not change."""
Singular: TypeAlias = Callable[[str, Tensor], StepKind]


def judge(
    model: nn.Module,
    watch: StepWatch,
    expected: Mapping[str, Expected],
    steps: int,
    max_ratio: float,
    singular: Singular,
    replicas: ProcessGroup | bool | None,
) -> tuple[dict[str, Behavior], Findings]:
    """Return the behavior of each parameter that requires a gradient, and the findings.

    Args:
        model: The model.
        watch: The copies of the weights and gradients, and the notes of the hooks.
        expected: The expectation about each parameter.
        steps: The expected number of steps of each optimizer.
        max_ratio: The largest ratio of the norms of step and weight without a finding.
        singular: The kind of a step that follows from its singular values.
        replicas: The process group whose ranks should have equal parameters, True, or None.
    """
    findings = Findings()
    changes = {name: _state_changes(watch, name) for name in watch.weights}
    observed = _observed(watch, changes)
    behaviors = {}
    for name, sums in measured(observed).items():
        one = observed[name]
        kind = kind_of(one, sums, max(watch.steps), partial(singular, name))
        if name in watch.moved_early:
            kind = StepKind(UNJUDGED, "moved before the step")
        behaviors[name] = Behavior(
            sums=sums,
            kind=kind,
            shape=tuple(one.param.shape),
            dtype=str(one.param.dtype).removeprefix("torch."),
            groups=_group_labels(watch, name),
            state=_in_words(changes[name], sums),
            size=_size(one, sums),
        )
    _about_steps(watch, steps, findings)
    for place in watch.foreign:
        findings.add("not-in-model", f"the optimizer has {place}, and the model does not")
    for name, behavior in behaviors.items():
        _about_parameter(watch, name, behavior, expected[name], max_ratio, findings)
        _about_state(watch, name, behavior, findings)
    for name, before in watch.frozen.items():
        if fingerprint(watch.params[name]) != before:
            what = "the parameter requires no gradient, but it changed in the block"
            findings.add("moved-without-gradient", what, name)
    groups = groups_of_replicas(model, watch.params, replicas)
    names = {name for group in groups.values() for name in group}
    before_step = {name: fingerprint(watch.weights[name]) for name in names & behaviors.keys()}
    for name, what in drifted(groups, watch.params, watch.frozen | before_step):
        findings.add("replicas-differ", what, name)
    return behaviors, findings


def _size(one: Observed, sums: StepSums) -> float:
    """Return the root mean square of a step without weight decay, over the elements that moved."""
    if not sums.moved:
        return 0.0
    return sums.undecayed.rms if one.rates.decay else sums.step.rms


def _group_labels(watch: StepWatch, name: str) -> tuple[str, ...]:
    """Return the groups of a parameter. With several optimizers, each label names its optimizer."""
    labels = []
    for i, g in watch.groups[name]:
        label = str(g)
        if len(watch.optimizers) > 1:
            label = f"{type(watch.optimizers[i]).__name__} {g}"
        labels.append(label)
    return tuple(labels)


def _observed(watch: StepWatch, changes: Mapping[str, Mapping[str, bool]]) -> dict[str, Observed]:
    """Return the parameters that require a gradient, before and after the step."""
    observed = {}
    for name, before in watch.weights.items():
        gradient = watch.gradients.get(name)
        if gradient is None and not watch.groups[name]:  # no hook has seen its gradient
            gradient = gradient_of(watch.params[name])
        observed[name] = Observed(
            param=watch.params[name],
            before=before,
            gradient=gradient,
            scale=watch.scale.get(name, 1.0),
            rates=watch.rates.get(name, Rates(0.0, 0.0, 0.0)),
            state_changes=sum(changes[name].values()),
            bad_states=len(_bad_states(watch, name)),
        )
    return observed


def _about_steps(watch: StepWatch, steps: int, findings: Findings) -> None:
    """Add findings about the number of steps."""
    for optimizer, made, skipped in zip(watch.optimizers, watch.steps, watch.skipped, strict=True):
        name = type(optimizer).__name__
        if made - skipped == 0:
            findings.add("no-step", f"{name} made no step in the block{_why_no_step(watch)}")
        elif made != steps:
            what = f"{name} made {counted(made, 'step')} in the block instead of {steps}"
            findings.add("several-steps", what)


def _why_no_step(watch: StepWatch) -> str:
    """Return the likely reason why an optimizer made no step."""
    for name, p in watch.params.items():
        gradient = gradient_of(p)
        if gradient is not None and not _is_finite(gradient):
            return f": the gradient of {name} is infinite or NaN, so a GradScaler skips the step"
    return ": call optimizer.step() inside the block"


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values on this rank are finite."""
    values = local(tensor)
    return bool(torch.isfinite(values.to_dense() if values.is_sparse else values).all())


def _about_parameter(
    watch: StepWatch,
    name: str,
    behavior: Behavior,
    expected: Expected,
    max_ratio: float,
    findings: Findings,
) -> None:
    """Add findings about the step of one parameter."""
    sums = behavior.sums
    memberships = watch.groups[name]
    may_rest = expected.kind == "still"
    if len(memberships) > 1:
        findings.add("in-two-groups", "more than one group of the optimizer has it", name)
    if sums.bad_weights:
        findings.add("nonfinite-weight", "the weight is infinite or NaN after the step", name)
        return
    if not memberships:
        if not may_rest:
            what = "no group of the optimizer has this parameter"
            findings.add("not-in-optimizer", what, name)
        elif sums.moved:
            what = "the weight changed in the block, but no group of the optimizer has it"
            findings.add("moved-outside-step", what, name)
        return
    if name in watch.moved_early or (sums.moved and not any(watch.steps)):
        what = "the weight changed in the block, but not in optimizer.step()"
        findings.add("moved-outside-step", what, name)
        return
    if _was_skipped(watch, name):
        return
    if sums.moved:
        _about_kind(name, behavior, expected, findings)
        _about_size(name, behavior, expected, max_ratio, findings)
    elif not may_rest:
        findings.add(*_why_still(watch, name, sums))


def _was_skipped(watch: StepWatch, name: str) -> bool:
    """Return whether all optimizers of a parameter made no step, or skipped their steps."""
    return all([watch.steps[i] == watch.skipped[i] for i, _ in watch.groups[name]])


def _about_kind(name: str, behavior: Behavior, expected: Expected, findings: Findings) -> None:
    """Add findings about the kind of the step of a parameter that moved."""
    sums = behavior.sums
    if not sums.gradients:
        what = "the weight moved, but it has no gradient"
        if behavior.kind.name == "decay":
            what += "; the step is along the weight, as weight decay is"
        findings.add("moved-without-gradient", what, name)
    elif behavior.kind.name == "decay" and expected.kind != "decay" and sums.gradient_square:
        what = "the gradient is not zero, but the step is along the weight: only weight decay"
        findings.add("decay-only", what, name)
    elif expected.kind == "still":
        what = "expected the kind 'still', but the weight moved"
        findings.add("unexpected-kind", what, name)
    elif expected.kind is not None and behavior.kind.name == UNJUDGED:
        findings.note(f"expected the kind {expected.kind!r}, {behavior.kind}", name)
    elif expected.kind == "orthogonal" and behavior.kind.may_be_orthogonal:
        findings.note("expected the kind 'orthogonal', but the singular values are unclear", name)
    elif expected.kind not in (None, behavior.kind.name):
        found = behavior.kind.name
        what = f"expected the kind {expected.kind!r}, found {found!r}: {KINDS[found]}"
        findings.add("unexpected-kind", what, name)


def _about_size(
    name: str, behavior: Behavior, expected: Expected, max_ratio: float, findings: Findings
) -> None:
    """Add findings about the size of the step of a parameter that moved."""
    ratio = behavior.sums.ratio
    if expected.rms is not None:
        size = behavior.size
        if abs(size - expected.rms) > expected.tolerance * expected.rms:
            what = "expected a step of size {}, but its size is {}: {} times as large"
            times = size / expected.rms if expected.rms else math.inf
            findings.add("unexpected-size", what, name, expected.rms, size, times)
    if ratio is not None and ratio > max_ratio:
        what = f"the step is {{}} times as large as the weight; max_ratio is {max_ratio:g}"
        findings.add("large-step", what, name, ratio)


def _why_still(watch: StepWatch, name: str, sums: StepSums) -> tuple[str, str, str]:
    """Return the finding about a parameter that did not move: code, text and name."""
    lr = watch.rates[name].lr
    if not sums.gradients:
        return "no-gradient", "there is no gradient, and the weight did not move", name
    if sums.bad_gradients:
        what = "the gradient is infinite or NaN, and the weight did not move"
        return "nonfinite-gradient", what, name
    if not sums.gradient_square:
        return "zero-gradient", "the gradient is zero, and the weight did not move", name
    if lr == 0:
        what = "the weight did not move, because the learning rate of its group is 0"
        return "unmoved", what, name
    if _is_lost(watch, name, sums):
        dtype = str(watch.params[name].dtype).removeprefix("torch.")
        what = f"the update at lr={lr:g} is below half a ULP of all weights in {dtype}"
        return "rounding", what, name
    what = "the gradient is not zero, but the weight did not move"
    if _state_tensors(watch, name) and not watch.states[name]:
        what += "; its state is new, and some optimizers only fill their state in the first step"
    return "unmoved", what, name


def _is_lost(watch: StepWatch, name: str, sums: StepSums) -> bool:
    """Return whether rounding explains that a parameter with a gradient did not move.

    The update is not known, so the function estimates its size. If the optimizer has an average of
    squared gradients, as Adam does, the elements of the update are about as large as `lr`.
    Otherwise, the update is about as large as `lr * gradient`.
    """
    if sums.moved_by_gradient:
        return False
    averages = _state_tensors(watch, name)
    is_half = watch.params[name].dtype in (torch.bfloat16, torch.float16)
    is_plain = not averages or (len(averages) == 1 and is_half)
    return is_plain or not sums.moved_by_lr


# ---------------------------------------------------------------------- state


def _state_tensors(watch: StepWatch, name: str) -> dict[str, Tensor]:
    """Return the state tensors of a parameter on this rank, without counters and empty shards."""
    p = watch.params[name]
    tensors: dict[str, Tensor] = {}
    for optimizer in watch.optimizers:
        tensors.update(dict(tensors_in(optimizer.state.get(p, {}))))
    filled = {key: t for key, t in tensors.items() if local(t).numel()}
    if p.numel() == 1:
        return {key: t for key, t in filled.items() if key != "step"}
    return {key: t for key, t in filled.items() if t.numel() > 1}


def _state_changes(watch: StepWatch, name: str) -> dict[str, bool]:
    """Return, for each state tensor of a parameter, whether it changed. New zeros did not."""
    changes = {}
    for key, t in _state_tensors(watch, name).items():
        before = watch.states[name].get(key)
        if before is None:
            changes[key] = bool((local(t) != 0).any())
        else:
            changes[key] = fingerprint(t) != before
    return changes


def _bad_states(watch: StepWatch, name: str) -> list[str]:
    """Return the state tensors of a parameter that are infinite or NaN on this rank."""
    return [key for key, t in _state_tensors(watch, name).items() if not _is_finite(t)]


def _in_words(changes: Mapping[str, bool], sums: StepSums) -> str:
    """Describe the change of the state of a parameter."""
    unchanged = [key for key, changed in changes.items() if not changed]
    if not changes:  # the state may be on other ranks only
        return "changed" if sums.state_changes else "none"
    if not unchanged:
        return "changed"
    if len(unchanged) > STATES_SHOWN:
        return f"unchanged: {len(unchanged)} of {len(changes)}"
    return f"unchanged: {', '.join([key.rpartition('/')[2] for key in unchanged])}"


def _about_state(watch: StepWatch, name: str, behavior: Behavior, findings: Findings) -> None:
    """Add findings about the state of one parameter."""
    sums = behavior.sums
    tensors = _state_tensors(watch, name)
    if sums.bad_states:
        where = ", ".join(_bad_states(watch, name)) or "in a shard on another rank"
        findings.add("nonfinite-state", f"the state is infinite or NaN: {where}", name)
    if name in watch.state_changed and name not in watch.moved_early:
        what = "the state changed in the block before optimizer.step()"
        findings.add("state-outside-step", what, name)
    has_gradient = sums.gradient_square and not sums.bad_gradients
    if sums.bad_states or not tensors or not has_gradient:
        return
    if not sums.state_changes and not _was_skipped(watch, name):
        keys = ", ".join(tensors)
        findings.add("state-unchanged", f"the optimizer did not change its state: {keys}", name)
