"""torch's schedulers do to a chain what they do to torch's optimizers."""

import pytest
import torch
from torch.optim import lr_scheduler

from tests.helpers import equal, one, saved
from tests.optimizer.chains import give_grads, parameters, train
from torchzero_clip import LR, Adam, Modular, Momentum


def cyclic(opt):
    return lr_scheduler.CyclicLR(opt, 0.01, 0.1, step_size_up=4)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 7], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": cyclic,
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=15),
    "OneCycleLR lists": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=15),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, 5),
}


def scheduled(opt, params, make, steps=12):
    scheduler = make(opt)
    rows = []
    for step in range(steps):
        give_grads(params, step)
        opt.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        rows.append([(float(g["lr"]), g["betas"]) for g in opt.param_groups])
    return rows, torch.cat([p.detach().flatten() for p in params])


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR of older torch, of itself
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_does_what_it_does_to_adam(name, tensor_lr):
    ours, theirs = parameters(torch.float64), parameters(torch.float64)

    def lr(value):
        return torch.tensor(value, dtype=torch.float64) if tensor_lr else value

    def split(params):
        return [{"params": params[:2]}, {"params": params[2:], "lr": lr(0.02)}]

    a = Modular(split(ours), Adam((0.8, 0.99)), LR(lr(0.05)))
    b = torch.optim.Adam(split(theirs), lr=lr(0.05), betas=(0.8, 0.99))
    rows, end = scheduled(a, ours, SCHEDULERS[name])
    expected_rows, expected_end = scheduled(b, theirs, SCHEDULERS[name])
    assert rows == expected_rows
    assert len({str(row) for row in rows}) > 1
    torch.testing.assert_close(end, expected_end, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_momentum_is_cycled_too(name):
    params, reference = parameters(), parameters()
    a = Modular(params, Momentum(0.9), LR(0.05))
    b = torch.optim.SGD(reference, lr=0.05, momentum=0.9)
    for opt, mine in ((a, params), (b, reference)):
        scheduler = SCHEDULERS[name](opt)
        for step in range(10):
            train(opt, mine, 1, step)
            scheduler.step()
    assert a.param_groups[0]["momentum"] == b.param_groups[0]["momentum"] != 0.9
    for p, q in zip(params, reference, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_keeps_the_keys_that_schedulers_add():
    params = parameters()
    opt = Modular(params, Adam(), LR(0.1))
    scheduler = SCHEDULERS["OneCycleLR"](opt)
    for step in range(3):
        train(opt, params, 1, step)
        scheduler.step()
    checkpoint = saved({"opt": opt.state_dict(), "scheduler": scheduler.state_dict()})
    twin = [p.detach().clone().requires_grad_() for p in params]
    other = Modular(twin, Adam(), LR(0.1))
    resumed = SCHEDULERS["OneCycleLR"](other)
    other.load_state_dict(checkpoint["opt"])
    resumed.load_state_dict(checkpoint["scheduler"])
    for step in range(3, 6):
        train(opt, params, 1, step), train(other, twin, 1, step)
        scheduler.step(), resumed.step()
    assert equal(params, twin)


def test_a_tensor_lr_may_be_filled_between_steps():
    p, lr = one(), torch.tensor(0.1)
    opt = Modular([p], LR(lr))
    opt.step()
    opt.param_groups[0]["lr"].fill_(0.5)
    opt.step()
    assert p.item() == pytest.approx(1 - 0.1 - 0.5)
