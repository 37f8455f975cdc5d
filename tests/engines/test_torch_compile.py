"""Every chain is one graph that is compiled once, whatever its live numbers do."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from tests.helpers import (
    Named,
    chain_of,
    close,
    gradients,
    parameters,
    prepared,
    set_grads,
    since_2_12,
)
from tests.table import GOOD, Case, over
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    Modular,
    Momentum,
    Normalize,
    Orthogonalize,
    TensorList,
    WeightDecay,
)
from torchzero_clip.core.torch_private import traced

TRACED = [case for case in GOOD if case.traces]
# One construction a class and, for two rules about norms, one for each way that units are made.
UNITS = {ClipNorm: ("global", "layer", "rows"), ClipNormGrowth: ("global", "layer")}
HEADLINES = [
    case for case in TRACED if case.label in (next(iter(case.good)), *UNITS.get(case.cls, ()))
]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    """Compiled code of another test is no help and no burden."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def as_tensors(opt: Modular) -> list[Tensor]:
    """Turn every live number of an optimizer into a 0-dim tensor; returns these."""
    made: list[Tensor] = []

    def turned(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(turned(v) for v in value)
        if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
            return value
        made.append(torch.tensor(value) if not isinstance(value, Tensor) else value.clone())
        return made[-1]

    for group in opt.param_groups:
        for key in opt.keys.defaults.keys() - AT_A_BOUND:
            group[key] = turned(group[key])
    return made


AT_A_BOUND = {"d"}  # Adafactor's, which may not become smaller


def change(values: list[Tensor]) -> None:
    """Give every live number another value."""
    for value in values:
        value.add_(1) if value.dtype == torch.int64 else value.mul_(0.97)


FEW = ("embed.weight", "embed.bias", "conv.weight", "head.scale")


def model(case: Case) -> tuple[Named, Modular, list[Tensor]]:
    params = {name: p for name, p in parameters(case.shapes).items() if name in FEW}
    lr = [] if any("lr" in tfm.live for tfm in case.make().walk()) else [LR(0.1)]
    opt = Modular(params.items(), case.make(), *lr)
    return params, opt, as_tensors(opt)


def check(case: Case, backend: str) -> None:
    """Eager and compiled steps agree, and one graph served all of them."""
    torch._dynamo.reset()
    eager, eager_opt, eager_values = model(case)
    traced, opt, values = model(case)
    assert values  # lr at least, or nothing would change
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(chain_of(opt), fullgraph=True, backend=counter)
    for i in range(5 if case.graphs == 1 else 10):
        change(values)
        change(eager_values)
        set_grads(eager, gradients(case.shapes, i, scale=i + 1))
        eager_opt.step()
        set_grads(traced, gradients(case.shapes, i, scale=i + 1))
        with torch.no_grad():
            run(prepared(opt))
        tolerance = 1e-6 if case.exact else 2e-2
        close(traced, eager, rtol=tolerance, atol=tolerance)
    assert 1 <= counter.frame_count <= case.graphs


@since_2_12
@over(HEADLINES[::26])
def test_a_chain_is_one_graph_compiled_once_and_equal_to_eager(case):
    check(case, "eager")


@since_2_12
def test_what_a_step_does_by_its_number_is_traced_while_numbers_are_symbols():
    """torch makes a symbol of a number that has changed: from the third step on."""
    check(next(case for case in TRACED if str(case) == "When-odd"), "eager")


@since_2_12
@pytest.mark.parametrize("name", ["Partition-names", "SoftClip-ord std", "Watch-tensor"])
def test_patterns_of_names_standard_deviations_and_watched_momenta_are_traced(name):
    check(next(case for case in TRACED if str(case) == name), "eager")


@pytest.mark.slow
# torch says so of a cache from whose function it gets the same: a choice by a name
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@over(TRACED)
def test_every_construction_is_one_graph_compiled_once_and_equal_to_eager(case):
    check(case, "aot_eager")


def test_every_row_is_traced_or_says_that_it_is_not():
    assert {case.cls for case in HEADLINES} == {case.cls for case in TRACED}


CHAINS = {
    "global clip and AdamW": lambda: [
        ClipNorm(1.0, dim="global"),
        Adam(),
        WeightDecay(0.01),
        LR(torch.tensor(0.1)),
    ],
    "growth and momentum": lambda: [ClipNormGrowth(), Momentum(), LR(torch.tensor(0.1))],
    "rows, normalised": lambda: [Normalize(dim=-1), LR(torch.tensor(0.1))],
    "muon": lambda: [Momentum(0.95, nesterov=True), Orthogonalize(), LR(torch.tensor(0.02))],
}


@since_2_12
@pytest.mark.parametrize(
    "name",
    [
        "global clip and AdamW",
        *[pytest.param(x, marks=pytest.mark.slow) for x in CHAINS if "AdamW" not in x],
    ],
)
def test_a_compiled_step_follows_a_scheduler_without_compiling_again(name):
    shapes = {"a.weight": (4, 3), "b.weight": (2, 4)}
    models = [parameters(shapes), parameters(shapes)]
    opts = [Modular(m.items(), *CHAINS[name]()) for m in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) for opt in opts]
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(opts[1].step, backend=counter)
    compiled = []
    for i in range(6):
        for m, scheduler, go in zip(models, schedulers, (opts[0].step, step), strict=True):
            set_grads(m, gradients(shapes, i, scale=i + 1))
            go()
            scheduler.step()
        close(models[1], models[0], rtol=2e-2 if name == "muon" else 1e-5, atol=1e-6)
        compiled.append(counter.frame_count)
    assert float(opts[1].param_groups[0]["lr"]) == pytest.approx(
        float(CHAINS[name]()[-1].lr) * 0.9**6
    )
    assert compiled[0] >= 1
    assert compiled[1:] == compiled[1:2] * 5  # the first step makes state, the second may recompile


