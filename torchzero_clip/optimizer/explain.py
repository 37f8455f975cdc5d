"""The method `explain()`: the text about a chain, with the bytes that each link reads and writes.

`explain()` counts the bytes in a step of a small model with the same chain.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchzero_clip.core.description import Description
from torchzero_clip.core.link import Link
from torchzero_clip.core.plurals import counted
from torchzero_clip.core.sharding.layout import layout_of
from torchzero_clip.core.sharding.owners import route
from torchzero_clip.core.tensor_kinds import is_inexact
from torchzero_clip.core.torch_private import (
    TorchDispatchMode,
    name_of_fused,
    schema,
    tree_leaves,
)
from torchzero_clip.core.transform import TensorwiseTransform, averages
from torchzero_clip.optimizer import branches
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.optimizer.chain_meaning import sentences
from torchzero_clip.optimizer.construction_warnings import remarks

if TYPE_CHECKING:
    from torchzero_clip.optimizer.chain_runner import ChainRunner

PARAMETER_SIZE = 2**13
"""The number of elements of each parameter of the small model."""
PARAMETERS_WATCHED = 64
"""The number of parameters of the small model."""
END = "the end"
KERNEL = "one compiled kernel"
MULTIPLY = ("_foreach_mul", "_foreach_div", "_foreach_div_")
"""Operators that apply the factor of a norm rule before a fused optimizer reads the gradients."""
FACTOR_IN_PASS = "The factor of {} is applied in the same pass."
FACTOR_BEFORE_CALL = (
    "The gradients are multiplied by the factor of {} just before this call reads them."
)
ONLY_WRITE = ("copy_", "zero_", "fill_")
"""Operators that write their first argument without reading it."""


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write in one part of a step.

    Args:
        label: The name in the plan for this part of the step.
        contents: For the address of each storage, a description of the content.
    """

    def __init__(self, label: str, contents: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.label = label
        self.contents = contents
        self.read = 0
        self.written = 0
        self.targets: set[str] = set()  # the words for what was written
        self.operators: set[str] = set()
        self.inside = False  # whether a pass runs that was counted as a whole

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        signature = schema(func)
        arguments = signature.arguments
        name = signature.name.removeprefix("aten::")
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        makes = all([r.alias_info is None for r in signature.returns])
        if self.inside or not (written or makes):  # a view moves nothing
            return result
        named = dict(zip([a.name for a in arguments], args, strict=False)) | kwargs
        if named.get("grad_scale") is None:  # fused kernels write gradients when they scale them
            written.discard("grads")
        for key, value in named.items():
            writes = key in written
            only_writes = writes and (key == "out" or name in ONLY_WRITE)
            self.count(name, value, reads=not only_writes, writes=writes)
        if makes:
            self.count(name, result, reads=False, writes=True)
        return result

    def count(self, name: str, value: Any, reads: bool, writes: bool) -> None:
        """Count the tensors that are as large as a parameter. Smaller tensors stay in the cache."""
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        for t in [t for t in tensors if t.numel() >= PARAMETER_SIZE // 2]:
            size = t.numel() * t.element_size()
            self.operators.add(name)
            if reads:
                self.read += size
            if writes:
                self.written += size
                address = t.untyped_storage().data_ptr()
                self.targets.add(self.contents.get(address, "new memory"))

    @contextmanager
    def whole(self, read: list[Tensor], written: list[Tensor]) -> Iterator[None]:
        """Count a whole pass over memory, and do not count the single operators in this context."""
        self.count(KERNEL, read, reads=True, writes=False)
        self.count(KERNEL, written, reads=False, writes=True)
        self.inside = True
        yield
        self.inside = False

    def row(self, width: int, numbers: int) -> str:
        """Return the line of the plan about this part, in bytes per element."""
        operators = ", ".join(sorted(self.operators))
        if self.written:
            how = f"writes {' and '.join(sorted(self.targets))}: {operators}"
        elif self.label == END:
            how = "nothing left to do"
        else:
            how = f"only reads: {operators}" if operators else "nothing yet: runs in a later row"
        read = self.read / numbers
        written = self.written / numbers
        return f"{self.label:{width}}  {read:5.3g}  {written:6.3g}   {how}"


def explain(optimizer: ChainRunner, make: Callable[..., Any], each: bool = False) -> str:
    """Return what `Modular.explain` returns.

    Args:
        optimizer: The optimizer.
        make: The class of the small optimizer whose step is measured.
        each: Whether to add a table of the parameters.
    """
    twin = _twin(optimizer, make)
    parts: list[Traffic] = []

    def watch(read: list[Tensor], written: list[Tensor]) -> AbstractContextManager[None]:
        return parts[-1].whole(read, written)

    twin.engine = optimizer.engine.twin(watch)
    params = params_of(twin)
    for _ in range(4):
        for p in params:
            p.grad = torch.full_like(p, 100.0)  # above the limits of clipping rules
        parts.clear()
        try:
            skip = _watch(twin, parts)
        except Exception as error:
            raise RuntimeError(
                "explain: the chain raised an error for copies of the parameters. In this error, "
                f"shapes are the shapes of the copies. {type(error).__name__}: {error}"
            ) from error
    numbers = sum(map(Tensor.numel, params))
    width = max([len(part.label) for part in parts])
    reads = sum([part.read for part in parts]) / numbers
    writes = sum([part.written for part in parts]) / numbers
    notes = [remark.message for remark in remarks(optimizer)]
    notes += [*sentences(optimizer), *branches.joint_norms(optimizer)]
    notes += branches.without_matrices(optimizer)
    if each:
        notes += branches.unchanged(optimizer)
    lines = [f"{note}." for note in notes]
    if notes:
        lines.append("")
    lines.append(repr(with_present_values(optimizer))[len("Chain(") : -1])
    for of_kind in (_parameters, _owners, _refreshes, _averages):
        lines += of_kind(optimizer)
    lines += _tails(optimizer, parts[-1].operators)
    lines += ["", f"{'':{width}}  reads  writes   bytes per element"]
    lines += [part.row(width, numbers) for part in parts]
    lines += [f"{'total':{width}}  {reads:5.3g}  {writes:6.3g}", ""]
    lasting = sum([t.numel() for t in twin.engine.lasting()])
    size = f"{lasting / numbers:.3g} × the size of {optimizer._memory_unit}" if lasting else "none"
    lines.append(f"Buffers kept between steps, in addition to the state: {size}.")
    against_replays: list[str] = []
    if skip and skip.why is None:
        lines.append("Skipping a step does not synchronize with the GPU.")
    elif skip:
        lines.append(f"Each step synchronizes to read whether it is skipped: {skip.why}.")
        against_replays.append(
            "the CPU reads in each step whether a guard skips the step: remove the guard if you "
            "need replayed steps"
        )
    lines += optimizer.engine.says(against_replays)
    if each:
        lines += ["", *branches.parameters(optimizer)]
    return "\n".join(lines)


def _watch(twin: Any, parts: list[Traffic]) -> Any:
    """Run a step, and return the skip flag of the step. Add the traffic of each link to `parts`.

    After each link, the skip flag is set to zero, so no guard skips the step.
    """
    contents = _contents(twin)
    links = twin.links

    def watched() -> Iterator[Link]:
        for link in links:
            parts.append(Traffic(link.path, contents))
            with parts[-1]:
                yield link
            if step.skip.flag is not None:
                step.skip.flag.zero_()
        parts.append(end.enter_context(Traffic(END, contents)))

    with torch.no_grad(), ExitStack() as end:
        step = twin._begin(loss=1.0)  # for links that need the loss of each step
        twin.links = watched()
        twin._through(step)
    twin.links = links
    return step.skip


def _twin(optimizer: ChainRunner, make: Callable[..., Any]) -> Any:
    """Return an optimizer with the same chain, over small parameters of the same kinds."""
    room = PARAMETERS_WATCHED
    groups: list[dict[str, Any]] = []
    links = optimizer.keys.links
    square = any([getattr(link.transform, "keeps_matrices", False) for link in links])
    flat = any([getattr(link.transform, "layout", None) is not None for link in links])
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"p{i}" for i in range(len(group["params"]))]
        params = list(zip(names, group["params"], strict=True))[: max(room, 1)]
        room -= len(params)
        live = {key: group[key] for link in links for key in link.keys.values()}
        small = [(name, _small(p, square, flat)) for name, p in params]
        groups.append({**live, "params": small})
    options = {name: getattr(optimizer, name) for name in ("fused", "rounding", "state_dtype")}
    # a Clipper has the defaults of these options, and accepts no other values
    options = {name: x for name, x in options.items() if x != optimizer._options[name]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer itself has warned
        twin = make(groups, *optimizer.chain, **options)
    for link in twin.keys.links:
        fields = type(link.transform).__dataclass_fields__
        if "layout" in fields:
            _replace_rule(link, {"layout": None})
        if link.is_guard and "max_consecutive" in fields:  # all gradients are bad here
            _replace_rule(link, {"max_consecutive": None})
    return twin


def _replace_rule(link: Link, values: dict[str, Any]) -> None:
    """Replace the rule of a link by a copy with other values."""
    link.transform = link.transform.with_values(values)
    link.acts = link.transform


def _small(p: Tensor, square: bool, flat: bool) -> Parameter:
    """Return a parameter with PARAMETER_SIZE elements and as many dimensions as `p`.

    If the work of a rule grows with the longer side, the parameter is nearly square. If a rule has
    a layout, stacks become matrices.
    """
    dims = 2 if flat and p.dim() == 3 else p.dim()
    shape = [PARAMETER_SIZE] * dims
    if dims > 1 and square:
        shape = [PARAMETER_SIZE // 128, 128, *[1] * (dims - 2)]
    elif dims > 1:
        shape = [len(p), max(2, PARAMETER_SIZE // max(len(p), 1)), *[1] * (dims - 2)]
    device = "cpu" if p.device.type == "meta" else p.device
    # a parameter of integers never moves, so any dtype will do
    dtype = p.dtype if is_inexact(p) else torch.float32
    return Parameter(torch.full(shape, 0.01, dtype=dtype, device=device))


def _contents(twin: Any) -> dict[int, str]:
    """Return, for the address of each storage, a description of its content."""
    params = params_of(twin)
    tensors: dict[str, list[Any]] = {
        "state": [value for p in params for value in twin.state[p].values()],
        "a buffer": twin.engine.lasting(),
        "the gradients": [p.grad for p in params],
        "the parameters": params,
    }
    pairs = [(t, words) for words, row in tensors.items() for t in row if isinstance(t, Tensor)]
    return {t.untyped_storage().data_ptr(): words for t, words in pairs}


@dataclasses.dataclass(frozen=True, repr=False)
class Shown:
    """The values of a hyperparameter that differ between parameter groups, as text."""

    text: str

    def __repr__(self) -> str:
        return self.text


def with_present_values(optimizer: ChainRunner) -> Any:
    """Return a copy of the chain with the hyperparameters of the parameter groups.

    Use only the `repr` of the copy, because values that differ between groups become text.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    return _copy(optimizer.chain, _by_transform(optimizer.links), groups)


def _by_transform(links: Iterable[Link]) -> dict[int, list[Link]]:
    """Return the links of each transform. One object may be used for several links."""
    known: dict[int, list[Link]] = {}
    for link in links:
        known.setdefault(id(link.transform), []).append(link)
    return known


def _copy(value: Any, links: dict[int, list[Link]], groups: Sequence[Mapping[str, Any]]) -> Any:
    """Return a copy of a value. Rules inside the value have the hyperparameters of the groups.

    Args:
        value: The value of an argument.
        links: The links of each rule inside the value. The function removes a link after its copy.
        groups: The parameter groups.
    """
    if type(value) in (tuple, list):
        return type(value)([_copy(x, links, groups) for x in value])
    if type(value) is dict:
        return {key: _copy(x, links, groups) for key, x in value.items()}
    if not isinstance(value, Description):
        return value
    link = links[id(value)].pop(0) if links.get(id(value)) else None
    inside = links if link is None else _by_transform(link.children)  # only chains have no link
    other = copy.copy(value)
    for field in dataclasses.fields(value):
        vars(other)[field.name] = _copy(getattr(value, field.name), inside, groups)
    for name, key in link.keys.items() if link is not None and groups else ():
        present = groups[0][key]
        if branches.differs(groups, key):
            present = Shown(branches.several([group[key] for group in groups]))
        vars(other)[name] = present
    return other


def _parameters(optimizer: ChainRunner) -> list[str]:
    """Return a line for each dtype and device of the parameters."""
    sizes: dict[str, list[int]] = {}
    for p in params_of(optimizer):
        kind = f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}"
        sizes.setdefault(kind, []).append(p.numel())
    return [
        f"{counted(len(n), 'parameter')}, {counted(sum(n), 'element')} in {kind}"
        for kind, n in sizes.items()
    ]


def _averages(optimizer: ChainRunner) -> Iterator[str]:
    """Yield a line about averaged weights if the chain has averaged weights."""
    paths = [link.path for link in optimizer.keys.links if averages(link.transform)]
    if paths:
        others = [f"averaged({path!r})" for path in paths[:-1]]
        more = f" {' and '.join(others)} use the other averages." if others else ""
        yield f"averaged() uses the averaged weights of {paths[-1]}.{more}"


def _tails(optimizer: ChainRunner, operators: set[str]) -> Iterator[str]:
    """Yield a line for each tail: the links at the end that run together.

    Args:
        optimizer: The optimizer.
        operators: The operators that ran at the end of a step.
    """
    if not optimizer.engine.fuses:
        return
    tails = list(optimizer._plan.tails.values())
    live = optimizer.keys.defaults
    devices = {p.device.type for p in params_of(optimizer)}
    for tail in tails:
        larger = [other for other in tails if len(other.links) > len(tail.links)]
        if any([other.links[-len(tail.links) :] == tail.links for other in larger]):
            continue
        names = [link.path for link in tail.links]
        verb = "run" if len(names) > 1 else "runs"
        does = "in the same pass over memory as the subtraction of the update"
        factor = FACTOR_IN_PASS
        if tail.rule is not None:
            kernel = tail.rule.transform.fused(tail.rule.values(live))
            if devices.isdisjoint(kernel.devices):
                continue
            does = f"as one call of {name_of_fused(kernel.function)}"
            if not operators.isdisjoint(MULTIPLY):
                factor = FACTOR_BEFORE_CALL
        line = f"{' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))} {verb} {does}."
        if tail.factor is not None:
            line += f" {factor.format(tail.factor.path)}"
        yield line


def _owners(optimizer: ChainRunner) -> Iterator[str]:
    """Yield a line for each link with sharded matrices: they have owners, or are gathered."""
    layouts = [layout_of(p) for p in params_of(optimizer) if p.dim() > 1]
    ranks = [len(route(layout)[1]) for layout in layouts if layout is not None and layout.split]
    parts = []
    if owned := [n for n in ranks if n]:
        among = " or ".join([counted(n, "rank") for n in sorted(set(owned))])
        parts.append(f"{_sharded(len(owned))} with an owner among {among}")
    if gathered := ranks.count(0):
        why = "because their ranks share no process group"
        parts.append(f"{_sharded(gathered)} gathered on every rank, {why}")
    for link in optimizer.keys.links:
        operations = getattr(type(link.transform), "operations", TensorwiseTransform.operations)
        keeps = getattr(link.transform, "keeps_matrices", False)
        if parts and (keeps or operations is not TensorwiseTransform.operations):
            yield f"{link.path}: {'; '.join(parts)}"


def _sharded(count: int) -> str:
    return counted(count, "sharded matrix", "sharded matrices")


def _refreshes(optimizer: ChainRunner) -> Iterator[str]:
    """Yield a line for each link that refreshes its state only in some steps."""
    for link in optimizer.keys.links:
        if getattr(link.transform, "refreshes", False):
            when = link.transform.rhythm
            if getattr(link.transform, "stagger", False) and when != "in every step":
                when += ", at different steps for different matrices"
            yield f"{link.path}: each matrix is refreshed {when}, in a separate computation"
