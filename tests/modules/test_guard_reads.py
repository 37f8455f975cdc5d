"""Guards leave their flag on the device: nobody waits for it, and a skipped step is none."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import SHAPES, Named, gradients, parameters, same, set_grads
from tests.modules.contract.common import NoCopyToHost
from torchzero_clip import (
    LR,
    Accumulate,
    Adagrad,
    Adam,
    ClipNorm,
    Group,
    Guard,
    Lion,
    Modular,
    Momentum,
    Noise,
    RMSprop,
    SkipLarge,
    SkipSpike,
    State,
    TensorList,
    Transform,
    Warmup,
    WeightDecay,
    When,
    ZClip,
    attach,
    to_floats,
)
from torchzero_clip.audit import fake_cuda
from torchzero_clip.audit.step_audit import trial

nan = math.nan
GUARDS: dict[str, Callable[[], Transform]] = {
    "Guard": Guard,
    "SkipLarge": lambda: SkipLarge(50.0),
    "SkipSpike": SkipSpike,
    "assert": lambda: Guard("assert"),
}
EVERY_GUARD = pytest.mark.parametrize("kind", GUARDS)
Links = Sequence[Transform]
FUSED: dict[str, Callable[[], Links]] = {  # a fused optimizer of torch is the end
    "clip and AdamW": lambda: [ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.1), LR(0.01)],
    "ZClip and momentum": lambda: [ZClip(), Momentum(), WeightDecay(0.1), LR(0.01)],
    "amsgrad": lambda: [Adam(amsgrad=True), LR(0.01)],
}
OTHERS: dict[str, Callable[[], Links]] = {  # eager, they are written by operators that do not look
    "Lion": lambda: [Lion(), LR(0.01)],
    "RMSprop": lambda: [ClipNorm(1.0), RMSprop(), LR(0.01)],
    "no state": lambda: [ClipNorm(1.0), LR(0.01)],
    "the gradients": lambda: [ClipNorm(1.0, target="grad"), ClipNorm(0.5, dim="global"), Adam()],
    "after Adam": lambda: [Adam(), ClipNorm(1.0), LR(0.01), Warmup(5)],
}
COUNTING: dict[str, Callable[[], Links]] = {  # Python does another thing in another step
    "When": lambda: [When(lambda step: step < 3, ClipNorm(0.1)), Adam(), LR(0.01)],
    "Accumulate": lambda: [Accumulate(2), Adam(), LR(0.01)],
    "Noise": lambda: [Noise(0.01), Adam(), LR(0.01)],
}


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def optimizer(params: Named, *links: Transform, way: str = "fused") -> Modular:
    options = {"fused": {}, "plain": {"fused": False}}.get(way, {"compile": True})
    opt = Modular(params.items(), *links, **options)
    if way == "recorded":
        opt.engine = opt.engine.twin()
    return opt


def reads(*links: Transform, way: str) -> int:
    """The reads of the fourth step; on CPU there are some without a guard, which cost nothing."""
    params = parameters()
    opt = optimizer(params, *links, way=way)
    for i in range(2):  # later ones may be replayed
        set_grads(params, gradients(seed=i))
        with Reads() as counter:
            opt.step()
    return counter.count


@cache
def reads_without(chain: str, way: str) -> int:
    return reads(*LONG[chain](), way=way)


def slow_unless(quick: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=() if quick else pytest.mark.slow)


LONG: dict[str, Callable[[], Links]] = {**FUSED, **OTHERS}
SKIPS = ["Guard", "SkipLarge", "SkipSpike"]
TURNS = [  # of a chain with one guard or another one is quick, and all of the first chain
    slow_unless(chain == "clip and AdamW" or i % 3 == j, chain, kind)
    for i, chain in enumerate(LONG)
    for j, kind in enumerate(SKIPS)
]


@pytest.mark.parametrize("kind", SKIPS)
@pytest.mark.parametrize("chain", FUSED)
def test_a_guard_adds_no_read(kind, chain):
    assert reads(GUARDS[kind](), *FUSED[chain](), way="fused") == reads_without(chain, "fused")


@pytest.mark.parametrize(("chain", "kind"), TURNS)
def test_compiled_it_adds_none_whatever_comes_after_it(chain, kind):
    links = GUARDS[kind](), *LONG[chain]()
    assert reads(*links, way="recorded") == reads_without(chain, "recorded")


@pytest.mark.parametrize("chain", [*OTHERS, *COUNTING])
def test_an_eager_chain_that_no_fused_optimizer_ends_reads_one_number(chain):
    links = (OTHERS | COUNTING)[chain]
    assert (
        reads(Guard(), SkipLarge(50.0), *links(), way="fused") == reads(*links(), way="fused") + 1
    )


@pytest.mark.parametrize("chain", COUNTING)
def test_a_link_that_counts_steps_costs_one_read_compiled_too(chain):
    links = COUNTING[chain]
    with_guard, without = reads(Guard(), *links(), way="recorded"), reads(*links(), way="recorded")
    assert with_guard == without + 1


def test_the_counter_sees_a_read():
    with Reads() as counter:
        torch.ones(1).item()
    assert counter.count == 1


@EVERY_GUARD
@pytest.mark.parametrize(  # the kernels that can be faked
    "chain", ["clip and AdamW", pytest.param("amsgrad", marks=pytest.mark.slow)]
)
def test_on_an_accelerator_nothing_is_read(kind, chain, monkeypatch):
    """A fake CUDA device has no values: reading one raises."""
    with fake_cuda(), NoCopyToHost():
        shapes = {name: (*shape, 2) for name, shape in SHAPES.items()}
        params = {n: Parameter(torch.empty(s, device="cuda")) for n, s in shapes.items()}
        opt = Modular(params.items(), GUARDS[kind](), *FUSED[chain]())
        for _ in range(3):
            set_grads(params, {name: torch.empty_like(p) for name, p in params.items()})
            if kind == "SkipSpike":
                opt.report(loss=torch.empty((), device="cuda"))
            opt.step()


class TimesLoss(Transform):
    """u ← loss · u"""

    reads = ("loss",)

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        return u.mul_(group["loss"])


@pytest.mark.parametrize("kind", [SkipSpike, TimesLoss])
def test_a_loss_that_is_a_number_is_not_copied_to_an_accelerator(kind):
    """Such a copy waits until the device has done all earlier work."""

    def make(params: Any) -> Callable[[], None]:
        opt = Modular(params, kind(), *FUSED["clip and AdamW"]())

        def step() -> None:
            opt.report(loss=1.5)
            opt.step()

        return step

    report = trial(make, [torch.empty(4, 3), torch.empty(5)])
    assert report.waits == [], str(report)
    assert report.ended == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@EVERY_GUARD
@pytest.mark.parametrize("compile", [False, True])
def test_a_cuda_device_is_never_waited_for(kind, compile):
    params = {n: Parameter(p.detach().cuda()) for n, p in parameters().items()}
    chain = FUSED["clip and AdamW"]()
    opt = Modular(params.items(), GUARDS[kind](), *chain, compile=compile)
    for i in range(4):
        set_grads(params, {name: g.cuda() for name, g in gradients(seed=i).items()})
        torch.cuda.set_sync_debug_mode("error" if i > 1 else "default")
        try:
            opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------- why it waits


@pytest.mark.parametrize(
    ("links", "options", "why"),
    [
        ([Adam(), LR(0.1)], {}, "Skipping a step does not synchronize with the GPU."),
        (
            [RMSprop(), LR(0.1)],
            {"compile": True},
            "Skipping a step does not synchronize with the GPU.",
        ),
        (
            [RMSprop(), LR(0.1)],
            {},
            "whether it is skipped: RMSprop/square_avg is written in place.",
        ),
        ([LR(0.1)], {}, "the chain does not end with one of PyTorch's fused optimizers."),
        ([ClipNorm(1.0, target="grad"), LR(1.0)], {}, "skipped: gradients are written in place."),
        (
            [Noise(0.1), LR(0.1)],
            {"compile": True},
            "skipped: Noise counts only steps that are not skipped.",
        ),
    ],
)
def test_explain_names_what_the_host_waits_for(links, options, why):
    guard = SkipLarge(1.0, max_consecutive=1)  # below the gradients that are watched
    text = Modular(torch.nn.Linear(300, 4).parameters(), guard, *links, **options).explain()
    assert f"{why}\n" in f"{text}\n"


@pytest.mark.parametrize("compile", [False, True])
def test_guards_and_the_clip_after_them_measure_the_gradients_once(compile):
    guards = Guard(), SkipLarge(50.0), SkipSpike()
    chain = *guards, ClipNorm(1.0, dim="global"), Adam(), LR(0.1)
    text = Modular(torch.nn.Linear(300, 512).parameters(), *chain, compile=compile).explain()
    assert re.findall(r"^(\w+) +(\d+)", text, re.M)[:4] == [
        ("Guard", "4"), ("SkipLarge", "0"), ("SkipSpike", "0"), ("ClipNorm", "0"),
    ]  # fmt: skip


def test_explain_says_nothing_of_a_chain_without_guards():
    assert "skip" not in Modular([Parameter(torch.ones(4))], Adam(), LR(0.1)).explain()


# ---------------------------------------------------------------------- a long run


def sequence(steps: int, share: float = 0.1, calm: int = 16) -> list[tuple[Tensor, float]]:
    """Gradients, and what spoils such a share of them each: NaN, and, later, a factor of 1e6."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(steps, generator=generator).tolist()
    spoils = [nan if x < share else 1e6 if x < 2 * share and i > calm else 1.0
              for i, x in enumerate(drawn)]  # fmt: skip
    return [(torch.randn(20, generator=generator), spoil) for spoil in spoils]


