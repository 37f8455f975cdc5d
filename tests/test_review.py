"""What a careful reader found: one test for each defect that the tables did not show."""

import copy
import math

import pytest
import torch
from torch.nn import Parameter

from torchzero_clip import (
    EMA,
    LR,
    Accumulate,
    AdaGC,
    Adam,
    AdaptiveClip,
    Cautious,
    Chain,
    ClipNorm,
    ClipNormGrowth,
    Clipper,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    Freeze,
    Guard,
    Identity,
    Lambda,
    Modular,
    Momentum,
    Partition,
    Quantile,
    Scale,
    Standardize,
    Transform,
    Warmup,
    WeightDecay,
    ZStat,
    attach,
)


def param(*values, dtype=torch.float32, grad=None):
    p = Parameter(torch.tensor(values, dtype=dtype))
    if grad is not None:
        p.grad = torch.tensor(grad, dtype=dtype)
    return p


@pytest.mark.parametrize(
    "chain",
    [
        lambda: (Adam(), Scale(0.0, target="grad"), Cautious(), LR(0.1)),
        lambda: (LR(0.1), ClipValue(0.1, target="grad"), Cautious()),
    ],
)
def test_a_deferred_update_is_made_of_the_gradient_that_its_link_saw(chain):
    out = []
    for fused in (True, False):
        p = param(1.0, 1.0, grad=[1.0, 2.0])
        opt = Modular([p], *chain(), fused=fused)
        opt.step()
        out.append((p.data, list(opt.state[p].values()) if opt.state else []))
    torch.testing.assert_close(out[0], out[1])


@pytest.mark.parametrize("rule", [Adam, lambda: Warmup(1000), lambda: EMA(0.5, debias=True)])
def test_counters_are_float32_whatever_the_default_dtype(rule):
    torch.set_default_dtype(torch.bfloat16)
    try:
        p = param(0.0)
        opt = Modular([p], rule(), LR(0.0))
        for _ in range(300):
            p.grad = torch.ones(1, dtype=torch.float32)
            opt.step()
    finally:
        torch.set_default_dtype(torch.float32)
    (steps,) = [value for key, value in opt.state[p].items() if key.endswith("/step")]
    assert steps.item() == 300


def test_a_grad_link_writes_every_tensor_that_came_back_new():
    vector, matrix = param(1.0, grad=[1.0]), Parameter(torch.ones(2, 2))
    matrix.grad = torch.ones(2, 2)
    zero = Lambda(lambda u: u if u.dim() < 2 else u * 0, target="grad")
    Modular([vector, matrix], zero, LR(1.0)).step()
    assert matrix.grad.eq(0).all()
    assert matrix.eq(1).all()
    assert vector.item() == 0


def test_a_layer_keeps_its_state_when_its_first_parameter_joins_late():
    layer = torch.nn.Linear(1, 1)
    opt = Modular(layer.named_parameters(), ClipNormGrowth(dim="layer"), LR(0.0))
    for _ in range(3):
        layer.bias.grad = torch.ones(1)
        opt.step()
    layer.weight.grad = torch.full((1, 1), 100.0)
    opt.step()
    assert opt.metrics()["ClipNormGrowth/limit"].item() == 1.5


def test_a_link_that_reads_the_update_does_not_meet_the_parameters():
    p = param(-math.inf, 1.0, 1.0, grad=[0.0, 1.0, 1.0])
    Modular([p], Adam(), ClipRMS(1.0), LR(0.1)).step()
    assert p.tolist() == pytest.approx([-math.inf, 0.9, 0.9])


@pytest.mark.parametrize("after", [Momentum(0.9), Scale(2.0)])
def test_a_clipper_never_hands_out_its_own_memory_as_a_gradient(after):
    p, q = param(0.0), param(0.0)
    clipper = Clipper([p, q], Accumulate(2), after)
    p.grad, q.grad = torch.ones(1), torch.ones(1)
    clipper.step()
    p.grad, q.grad = None, torch.ones(1)
    clipper.step()
    own = [value for state in clipper.state.values() for value in state.values()]
    own += [t for room in clipper._rooms.values() for t in room.values()]
    assert p.grad.item() in (0.5, 1.0)
    assert p.grad.data_ptr() not in [
        value.data_ptr() for value in own if isinstance(value, torch.Tensor)
    ]


def test_a_group_removed_from_the_optimizer_is_no_longer_measured():
    a, b = param(0.0, grad=[1.0]), param(0.0, grad=[1.0])
    opt = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=0.0)
    handle = attach(opt, ClipNorm(1.0, dim="global"))
    opt.param_groups.pop(0)
    opt.step()
    assert len(handle.param_groups) == 1
    assert handle.metrics()["ClipNorm/norm"].item() == 1
    assert b.grad.item() == 1


def test_a_handle_knows_groups_added_before_its_checkpoint_is_loaded():
    def attached():
        a, b = param(0.0, grad=[1.0]), param(0.0, grad=[1.0])
        opt = torch.optim.SGD([a], lr=0.0)
        handle = attach(opt, AdaGC())
        opt.add_param_group({"params": [b]})
        return opt, handle

    opt, handle = attached()
    opt.step()
    other, fresh = attached()
    fresh.load_state_dict(handle.state_dict())
    assert len(fresh.param_groups) == len(fresh.state) == 2
    assert other.param_groups[1]["params"] == fresh.param_groups[1]["params"]


