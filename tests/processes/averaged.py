"""What `test_averaged.py` starts on every rank: weights for evaluation of models that are sharded.

torchrun --nproc-per-node 2 -m tests.processes.averaged fsdp tp
torchrun --nproc-per-node 2 -m tests.processes.averaged FOLDER save
torchrun --nproc-per-node 1 -m tests.processes.averaged FOLDER load
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    Lookahead,
    Modular,
    ScheduleFree,
    Transform,
    WeightAverage,
    WeightEMA,
    attach,
)
from torchzero_clip.core.sharding.layout import full, local

LINKS: dict[str, Callable[[], Transform]] = {
    "ema": lambda: WeightEMA(0.5),
    "mean": WeightAverage,
    "lookahead": lambda: Lookahead(2),
    "free": ScheduleFree,
}
EVALUATION = torch.linspace(-1, 1, 20).view(4, 5)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def line() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def fsdp() -> Any:
    model: Any = net()
    fully_shard(model[2], mesh=line())
    return fully_shard(model, mesh=line())


def tp() -> Any:
    return parallelize_module(net(), line(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def train(model: Any, opt: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        torch.manual_seed(step)
        model(torch.randn(8, 5)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def chain(model: nn.Module, link: str) -> Modular:
    links = ClipNorm(1.0, dim="global"), Adam(), LR(0.05), LINKS[link]()
    return Modular(model.named_parameters(), *links)


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: full(t) if isinstance(t, Tensor) else t for name, t in state.items()}


def near(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], 2e-6, 2e-6) for k in a)


def evaluated(model: Any) -> Tensor:
    """The model's outputs, after which FSDP2 holds what it has gathered of its root."""
    with torch.no_grad():
        return model(EVALUATION).clone()


def compared(make: Callable[[], Any]) -> list[str]:
    """Weights, those for evaluation and outputs are those of one process, in memory that stays."""
    wrong = []
    for link in LINKS:
        model, plain = make(), net()
        opt, other = chain(model, link), chain(plain, link)
        for half in range(2):
            train(model, opt, 3 * half, 3 * half + 3)
            train(plain, other, 3 * half, 3 * half + 3)
            parts = list(map(local, model.parameters()))
            before, where = [p.clone() for p in parts], [p.data_ptr() for p in parts]
            wanted = other.averaged_state_dict(plain)
            if not near(whole(opt.averaged_state_dict(model)), dict(wanted)):
                wrong.append(f"{link}: another averaged state dict")
            evaluated(model)
            with opt.averaged(model=model), other.averaged():
                if [local(p).data_ptr() for p in model.parameters()] != where:
                    wrong.append(f"{link}: other memory")
                if not near(whole(dict(model.named_parameters())), dict(wanted)):
                    wrong.append(f"{link}: other weights for evaluation")
                if not torch.allclose(evaluated(model), evaluated(plain), 1e-5, 1e-6):
                    wrong.append(f"{link}: other outputs")
            if not torch.allclose(evaluated(model), evaluated(plain), 1e-5, 1e-6):
                wrong.append(f"{link}: other outputs afterwards")
            with opt.averaged(model=model):
                pass
            if not all(map(torch.equal, map(local, model.parameters()), before)):
                wrong.append(f"{link}: other weights afterwards")
            evaluated(model)
            opt.eval(model=model)
            other.eval()
            if not near(whole(dict(model.named_parameters())), dict(wanted)):
                wrong.append(f"{link}: other weights in eval()")
            if not torch.allclose(evaluated(model), evaluated(plain), 1e-5, 1e-6):
                wrong.append(f"{link}: other outputs in eval()")
            opt.train(model=model)
            other.train()
            if not torch.allclose(evaluated(model), evaluated(plain), 1e-5, 1e-6):
                wrong.append(f"{link}: other outputs after train()")
            told = warnings_without_a_model(opt)
            wanted_calls = ["averaged()", "eval()", "train()"] if make is fsdp else []
            if [sentence.partition(":")[0] for sentence in told] != wanted_calls:
                wrong.append(f"{link}: other warnings, {told}")
            with opt.averaged(model=model):
                pass
            if not all(map(torch.equal, map(local, model.parameters()), before)):
                wrong.append(f"{link}: other weights after train()")
        if not near(whole(dict(model.named_parameters())), dict(plain.named_parameters())):
            wrong.append(f"{link}: training went another way")
    return wrong


