"""`explain` tells what a step does with memory, by watching one."""

import re

import pytest
import torch

from tests.modules.rows.row import with_lr
from tests.table import sampled
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    Guard,
    Masked,
    Modular,
    Momentum,
    Normalize,
    NormRule,
    Reset,
    TensorwiseTransform,
    Transform,
    ZClip,
)


def plan(*chain, model=None, **kwargs):
    model = model or torch.nn.Linear(300, 400)
    return Modular(model.named_parameters(), *chain, **kwargs).explain()


def bytes_of(text, label="total"):
    reads, writes = re.search(rf"^{label} +([\d.]+) +([\d.]+)", text, re.M).groups()
    return float(reads), float(writes)


def test_the_headline_chain_scales_in_front_of_the_fused_optimizer_and_keeps_nothing():
    """One pass for the norm, and one that scales a few gradients at a time for the kernel."""
    text = plan(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))
    assert bytes_of(text) == (4 + 4 + 16, 4 + 12)
    assert bytes_of(text, "Adam") == bytes_of(text, "LR") == (0, 0)
    assert text.endswith("in addition to the state: none.")
    assert "_fused_adamw_" in text.split("the end")[1]


def test_compiled_it_passes_twice_and_keeps_none():
    text = plan(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3), compile=True)
    assert bytes_of(text) == (4 + 16, 12)
    assert "in addition to the state: none." in text


class Ranked(NormRule):
    """‖u‖ ≤ the sum of all norms up to its own"""

    pure = True

    def limit(self, norm, state, group):
        return norm.sort().values.cumsum(0)


class Doubled(NormRule):
    """‖u‖ ≤ 1 + 2 ‖u‖"""

    pure = True

    def limit(self, norm, state, group):
        return 1 + 2 * norm


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (Doubled, "A replayed step is 1 call of compiled code."),
        (
            Ranked,
            "A replayed step is 2 calls of compiled code. PyTorch runs the rest: "
            "aten.sort.default, aten.cumsum.default.",
        ),
    ],
)
def test_it_tells_what_stays_a_call_of_torch_once_steps_are_repeated(rule, sentence):
    params = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    opt, eager = [Modular(params, rule(), LR(0.1), compile=way) for way in (True, False)]
    assert "native" not in opt.explain()
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(20):
        opt.step()
    assert opt.explain().endswith("\n" + sentence)
    eager.step()
    assert "native" not in eager.explain()


def test_plain_formulas_take_more_and_say_so():
    fast = plan(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))
    plain = plan(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3), fused=False)
    assert sum(bytes_of(plain)) > 2 * sum(bytes_of(fast))
    assert "1 × the size of all parameters" in plain


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ([ClipNorm(1.0, target="grad"), Adam(), LR(1e-3)], (4 + 4 + 16, 4 + 12)),
        ([ClipNorm(1.0, dim="global"), LR(0.1)], (4 + 8, 4)),
        ([ClipValue(0.1), Momentum(0.9), LR(0.1)], (4 + 12, 4 + 8)),
        ([Normalize(1.0), LR(0.1)], (4 + 4 + 8, 4 + 4)),
        ([LR(0.1)], (8, 4)),
        ([LR(torch.tensor(0.1))], (8, 4)),
    ],
    ids=lambda x: x[0].__class__.__name__ if isinstance(x, list) else "",
)
def test_the_bytes_of_a_chain(chain, expected):
    assert bytes_of(plan(*chain)) == expected


@pytest.mark.parametrize(
    ("chain", "multiplies"),
    [
        ([ClipNorm(1.0, dim="global"), Adam(), LR(1e-3)], True),
        ([ClipNorm(1.0, dim="global"), Momentum(0.9, nesterov=True), LR(1e-3)], True),
        ([ClipNorm(1.0, dim="global"), Momentum(0.9), LR(1e-3)], False),
        ([ClipNorm(1.0, dim="global", target="grad"), Adam(), LR(1e-3)], False),
        ([ClipNorm(1.0, dim="global"), LR(1e-3)], False),
    ],
)
def test_it_says_whether_gradients_are_multiplied_before_the_fused_call(chain, multiplies):
    text = plan(*chain)
    before = "The gradients are multiplied by the factor of ClipNorm just before this call reads"
    assert (before in text) == multiplies
    assert ("The factor of ClipNorm is applied in the same pass." in text) != multiplies
    assert ("_foreach_mul," in text) == multiplies


def test_an_update_that_a_rule_reads_is_written_once():
    text = plan(ZClip(), Adam(), ClipNormGrowth(), LR(1e-3))
    assert "a buffer" in text
    assert "new memory" not in text
    assert "\nLR runs in the same pass over memory as the subtraction of the update." in text


def test_it_counts_the_parameters_and_changes_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2).bfloat16())
    opt = Modular(model.named_parameters(), ClipNorm(1.0), Adam(), LR(1e-3))
    seed = torch.random.get_rng_state()
    before = [p.detach().clone() for p in model.parameters()]
    text = opt.explain()
    assert "2 parameters, 16 elements in float32 on cpu" in text
    assert "2 parameters, 10 elements in bfloat16 on cpu" in text
    assert torch.equal(seed, torch.random.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert not opt.state_dict()["state"]


def test_masks_see_the_names():
    chain = Masked(ClipNorm(1.0), lambda name, p: name == "bias")
    reads = bytes_of(plan(chain, LR(1e-3)), "Masked")[0]
    assert reads == pytest.approx(4, rel=0.05)  # one of two is measured, and scaled


@sampled(one_in=4)
def test_every_module_has_a_plan(case):
    model = torch.nn.Sequential(torch.nn.Linear(30, 40, bias=not case.matrices))
    reads, writes = bytes_of(plan(*with_lr(case.make(), 1e-3), model=model))
    assert reads >= 0
    assert writes >= 0


@pytest.mark.parametrize("engine", [{"fused": False}, {}, {"compile": True}])
def test_a_rule_that_needs_the_loss_of_each_step_is_explained(engine):
    class ByLoss(Transform):
        reads = ("loss",)

        def update(self, u, state, group):
            return u.mul(group["loss"])

    opt = Modular([torch.nn.Parameter(torch.ones(3))], ByLoss(), LR(0.1), **engine)
    assert "ByLoss" in opt.explain()


def test_a_guard_whose_flag_the_cpu_reads_is_named_as_the_reason_against_replays():
    w = torch.nn.Parameter(torch.ones(3))
    opt = Modular([w], Guard(), Reset(Momentum(), every=100), LR(0.1), compile=True)
    lines = opt.explain().splitlines()
    w.grad = torch.ones(3)
    for _ in range(4):
        opt.step()
    assert opt.explain().splitlines() == lines
    assert lines[-2] == "Steps are not recorded and replayed, for these reasons:"
    assert lines[-1].startswith("- the CPU reads in each step whether a guard skips the step: ")
    opt = Modular([w], Guard(), Momentum(), LR(0.1), compile=True)
    assert opt.explain().splitlines()[-1] == "Steps of this chain can be recorded and replayed."


def test_an_error_on_the_copies_says_that_its_shapes_are_shapes_of_copies():
    class Narrow(TensorwiseTransform):
        def update_tensor(self, u, state, group):
            if u.shape[1] > 3:
                raise ValueError(f"at most three columns, got {tuple(u.shape)}")
            return u

    with pytest.raises(RuntimeError, match=r"shapes of the copies\. ValueError: at most three"):
        plan(Narrow(), LR(0.1), model=torch.nn.Linear(3, 4, bias=False))
