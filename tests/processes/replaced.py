"""What `test_replaced.py` starts on every rank: optimizers and models of which one is sharded.

Each line that is printed names a case, and whether its steps warned about replaced parameters.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Optimizer

from torchzero_clip import LR, Adam, ClipNorm, Modular, attach, groups, release


def net(width: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def chain() -> tuple[ClipNorm, Adam, LR]:
    return ClipNorm(1.0, dim="global"), Adam(), LR(1e-3)


def backward(model: nn.Module) -> None:
    model(torch.ones(4, 5)).square().mean().backward()


def attached(params: Iterable[nn.Parameter]) -> Optimizer:
    opt = SGD(params, lr=0.1)
    attach(opt, ClipNorm(1.0))
    return opt


def old_parameters(make: Callable[[nn.Module], Optimizer]) -> Callable[[], None]:
    """An optimizer of the parameters that the model had before it was sharded."""

    def run() -> None:
        model = net()
        opt = make(model)
        sharded(model)
        for _ in range(3):
            backward(model)
            opt.step()

    return run


def right_order() -> None:
    model = sharded(net())
    opt = Modular(groups(model), *chain())
    for _ in range(3):
        backward(model)
        opt.step()
        opt.zero_grad()
        opt.step()


def first_step_without_gradient() -> None:
    model = sharded(net())
    opt = Modular(model.parameters(), *chain())
    opt.step()
    backward(model)
    opt.step()


def released() -> None:
    """Its `step` finds no gradient in any step."""
    model = sharded(net())
    opt = release(model, Adam(), LR(1e-3))
    for _ in range(2):
        backward(model)
        opt.step()


def gathered() -> None:
    """After an evaluation, the root of a model has whole parameters."""
    model = sharded(net())
    opt = Modular(model.parameters(), *chain())
    with torch.no_grad():
        model(torch.ones(4, 5))
    opt.step()


def plain_generator() -> None:
    """Only the discriminator is sharded, and the generator skips steps."""
    critic = sharded(net())
    generator = net(width=9)
    opt = Modular(generator.parameters(), *chain())
    opt.step()
    backward(critic)
    opt.step()


def frozen() -> None:
    model = net().requires_grad_(False)
    opt = Modular(model.parameters(), *chain())
    teacher = sharded(net())
    opt.step()
    del teacher


def nothing_sharded() -> None:
    Modular(net().parameters(), *chain()).step()


CASES: dict[str, Callable[[], None]] = {
    "groups": old_parameters(lambda model: Modular(groups(model), *chain())),
    "parameters": old_parameters(lambda model: Modular(model.parameters(), *chain())),
    "compiled": old_parameters(lambda model: Modular(groups(model), *chain(), compile=True)),
    "attached": old_parameters(lambda model: attached(model.parameters())),
    "right order": right_order,
    "first step without gradient": first_step_without_gradient,
    "released": released,
    "gathered": gathered,
    "plain generator": plain_generator,
    "frozen": frozen,
    "nothing sharded": nothing_sharded,
}


def main() -> None:
    dist.init_process_group("gloo")
    for name, run in CASES.items():
        gc.collect()  # the sharded model of the case before is in a cycle of references
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        messages = [str(warning.message) for warning in caught]
        warned = any(["fully_shard() replaces parameters" in message for message in messages])
        print(f"{name}: {'warns' if warned else 'silent'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