def warnings_without_a_model(opt: Modular) -> list[str]:
    """What calls without model= warn of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with opt.averaged():
            pass
        opt.eval()
        opt.train()
    return [str(one.message) for one in told]


def behind() -> list[str]:
    """Behind an optimizer of torch, compiled and not."""
    models, found = (net(), fsdp(), fsdp()), []
    for model, compile in zip(models, (False, False, True), strict=True):
        opt = torch.optim.AdamW(model.parameters(), 0.05)
        handle = attach(opt, after=WeightEMA(0.5), compile=compile)
        train(model, opt, 0, 4)
        found.append(whole(handle.averaged_state_dict(model)))
    return [f"behind: another average, {i}" for i in (1, 2) if not near(found[0], found[i])]


FULL = StateDictOptions(full_state_dict=True)


def in_evaluation() -> list[str]:
    """A state dict of torch.distributed that was taken between eval() and train() goes on."""
    wrong = []
    for link in LINKS:
        model = fsdp()
        opt = chain(model, link)
        train(model, opt, 0, 3)
        opt.eval(model=model)
        saved = copy.deepcopy(get_model_state_dict(model))
        held = copy.deepcopy(get_optimizer_state_dict(model, opt))
        opt.train(model=model)
        train(model, opt, 3, 6)
        other = fsdp()
        resumed = chain(other, link)
        resumed.init_state()
        set_model_state_dict(other, saved)
        set_optimizer_state_dict(other, resumed, held)
        resumed.train(model=other)
        train(other, resumed, 3, 6)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        if not all(torch.equal(local(a), local(b)) for a, b in pairs):
            wrong.append(f"{link}: a checkpoint in evaluation goes another way")
    return wrong


def parts(model: Any, opt: Any) -> dict[str, Any]:
    """What a checkpoint has: both kinds of weights, each under its name, and the optimizer."""
    return {
        "model": get_model_state_dict(model),
        "averaged": opt.averaged_state_dict(model),
        "opt": get_optimizer_state_dict(model, opt),
    }


def save(folder: str) -> list[str]:
    for link in LINKS:
        model = fsdp()
        opt = chain(model, link)
        train(model, opt, 0, 3)
        dcp.save(parts(model, opt), checkpoint_id=f"{folder}/{link}")
    return []


def load(folder: str) -> list[str]:
    """With any number of processes: the weights, those for evaluation, and how training goes on."""
    wrong = []
    for link in LINKS:
        plain = net()
        other = chain(plain, link)
        train(plain, other, 0, 3)
        model = fsdp()
        opt = chain(model, link)
        opt.init_state()
        held = parts(model, opt)
        dcp.load(held, checkpoint_id=f"{folder}/{link}")
        if not near(whole(held["averaged"]), dict(other.averaged_state_dict(plain))):
            wrong.append(f"{link}: other averaged weights in the checkpoint")
        set_model_state_dict(model, held["model"])
        set_optimizer_state_dict(model, opt, held["opt"])
        if not near(whole(opt.averaged_state_dict(model)), dict(other.averaged_state_dict(plain))):
            wrong.append(f"{link}: other averaged weights after loading")
        for one, its in ((model, opt), (plain, other)):
            train(one, its, 3, 6)
        if not near(whole(dict(model.named_parameters())), dict(plain.named_parameters())):
            wrong.append(f"{link}: training goes another way")
    return wrong


def main(settings: list[str]) -> None:
    dist.init_process_group("gloo")
    known: dict[str, Callable[[], list[str]]] = {
        "fsdp": lambda: compared(fsdp),
        "tp": lambda: compared(tp),
        "behind": behind,
        "evaluation": in_evaluation,
        "save": lambda: save(settings[0]),
        "load": lambda: load(settings[0]),
    }
    for setting in [one for one in settings if one in known]:
        wrong = known[setting]()
        print(f"{setting}: {len(wrong)} wrong", *wrong, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