def follow(steps: Sequence[tuple[Tensor, float]], way: str, chain: Links) -> tuple[Tensor, Modular]:
    p = Parameter(torch.ones(20))
    opt = optimizer({"p": p}, *chain, way=way)
    for grad, spoil in steps:
        p.grad = grad * spoil
        opt.step()
    return p.detach(), opt


RECORDED = ("clip and AdamW", "ZClip and momentum", "the gradients")  # in quick tests
WAYS = [
    slow_unless(way != "native" and (way != "recorded" or chain in RECORDED), chain, way)
    for chain in LONG
    for way in ("fused", "plain", "recorded", "native")
]


def check(given: Sequence[tuple[Tensor, float]], chain: str, way: str, spike: Transform) -> None:
    """A run with bad steps behind guards, and one without both, leave the same.

    In C++ the second has its guards, too: a kernel that may skip is another one, whose sums and
    products the compiler may join otherwise.
    """
    good = [row for row in given if row[1] == 1]
    guards = [Guard(), spike]
    p, opt = follow(given, way, [*guards, *LONG[chain]()])
    expected, other = follow(good, way, [*(guards if way == "native" else ()), *LONG[chain]()])
    same(p, expected)
    mine, theirs = opt.state[opt.param_groups[0]["params"][0]], next(iter(other.state.values()), {})
    assert mine.keys() == theirs.keys()
    same(dict(mine), dict(theirs))
    held = opt.param_groups[0]["chain"]
    assert held["Guard/skipped"] > 0
    assert held["SkipSpike/skipped"] > 0
    assert held["Guard/skipped"] + held["SkipSpike/skipped"] == len(given) - len(good)