def test_tracing_leaves_the_transforms_and_their_optimizer_as_they_were():
    shapes = {"a.weight": (4, 3), "b.bias": (4,)}
    params = parameters(shapes)
    opt = Modular(params.items(), ClipNorm(1.0, dim="global"), Adam(), LR(torch.tensor(0.1)))
    before = repr(opt.chain)
    step = torch.compile(opt.step, backend="aot_eager")
    set_grads(params, gradients(shapes))
    step()
    assert repr(opt.chain) == before
    other = copy.deepcopy(opt)
    theirs = dict(zip(params, other.param_groups[0]["params"], strict=True))
    for m, o in ((params, opt), (theirs, other)):
        set_grads(m, gradients(shapes, seed=1))
        o.step()
    close(theirs, params, rtol=0, atol=0)


def test_an_optimizer_can_be_made_inside_of_a_compiled_function():
    weight = torch.nn.Parameter(torch.ones(4))

    @torch.compile(backend="eager")
    def one_step(weight):
        opt = Modular([weight], ClipNorm(1.0), LR(0.5))
        weight.grad = torch.ones(4)
        opt.step()
        return opt

    opt = one_step(weight)
    opt.step()
    assert weight.tolist() == [0.5] * 4
    assert opt.process_group is None


OLDER = """
import torch
vars(torch).pop("_foreach_clone", None)
from torch._dynamo.testing import CompileCounter
from torchzero_clip import LR, Adam, ClipNorm, Modular
params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
opt, counter = Modular(params, ClipNorm(1.0), Adam(), LR(0.1)), CompileCounter()
step = torch.compile(opt.step, backend=counter)
for _ in range(2):
    for p in params:
        p.grad = torch.ones(3)
    step()
print(counter.op_count, round(params[1][0].item(), 5))
"""


def test_a_function_of_the_step_is_called_untraced_by_a_torch_that_cannot_trace_it(monkeypatch):
    monkeypatch.delattr(torch, "_foreach_clone", raising=False)
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    opt, counter = Modular(params, ClipNorm(1.0), Adam(), LR(0.1)), CompileCounter()
    untraced = traced(opt.step)

    def train():  # torch.compile traces what it is given
        untraced()

    step = torch.compile(train, backend=counter)
    for _ in range(2):
        set_grads(dict(enumerate(params)), {i: torch.ones(3) for i in range(2)})
        step()
    assert (counter.op_count, round(params[1][0].item(), 5)) == (0, 0.8)


@pytest.mark.slow
def test_a_torch_that_cannot_trace_a_step_runs_it_as_it_is():
    run = subprocess.run([sys.executable, "-c", OLDER], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "0.8"]


def test_a_number_that_a_graph_does_not_know_is_an_operand_as_any_other():
    times = torch.compile(
        lambda x, n: TensorList([x], owned=True).mul_(n).tensors[0],
        backend="eager",
        fullgraph=True,
        dynamic=True,
    )
    assert [times(torch.ones(2), n).tolist() for n in (3, 5)] == [[3.0, 3.0], [5.0, 5.0]]
