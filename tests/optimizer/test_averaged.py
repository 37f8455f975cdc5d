"""Weights for evaluation in the memory of the parameters: `averaged`, `eval` and `train`."""

from __future__ import annotations

import copy
import io
import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.helpers import close, network, same
from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    Clipper,
    Lookahead,
    Masked,
    Modular,
    ScheduleFree,
    Transform,
    WeightAverage,
    WeightDecay,
    WeightEMA,
    fresh_batch_norm,
    release,
)
from torchzero_clip.optimizer import averages

LINKS = [WeightEMA(0.5), WeightAverage(), Lookahead(2), ScheduleFree()]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
each_link = pytest.mark.parametrize("link", LINKS, ids=lambda link: type(link).__name__)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
two_dtypes = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)],
    ids=lambda dtype: str(dtype)[6:],
)
INPUTS = torch.linspace(-1, 1, 64).view(-1, 4)


def trained(
    *links: Transform, dtype: torch.dtype = torch.float32, steps: int = 5
) -> tuple[nn.Module, Modular]:
    """A small network after some steps, and its optimizer."""
    model = network().to(dtype)
    opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(0.1), *links)
    train(model, opt, steps)
    return model, opt


def train(model: nn.Module, opt: Any, steps: int = 3) -> None:
    for _ in range(steps):
        opt.zero_grad()
        x = INPUTS.to(next(model.parameters()).dtype)
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# ---------------------------------------------------------------------- averaged()


@each_dtype
@each_link
def test_the_training_weights_come_back_bit_for_bit_in_their_memory(link, dtype):
    model, opt = trained(link, dtype=dtype)
    before, where = weights(model), [p.data_ptr() for p in model.parameters()]
    state = copy.deepcopy(opt.state_dict())
    with opt.averaged():
        assert [p.data_ptr() for p in model.parameters()] == where
        assert any(not a.equal(b) for a, b in zip(weights(model), before, strict=True))
    same(weights(model), before)
    assert [p.data_ptr() for p in model.parameters()] == where
    for index, held in opt.state_dict()["state"].items():
        same(dict(held), state["state"][index])


@each_link
def test_whatever_is_raised_inside_the_training_weights_come_back(link):
    model, opt = trained(link)
    before = weights(model)
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), opt.averaged():
            raise error
        same(weights(model), before)
    train(model, opt)  # and training goes on


@each_link
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_at_any_copy_leaves_the_training_weights(link, late, monkeypatch):
    """Each copy, there and back, is interrupted once: before it, or after it."""
    model, opt = trained(link)
    before, state = weights(model), copy.deepcopy(opt.state_dict()["state"])
    run, made, at = averages.Substitution._run, 0, 0

    def interrupted(substitution: averages.Substitution, count: int) -> None:
        nonlocal made
        for _ in range(count):
            made += 1
            if late and made == at:
                target, source = substitution._moves[-1]
                target.copy_(source)  # which is not noted as done
            if made == at:
                raise KeyboardInterrupt
            run(substitution, 1)

    monkeypatch.setattr(averages.Substitution, "_run", interrupted)
    past = False
    while not past:
        at, made = at + 1, 0
        try:
            with opt.averaged():
                pass
            past = True
        except KeyboardInterrupt:
            pass
        same(weights(model), before)
        for index, held in opt.state_dict()["state"].items():
            same(dict(held), state[index])
    assert at > 8


def test_an_average_in_the_dtype_of_its_parameter_takes_no_copy():
    """Weights and state change places: inside, the training weights lie in the state."""
    model, opt = trained(WeightEMA(0.5))
    p = next(model.parameters())
    before, ema = p.detach().clone(), opt.state[p]["WeightEMA/ema"].clone()
    with opt.averaged():
        assert p.equal(ema)
        assert opt.state[p]["WeightEMA/ema"].equal(before)
    assert opt.state[p]["WeightEMA/ema"].equal(ema)


@each_link
def test_averages_in_averages_steps_and_checkpoints_inside_are_sentences(link):
    model, opt = trained(link)
    saved = opt.state_dict()
    with opt.averaged():
        for what, call in {
            "averaged": lambda: opt.averaged().__enter__(),
            "step": opt.step,
            "state_dict": opt.state_dict,
            "load_state_dict": lambda: opt.load_state_dict(saved),
            "averaged_state_dict": lambda: opt.averaged_state_dict(model),
            "eval": opt.eval,
            "train": opt.train,
            "a copy": lambda: copy.deepcopy(opt),
            "init_state()": opt.init_state,
        }.items():
            with pytest.raises(
                RuntimeError, match=rf"^{what}.* is not allowed in the with block of averaged\(\)"
            ):
                call()
    train(model, opt)
    opt.load_state_dict(opt.state_dict())


