"""What `test_one_rank.py` starts on two ranks: rank 0 alone calls what programs call there.

An operator that talks to other ranks raises `Spoke` before it talks, so that nothing waits. Each
line that is printed names a setting, a call, and whether the call talks. At the end both ranks take
a step and a sum together, which agree only if rank 0 sent nothing before.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Clipper,
    ClipPercentile,
    Guard,
    InBasis,
    Masked,
    Modular,
    Orthogonalize,
    Recorder,
    Recover,
    SkipLarge,
    SkipSpike,
    SOAPBasis,
    Transform,
    WeightEMA,
    ZClip,
    attach,
    compat,
    release,
    take_over,
    to_floats,
)
from torchzero_clip.source import SourceError
from torchzero_clip.testing import check_pure

TALKS = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
Calls = dict[str, Callable[[], Any]]


class Spoke(Exception):
    """An operator was about to talk to other ranks."""


class Alone(TorchDispatchMode):
    """Raise for every operator that talks to other ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in TALKS:
            raise Spoke(str(func))
        return func(*args, **(kwargs or {}))


class ByLoss(Transform):
    """A rule that needs the loss of each step."""

    reads = ("loss",)
    pure = True

    def update(self, u: Any, state: Any, group: Any) -> Any:
        return u.mul(group["loss"])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def sharded() -> Any:
    model: Any = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def guards() -> list[Transform]:
    return [Guard(), Guard("raise"), SkipLarge(1e9), SkipSpike()]


def norms() -> list[Transform]:
    return [ClipNorm(1.0, dim="global"), ZClip(), ClipPercentile(99.0, dim="global")]


def backward(model: Any, opt: Any) -> None:
    model(torch.randn(5, 6)).square().mean().backward()
    if isinstance(opt, (Modular, Clipper)):
        opt.report(loss=1.0)


def steps(model: Any, opt: Any, count: int = 3) -> None:
    for _ in range(count):
        backward(model, opt)
        opt.step()
        opt.zero_grad()


def of_runner(opt: Any) -> Calls:
    """Return the public methods that a Modular and a Clipper share, but `step`."""
    group: Any = {"params": [nn.Parameter(torch.ones(2))]}
    group |= {"param_names": ["more"]} if "param_names" in opt.param_groups[0] else {}
    saved = opt.state_dict()
    return {
        "metrics": lambda: to_floats(opt.metrics()),
        "repr": lambda: repr(opt),
        "explain": lambda: opt.explain(parameters=True),
        "skipped": opt.skipped,
        "report": lambda: opt.report(loss=torch.tensor(1.0)),
        "state_dict": opt.state_dict,
        "load_state_dict": lambda: opt.load_state_dict(saved),
        "safe_to_save": opt.safe_to_save,
        "init_state": opt.init_state,
        "zero_grad": opt.zero_grad,
        "add_param_group": lambda: opt.add_param_group({**group}),
    }


def of_averages(opt: Any, model: Any) -> Calls:
    """Return the methods about averaged weights."""
    return {
        "averaged": lambda: entered(opt.averaged()),
        "averaged_state_dict": lambda: opt.averaged_state_dict(model),
        "eval": opt.eval,
        "train": opt.train,
    }


def of_modular(opt: Any, model: Any) -> Calls:
    """Return the public methods of a Modular, but `step`."""
    calls = {"to_source": lambda: source(opt), **of_averages(opt, model)}
    return calls | of_runner(opt)


def entered(context: Any) -> None:
    with context:
        pass


def source(opt: Any) -> None:
    with contextlib.suppress(SourceError):  # a chain that cannot be written is refused
        opt.to_source()


def exact(model: Any) -> Calls:
    half = model.to(torch.bfloat16)
    opt = Modular(half.parameters(), Guard(), Adam(), LR(1e-2), rounding="exact")
    for _ in range(2):
        for p in half.parameters():
            p.grad = torch.ones_like(p)
        opt.step()
    return {
        "exact_state_dict": lambda: opt.exact_state_dict(half),
        "load_exact": lambda: opt.load_exact(half, opt.exact_state_dict(half)),
    }


def plain(make: Callable[[], Any], **options: Any) -> Calls:
    """A chain with guards and global norms, over parameters that are whole or sharded."""
    model = make()
    links = *guards(), *norms(), ByLoss(), Adam(), LR(1e-2), WeightEMA(0.9)
    opt = Modular(model.named_parameters(), *links, **options)
    steps(model, opt)
    backward(model, opt)
    calls = of_modular(opt, model)
    if not options.get("process_group"):
        calls["deepcopy"] = lambda: copy.deepcopy(opt)
    recorder = Recorder(opt)
    calls |= {"Recorder.log": recorder.log, "Recorder.state_dict": recorder.state_dict}
    return calls