@pytest.mark.parametrize(("chain", "way"), WAYS)
def test_a_run_with_bad_steps_is_the_run_without_them(chain, way):
    check(sequence(48), chain, way, SkipSpike(window=12, least=8))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fused", "plain", "native"])
def test_ten_thousand_steps_of_which_two_in_a_hundred_are_bad(way):
    check(sequence(10_000, share=0.01, calm=64), "clip and AdamW", way, SkipSpike())


@pytest.mark.parametrize("way", ["fused", slow_unless(False, "plain"), "recorded"])
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_ended(way):
    chain = [
        Guard(max_consecutive=50),
        SkipSpike(window=8, least=4),
        *FUSED["ZClip and momentum"](),
    ]
    given, end = sequence(60), 40
    given[20], given[end - 1], given[end] = [(given[0][0], bad) for bad in (1e6, nan, 1e6)]
    whole, _ = follow(given, way, chain)
    first, opt = follow(given[:end], way, chain)
    memory = io.BytesIO()
    torch.save(opt.state_dict(), memory)
    memory.seek(0)
    p = Parameter(first.clone())
    other = optimizer({"p": p}, *chain, way=way)
    other.load_state_dict(torch.load(memory, weights_only=True))
    for grad, spoil in given[end:]:
        p.grad = grad * spoil
        other.step()
    same(p.detach(), whole)