def test_a_chain_without_such_a_link_says_so_and_its_modes_do_nothing():
    model, opt = trained()
    before = weights(model)
    opt.eval()
    train(model, opt, 0)
    opt.train()
    same(weights(model), before)
    for call in (lambda: opt.averaged().__enter__(), lambda: opt.averaged_state_dict(model)):
        with pytest.raises(ValueError, match="this chain has no averaged weights:"):
            call()


def test_a_clipper_makes_no_step_that_could_be_averaged():
    with pytest.raises(
        ValueError,
        match=r"Clipper: WeightEMA\(\) cannot be used in Clipper, because a different optimizer",
    ):
        Clipper(network().parameters(), WeightEMA())


def test_the_last_link_gives_the_weights_unless_another_is_named():
    model, opt = trained(Lookahead(2), WeightEMA(0.5))
    p = next(model.parameters())
    for name, key in {None: "WeightEMA/ema", "Lookahead": "Lookahead/slow"}.items():
        wanted = opt.state[p][key].clone()
        with opt.averaged(name):
            assert p.equal(wanted)
        assert opt.averaged_state_dict(model, name)["0.weight"].equal(wanted)
    with pytest.raises(
        ValueError, match=r"name= must be None or one of \['Lookahead', 'WeightEMA'\]"
    ):
        opt.averaged("EMA").__enter__()


def test_parameters_without_an_average_stay_what_they_are():
    model = network()
    some = Masked(WeightEMA(0.5), lambda name, p: p.dim() > 1)
    opt = Modular(model.parameters(), Adam(), LR(0.1), some)
    with opt.averaged():  # before the first step all are
        pass
    train(model, opt)
    before = weights(model)
    with opt.averaged():
        moved = [not a.equal(b) for a, b in zip(weights(model), before, strict=True)]
    assert moved == [p.dim() > 1 for p in model.parameters()]


def test_state_made_early_gives_the_weights_themselves():
    model = network()
    for link in LINKS:
        opt = Modular(model.parameters(), LR(0.1), link)
        opt.init_state()
        before = weights(model)
        with opt.averaged():
            same(weights(model), before)


def test_complex_parameters_have_averages():
    for link in LINKS:
        p = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        opt = Modular([p], LR(0.1), link)
        for _ in range(3):
            p.grad = torch.tensor([1j, -1 + 0j])
            opt.step()
        before = p.detach().clone()
        with opt.averaged():
            assert p.isfinite().all()
            assert not p.equal(before)
        assert p.equal(before)