def matrices(make: Callable[[], Any], rule: Callable[[], Transform]) -> Calls:
    """Rules whose matrices have owners when they are sharded."""
    model = make()
    opt = Modular(model.named_parameters(), Guard(), rule(), LR(1e-2), WeightEMA(0.9))
    steps(model, opt)
    backward(model, opt)
    calls = of_modular(opt, model) | {"deepcopy": lambda: copy.deepcopy(opt)}
    return calls | {"take_over": lambda: take_over(opt, opt.state_dict())}


def clipper(make: Callable[[], Any]) -> Calls:
    model = make()
    opt = Clipper(model.named_parameters(), *guards(), *norms())
    steps(model, opt)
    backward(model, opt)
    return of_runner(opt)


def handle(make: Callable[[], Any]) -> Calls:
    model = make()
    opt = torch.optim.AdamW(model.parameters())
    made = attach(opt, *guards(), *norms(), after=WeightEMA(0.9), in_checkpoint=True)
    steps(model, opt)
    backward(model, opt)
    calls = of_averages(opt=made, model=model) | of_runner(made)
    del calls["add_param_group"]
    return calls | {"state_dict of the optimizer": opt.state_dict}


def released(make: Callable[[], Any]) -> Calls:
    model = make()
    opt = release(model, ClipNorm(1.0, dim="global"), Adam(), LR(1e-2), limit="last step")
    steps(model, opt)
    calls = without_averages(of_modular(opt, model))
    return {key: call for key, call in calls.items() if key not in ("report", "add_param_group")}


def without_averages(calls: Calls) -> Calls:
    return {key: call for key, call in calls.items() if "averaged" not in key}


def others(make: Callable[[], Any]) -> Calls:
    """What is called beside an optimizer."""
    model = make()
    opt = Modular(model.parameters(), Guard(), Adam(), LR(1e-2))
    recover = Recover(opt, model, every=10, check=5)
    other = Modular(model.parameters(), Guard(), Adam(), LR(1e-2))
    adamw = torch.optim.AdamW(model.parameters())
    steps(model, adamw)
    backward(model, adamw)
    grads = [p.grad for p in model.parameters()]
    return {
        "Recover": lambda: Recover(other, model),
        "Recover.step between looks": lambda: recover.step(1.0),
        "Recover.step at a look": lambda: [recover.step(1.0) for _ in range(5)],
        "take_over": lambda: take_over(opt, adamw.state_dict(), link="Adam"),
        "check_pure": lambda: check_pure(Guard(), ClipNorm(1.0, dim="global"), LR(1e-2)),
        "compat.clip_grad_value_": lambda: compat.clip_grad_value_(model.parameters(), 1.0),
        "compat.get_total_norm": lambda: compat.get_total_norm(grads),
        "compat.clip_grad_norm_": lambda: compat.clip_grad_norm_(model.parameters(), 1.0),
    }


def is_matrix(name: str, p: Any) -> bool:
    return p.dim() > 1


def muon() -> Transform:
    return Masked(Orthogonalize(), where=is_matrix)


def soap() -> Transform:
    return Masked(InBasis(SOAPBasis(), Adam()), where=is_matrix)


def settings() -> dict[str, Callable[[], Calls]]:
    found: dict[str, Callable[[], Calls]] = {}
    for name, make in (("whole", net), ("sharded", sharded)):
        found[name] = lambda make=make: plain(make)
        found[f"{name} compiled"] = lambda make=make: plain(make, compile=True)
        found[f"{name} muon"] = lambda make=make: matrices(make, muon)
        found[f"{name} soap"] = lambda make=make: matrices(make, soap)
        found[f"{name} clipper"] = lambda make=make: clipper(make)
        found[f"{name} attach"] = lambda make=make: handle(make)
        found[f"{name} release"] = lambda make=make: released(make)
        found[f"{name} exact"] = lambda make=make: exact(make())
        found[f"{name} others"] = lambda make=make: others(make)
    group = dist.group.WORLD
    found["stages"] = lambda: plain(net, process_group=group)
    found["stages compiled"] = lambda: plain(net, compile=True, process_group=group)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for setting, make in settings().items():
        for name, call in make().items():
            if dist.get_rank() == 0:
                talks = False
                try:
                    with Alone():
                        call()
                except Spoke:
                    talks = True
                print(f"{setting}|{name}|{'talks' if talks else 'silent'}")
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    assert total == 3.0
    model = net()
    opt = Modular(model.parameters(), Guard(), LR(0.1))
    steps(model, opt)
    print("together")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