@pytest.mark.parametrize(
    ("way", "rounding"),
    [
        ("fused", "kahan"),
        ("recorded", "stochastic"),
        slow_unless(False, "fused", "stochastic"),
        slow_unless(False, "recorded", "kahan"),
    ],
)
def test_roundings_of_half_precision_know_of_no_skipped_step(rounding, way):
    runs = []
    for given in (sequence(48), [row for row in sequence(48) if row[1] == 1]):
        p = Parameter(torch.ones(20, dtype=torch.bfloat16))
        guards = Guard(), SkipSpike(window=12, least=8)
        opt = Modular([p], *guards, Adam(), LR(1e-3), rounding=rounding,
                      compile=way != "fused")  # fmt: skip
        opt.engine = opt.engine.twin()
        for grad, spoil in given:
            p.grad = (grad * spoil).to(torch.bfloat16)
            opt.step()
        runs.append([p.detach(), *opt.state[p].values()])
    same(*runs)


GRAPHS: dict[str, Callable[[], Links]] = {
    **FUSED,
    "momentum": lambda: [Momentum(), LR(0.01)],
    "Adagrad": lambda: [Adagrad(), LR(0.1)],
}


@pytest.mark.parametrize("chain", [slow_unless(chain == "momentum", chain) for chain in GRAPHS])
def test_as_one_graph_of_torch_a_skipped_step_changes_nothing(chain):
    torch._dynamo.reset()  # which compiles one function so many times and no more
    shapes = {"layer.weight": (4, 3)}
    if chain != "momentum":
        shapes["layer.scale"] = ()
    params = parameters(shapes)
    chain = GRAPHS[chain]()
    opt = Modular(params.items(), Guard(max_consecutive=9), SkipLarge(50.0), *chain)
    opt.init_state()
    step = torch.compile(opt.step, fullgraph=True, backend="aot_eager")
    kept: list[Any] = []
    for spoil in (1.0, 1.0, nan, 1e6):
        set_grads(params, {n: g * spoil for n, g in gradients(shapes).items()})
        step()
        held = [t for state in opt.state.values() for t in state.values()]
        kept.append([t.detach().clone() for t in (*params.values(), *held)])
    assert not all(map(torch.equal, kept[0], kept[1]))
    same(kept[2], kept[1])
    same(kept[3], kept[1])
    assert opt.skipped()


# ---------------------------------------------------------------------- what is told


def test_metrics_and_skipped_tell_of_the_last_step():
    p = Parameter(torch.zeros(1))
    opt = Modular([p], Guard(), SkipLarge(5.0), LR(1.0))
    told = []
    for norm in (1.0, nan, 9.0, 9.0, 1.0):
        p.grad = torch.tensor([norm])
        opt.step()
        numbers = to_floats(opt.metrics())
        assert opt.skipped() == any([numbers[f"{name}/why"] for name in ("Guard", "SkipLarge")])
        told.append([numbers[f"{name}/{what}"] for name in ("Guard", "SkipLarge")
                     for what in ("skipped", "consecutive", "why")])  # fmt: skip
    assert told == [
        [0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 2],
        [1, 0, 0, 2, 2, 2],
        [1, 0, 0, 2, 0, 0],
    ]


def test_a_chain_without_guards_skips_nothing():
    p = Parameter(torch.zeros(1))
    opt = Modular([p], ClipNorm(1.0), LR(1.0))
    assert not opt.skipped()
    p.grad = torch.tensor([nan])
    opt.step()
    assert not opt.skipped()


@pytest.mark.parametrize("begin", range(1, 6))
@pytest.mark.parametrize("most", [1, 3, 4])
def test_a_row_that_is_too_long_raises_late_by_less_than_its_length(most, begin):
    """Also where the run has recovered by the time the host looks."""
    p = Parameter(torch.zeros(1))
    opt = Modular([p], Guard(max_consecutive=most), LR(1.0))
    raised = []
    for i in range(1, 2 * most + begin + 1):
        p.grad = torch.tensor([nan if begin <= i < begin + most else 1.0])
        with contextlib.suppress(RuntimeError):
            opt.step()
            continue
        raised.append(i)
    assert len(raised) == 1  # and then it begins anew
    assert begin + most - 1 <= raised[0] < begin + 2 * most - 1


def test_in_front_of_another_optimizer_a_guard_reads_at_once():
    p = Parameter(torch.zeros(2))
    opt = torch.optim.SGD([p], lr=1.0)
    handle = attach(opt, SkipSpike(window=3, least=2), ClipNorm(1.0))
    for norm in (1.0, 2.0, 1e6):
        p.grad = torch.tensor([norm, 0.0])
        opt.step()
        assert (p.grad is None) == handle.skipped() == (norm == 1e6)