def test_what_autograd_has_saved_before_is_known_to_be_gone():
    model, opt = trained(WeightEMA(0.5))
    loss = model(INPUTS).sum()
    with opt.averaged(), torch.inference_mode():
        model(INPUTS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_can_be_taken_at_the_weights_for_evaluation():
    model, opt = trained(WeightEMA(0.5))
    with opt.averaged():
        loss = model(INPUTS).sum()
        assert loss.requires_grad
        loss.backward()


def test_small_state_leaves_what_is_averaged_in_float32():
    model = network()
    with pytest.warns(UserWarning, match=r"state in bfloat16 \(.*Adam"):
        opt = Modular(model.parameters(), Adam(), LR(0.1), WeightEMA(0.5), state_dtype="bfloat16")
    train(model, opt)
    held = opt.state[next(model.parameters())]
    assert held["Adam/exp_avg"].dtype == torch.bfloat16
    assert held["WeightEMA/ema"].dtype == torch.float32


# ---------------------------------------------------------------------- averaged_state_dict


@each_link
def test_the_averaged_state_dict_is_what_averaged_shows(link):
    model = nn.Sequential(network(), nn.BatchNorm1d(1))
    opt = Modular(model.parameters(), Adam(), LR(0.1), link)
    train(model, opt)
    before = weights(model)
    found = opt.averaged_state_dict(model)
    same(weights(model), before)
    with opt.averaged():
        same(dict(found), dict(model.state_dict()))
    other = nn.Sequential(network(), nn.BatchNorm1d(1))
    other.load_state_dict(found)
    train(model, opt)  # it has memory of its own
    same(dict(other.state_dict())["0.0.weight"], found["0.0.weight"])
    assert not any(t.requires_grad for t in found.values())


def test_tied_weights_are_averaged_under_both_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    opt = Modular(model.parameters(), LR(0.1), WeightEMA(0.5))
    train(model, opt)
    found = opt.averaged_state_dict(model)
    assert found["0.weight"].equal(found["1.weight"])
    assert not found["0.weight"].equal(model[0].weight)


def test_the_state_dict_of_another_model_is_refused():
    _, opt = trained(WeightEMA())
    with pytest.raises(ValueError, match="model must be the model that this optimizer trains"):
        opt.averaged_state_dict(network())


# ---------------------------------------------------------------------- eval() and train()


@two_dtypes
@each_link
def test_a_loop_may_ask_the_optimizer_for_its_mode(link, dtype):
    model, opt = trained(link, dtype=dtype)
    plain, other = trained(link, dtype=dtype)
    for _ in range(3):
        opt.train()
        train(model, opt)
        train(plain, other)
        opt.eval()
        opt.eval()
        same(weights(model), list(other.averaged_state_dict(plain).values()))
        for what in ("step", "averaged", "averaged_state_dict"):
            call = partial(getattr(opt, what), *[model] * (what == "averaged_state_dict"))
            with pytest.raises(
                RuntimeError, match=rf"^{what}\(\) is not allowed between eval\(\) and train\(\)"
            ):
                (opt.averaged().__enter__ if what == "averaged" else call)()
    opt.train()
    opt.train()
    same(weights(model), weights(plain))
    for index, held in opt.state_dict()["state"].items():
        same(dict(held), dict(other.state_dict()["state"][index]))


@two_dtypes
@each_link
def test_a_checkpoint_of_an_evaluation_goes_on_as_training_would_have(link, dtype):
    model, opt = trained(link, dtype=dtype)
    opt.eval()
    memory = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, memory)
    opt.train()
    train(model, opt)
    memory.seek(0)
    saved = torch.load(memory, weights_only=True)
    resumed, other = trained(link, dtype=dtype, steps=0)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    with pytest.raises(
        RuntimeError, match=r"step\(\) is not allowed between eval\(\) and train\(\)"
    ):
        other.step()
    other.train()
    train(resumed, other)
    same(weights(resumed), weights(model))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("link", [WeightEMA(0.5), ScheduleFree()])
def test_a_distributed_checkpoint_of_an_evaluation_never_trains_averaged_weights(
    link, evaluates, tmp_path
):
    model, opt = trained(link)
    opt.eval()
    saved = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    opt.train()
    train(model, opt)

    resumed, other = trained(link, steps=0)
    other.init_state()
    if evaluates:
        other.eval()
    held = {"model": get_model_state_dict(resumed), "opt": get_optimizer_state_dict(resumed, other)}
    dcp.load(held, checkpoint_id=tmp_path, no_dist=True)  # only values whose keys exist
    set_model_state_dict(resumed, held["model"])
    set_optimizer_state_dict(resumed, other, held["opt"])
    with pytest.raises(RuntimeError, match="call train"):
        other.step()
    if isinstance(link, ScheduleFree) and not evaluates:
        with pytest.raises(
            RuntimeError, match=r"no training weights .* call init_state\(\) and ev"
        ):
            other.train()
        return
    other.train()
    train(resumed, other)
    same(weights(resumed), weights(model))


@each_link
def test_a_checkpoint_of_training_takes_an_optimizer_out_of_its_evaluation(link):
    model, opt = trained(link)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    opt.eval()
    model.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    train(model, opt)
    plain, _ = trained(link, steps=8)
    same(weights(model), weights(plain))


def test_a_copy_of_an_optimizer_in_evaluation_is_in_evaluation():
    model, opt = trained(ScheduleFree())
    opt.eval()
    other_model, other = copy.deepcopy((model, opt))
    other.train()
    opt.train()
    same(weights(model), weights(other_model))


@pytest.mark.parametrize("link", [WeightEMA(0.5), ScheduleFree()])
def test_training_weights_survive_a_conversion_of_the_model_during_an_evaluation(link):
    model, opt = trained(link, dtype=torch.bfloat16)
    other, opt_of_other = trained(link)
    before = {name: p.detach().float() for name, p in model.named_parameters()}
    opt.eval()
    other.load_state_dict(model.state_dict())
    opt_of_other.load_state_dict(opt.state_dict())
    opt_of_other.train()
    same(dict(other.named_parameters()), before)
    model.float()
    opt.train()
    same(dict(model.named_parameters()), before)


def test_weights_that_were_swapped_in_another_dtype_are_not_lost():
    model, opt = trained(WeightEMA(0.5))
    before = copy.deepcopy(dict(model.named_parameters()))
    opt.eval()
    model.bfloat16()
    text = "convert the model back, call train(), and then convert it again"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        opt.train()
    model.float()
    opt.train()
    same(dict(model.named_parameters()), before)