def test_a_handle_is_not_copied():
    handle = attach(torch.optim.SGD([param(0.0)], lr=0.0), ClipNorm(1.0))
    with pytest.raises(TypeError, match="belongs to its optimizer"):
        copy.deepcopy(handle)


@pytest.mark.parametrize(
    "rule",
    [
        ClipNormGrowth,
        AdaGC,
        lambda: AdaptiveClip(Quantile(0.9, 4), dim=None),
        lambda: AdaptiveClip(Quantile(0.9, 4), dim="layer"),
    ],
)
@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_models_with_double_parameters_load_their_own_checkpoint(rule, first):
    params = [param(0.0, dtype=d, grad=[1.0]) for d in (first, torch.float64)]
    named = [("a.w", params[0]), ("a.b", params[1])]
    opt = Modular(named, rule(), LR(0.1))
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(copy.deepcopy(saved))
    for p, held in zip(params, saved["state"].values(), strict=True):
        for key, value in held.items():
            assert opt.state[p][key].dtype == value.dtype
            assert torch.equal(opt.state[p][key].nan_to_num(), value.nan_to_num())


GRAD = ClipNorm(1.0, target="grad")


@pytest.mark.parametrize(
    "chain",
    [
        lambda: (AdaptiveClip(ZStat(), target="grad"), GRAD),
        lambda: (ClipValueByEMA(ema_tfm=Scale(2.0), target="grad"), GRAD),
        lambda: (Guard(), GRAD),
        lambda: (Identity(), Freeze(lambda n, p: False), Accumulate(2), GRAD),
        lambda: (Partition({"a": ClipNorm(1.0), "b": GRAD}, lambda n, p: "a"),),
        lambda: (Adam(), GRAD, Cautious()),
    ],
)
def test_grad_links_that_do_something_are_accepted(chain):
    assert Modular([param(0.0)], *chain())


@pytest.mark.parametrize(
    "chain",
    [
        lambda: (Adam(), AdaptiveClip(ZStat(), target="grad")),
        lambda: (Adam(), ClipValueByEMA(ema_tfm=Scale(2.0), target="grad")),
        lambda: (Partition({"a": ClipNorm(1.0)}, lambda n, p: "a"), GRAD),
        lambda: (Chain(Chain(Adam(), name="inner"), GRAD),),
    ],
)
def test_grad_links_that_nothing_sees_are_refused(chain):
    with pytest.raises(ValueError, match="would change nothing"):
        Modular([param(0.0)], *chain())


def test_scalars_beside_vectors_keep_their_dtype_without_kept_memory():
    params = [param(1.0, 2.0, grad=[1.0, 1.0]), Parameter(torch.tensor(1.0))]
    params[1].grad = torch.tensor(1.0)
    opt = Modular(params, Warmup(3), EMA(0.5), LR(1.0), fused=False)
    opt._room = None  # as on an accelerator
    opt.step()
    assert params[1].item() == pytest.approx(1 - 1 / 6)


def test_early_state_is_not_made_for_frozen_parameters():
    model = torch.nn.Linear(2, 1)
    frozen = Freeze(lambda name, p: name == "bias")
    opt = Modular(model.named_parameters(), frozen, Adam(), LR(0.1))
    opt.init_state()
    assert "Adam/exp_avg" in opt.state[model.weight]
    assert not opt.state.get(model.bias)


def test_a_class_of_a_user_does_not_change_what_the_rules_name():
    known = Transform.registry["ClipNorm"]

    class ClipNorm(Transform):
        pass

    assert Transform.registry["ClipNorm"] is known
    assert AdaptiveClip(ZStat()).warmup.max_norm == 1.0


def test_half_precision_rounds_once_with_lr_and_decay():
    for fused in (True, False):
        p = param(1.0, dtype=torch.bfloat16, grad=[0.0015])
        Modular([p], LR(1.0), WeightDecay(0.001), fused=fused).step()
        assert p.item() == 0.99609375


def test_the_default_device_does_not_matter():
    p = param(3.0, 4.0, grad=[3.0, 4.0])
    opt = Modular([p], ClipNorm(1.0, dim="global"), ClipNorm(1.0, "std"), Adam(), LR(0.1))
    with torch.device("meta"):
        opt.step()
    assert p.tolist() == pytest.approx([2.9, 3.9])


def test_a_double_tensor_is_standardized_by_its_own_precision():
    values = [1.0, 1.0 + 1e-8, 1.0 - 1e-8]
    alone, beside = (param(*values, dtype=torch.float64, grad=values) for _ in range(2))
    Modular([alone], Standardize(0.0), LR(1.0)).step()
    Modular([beside, param(1.0, 2.0, grad=[1.0, 2.0])], Standardize(0.0), LR(1.0)).step()
    assert torch.equal(alone, beside)
    assert not torch.equal(alone.detach(), torch.tensor(values, dtype=torch.float64))


def test_init_that_differs_between_parameters_is_a_sentence():
    class Factored(Transform):
        def init(self, param):
            return {"row": torch.zeros(1)} if param.dim() > 1 else {"all": torch.zeros(1)}

        def update(self, u, state, group):
            return u

    matrix = Parameter(torch.ones(2, 2))
    matrix.grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match="Factored: init must make the same names"):
        Modular([matrix, param(1.0, grad=[1.0])], Factored()).step()