def test_an_interrupted_evaluation_leaves_the_training_weights(monkeypatch):
    model, opt = trained(ScheduleFree(), Chain(WeightEMA(0.5), name="inside"))
    before, run = weights(model), averages.Substitution._run
    left = 2

    def interrupted(substitution: averages.Substitution, count: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        run(substitution, count)

    monkeypatch.setattr(averages.Substitution, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opt.eval()
    same(weights(model), before)
    train(model, opt)


# ---------------------------------------------------------------------- other ways of a step


@each_link
def test_released_gradients_give_the_same_averages(link):
    plain, opt = trained(link)
    model = network()
    released = release(model, ClipNorm(1.0), Adam(), LR(0.1), link)
    train(model, released, 5)
    same(weights(model), weights(plain))
    same(*[dict(o.averaged_state_dict(m)) for o, m in ((opt, plain), (released, model))])
    with (
        released.averaged(),
        pytest.raises(
            RuntimeError, match=r"a step is not allowed in the with block of averaged\(\)"
        ),
    ):
        model(INPUTS).sum().backward()
    released.zero_grad()
    train(model, released)
    train(plain, opt)
    same(weights(model), weights(plain))


@pytest.mark.parametrize(
    "link",
    [
        pytest.param(
            link, marks=() if isinstance(link, (ScheduleFree, WeightEMA)) else pytest.mark.slow
        )
        for link in LINKS
    ],
    ids=lambda link: type(link).__name__,
)
def test_the_compiled_engine_repeats_it_before_and_after_an_evaluation(link):
    model = network()
    opt = Modular(model.parameters(), ClipNorm(1.0), Adam(), LR(0.1), link, compile=True)
    train(model, opt, 6)
    assert opt.engine.replays.count > 0, opt.engine.replays.why
    plain, other = trained(link, steps=6)
    close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
    with opt.averaged():
        pass
    opt.eval()
    opt.train()
    count = opt.engine.replays.count
    train(model, opt)
    assert opt.engine.replays.count > count
    train(plain, other)
    close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)


def passes(*links: Transform) -> dict[str, list[str]]:
    """For each line of the compiled plan the bytes a number that are read and written, and how."""
    chain = ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.1), LR(0.1), *links
    lines = Modular(network().parameters(), *chain, compile=True).explain().splitlines()
    rows = [re.fullmatch(r"(.+?) {2,}(\S+) +(\S+)(?: {3}(.*))?", line) for line in lines]
    found = [row.groups() for row in rows if row is not None and row[2][0].isdigit()]
    return {label: [read, written, how] for label, read, written, how in found}


@each_link
def test_compiled_it_joins_the_last_pass_and_takes_eight_bytes_a_number(link):
    """One tensor is read and written: nothing else is, and no kernel is started for it."""
    plain, averaging = passes(), passes(link)
    assert averaging.pop(type(link).__name__)[:2] == ["0", "0"]
    before, after = [[float(x) for x in found.pop("total")[:2]] for found in (plain, averaging)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [4.0, 4.0]
    assert averaging.keys() == plain.keys()
    end, longer = plain.pop("the end"), averaging.pop("the end")
    assert [float(b) - float(a) for a, b in zip(end[:2], longer[:2], strict=True)] == [4.0, 4.0]
    assert averaging == plain


def test_the_plan_names_the_weights_for_evaluation():
    _, opt = trained(WeightEMA(0.5))
    line = "averaged() uses the averaged weights of WeightEMA."
    assert line in opt.explain().splitlines()
    _, opt = trained(Lookahead(2), WeightEMA(0.5))
    assert f"{line} averaged('Lookahead') use the other averages." in opt.explain().splitlines()
    assert "averaged weights:" not in trained()[1].explain()


# ---------------------------------------------------------------------- batch norm


def test_batch_norm_has_the_statistics_of_the_weights_for_evaluation_while_it_lasts():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    opt = Modular(model.parameters(), Adam(), LR(0.1), WeightEMA(0.5))
    train(model, opt)
    before = copy.deepcopy(dict(model.named_buffers()))
    loader = [INPUTS, INPUTS + 1]
    with opt.averaged(), fresh_batch_norm(model, loader):
        with torch.no_grad():
            wanted = torch.stack([model[0](x).mean(0) for x in loader]).mean(0)
        close(model[1].running_mean, wanted)
        assert model.training
    same(dict(model.named_buffers()), before)
    with pytest.raises(ValueError, match="broken"), fresh_batch_norm(model, loader):
        raise ValueError("broken")
    same(dict(model.named_buffers()), before)
