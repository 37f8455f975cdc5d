"""What `test_sharded.py` starts to save and load with torch.distributed.checkpoint.

torchrun --nproc-per-node 2 tests/processes/dcp.py FOLDER save
torchrun --nproc-per-node 4 tests/processes/dcp.py FOLDER load
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from pathlib import Path
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

from tests.modules.rows.row import with_lr
from tests.table import ROWS
from torchzero_clip import (
    LR,
    Accumulate,
    Adam,
    AutoClip,
    ClipNormGrowth,
    Modular,
    Noise,
    Prodigy,
    Transform,
    ZClip,
    attach,
)
from torchzero_clip.core.sharding.layout import full, local
from torchzero_clip.core.sharding.owned_tensors import owner_of

HALF, END = 6, 12
FORMS = {  # how it is taken out, and how it is put back
    "plain": (StateDictOptions(), StateDictOptions()),
    "flattened": (StateDictOptions(flatten_optimizer_state_dict=True),) * 2,
    "full": (StateDictOptions(full_state_dict=True),) * 2,
    "broadcast": (  # rank 0 alone holds all
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ),
}


def chains() -> dict[str, list[Transform]]:
    return {
        "all": [
            ZClip(warmup_steps=3),
            ClipNormGrowth(dim="global"),
            AutoClip("percentile", window_size=4, warmup_steps=2, dim="layer"),
            Adam(),
            LR(1e-2),
        ],
        "shared only": [ClipNormGrowth(dim="global"), Noise(1e-4), LR(1e-2)],
        "accumulating": [Accumulate(4), Adam(), LR(1e-2)],
        "distance": [Prodigy(d0=0.01), LR(1.0)],
    }


@functools.cache
def line() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def build(name: str, sharded: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    if sharded:
        fully_shard(model, mesh=line())
    if name == "attached":
        opt = torch.optim.Adam(model.named_parameters(), lr=1e-2)
        handle = attach(opt, ZClip(warmup_steps=3), ClipNormGrowth())
        model.inner = [opt]
        return model, handle
    return model, Modular(model.named_parameters(), *chains()[name])


def train(model: Any, opt: Any, start: int, stop: int) -> None:
    steps = [model.inner[0]] if hasattr(model, "inner") else [opt]
    for step in range(start, stop):
        torch.manual_seed(step)
        x = torch.randn(8, 5) * (20.0 if step == 8 else 1.0)
        model(x).square().mean().backward()
        for one in steps:
            one.step()
            one.zero_grad()


def both(model: Any, opt: Any) -> list[Any]:
    """The handle comes last: torch's fake step of an optimizer without state reaches it."""
    return [*getattr(model, "inner", []), opt]


def weights(model: Any, opt: Any) -> list[Tensor]:
    """The parameters, and all that the optimizer keeps; state of a matrix where its owner is."""
    state = [
        whole(torch.as_tensor(value)).double().flatten()
        for p in model.parameters()
        for _, value in sorted(opt.state[p].items())
    ]
    shared = [
        torch.as_tensor(value).double().flatten()
        for key, value in sorted(opt.param_groups[0]["chain"].items())
    ]
    return [*[full(p.detach()).double() for p in model.parameters()], *state, *shared]


def whole(value: Tensor) -> Tensor:
    return full(value) if owner_of(value) is None else local(value)


def equal(a: list[Tensor], b: list[Tensor], exact: bool) -> bool:
    """Empty places of a window are NaN on both sides."""
    near = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-6, "atol": 2e-6}
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(torch.allclose(x, y, **near, equal_nan=True) for x, y in pairs)


def in_memory(name: str) -> list[str]:
    """Every form of the state dict, back into a fresh optimizer: the same bits."""
    wrong = []
    model, opt = build(name, sharded=True)
    train(model, opt, 0, END)
    end = weights(model, opt)
    for form, (out, back) in FORMS.items():
        model, opt = build(name, sharded=True)
        train(model, opt, 0, HALF)
        saved = get_model_state_dict(model, options=out)
        held = [get_optimizer_state_dict(model, one, options=out) for one in both(model, opt)]
        model, opt = build(name, sharded=True)
        prepare(opt)
        set_model_state_dict(model, saved, options=back)
        for one, state in zip(both(model, opt), held, strict=True):
            set_optimizer_state_dict(model, one, state, options=back)
        train(model, opt, HALF, END)
        if not equal(weights(model, opt), end, exact=True):
            wrong.append(f"{name} {form}: another end")
    return wrong


def modules() -> list[str]:
    """Every module of the contract table, the plain form: the same bits."""
    wrong = []
    for row in ROWS:
        make = next(iter(row.good.values()))

        def fresh(make: Any = make, row: Any = row) -> tuple[Any, Any]:
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(8, 3, bias=False))
            fully_shard(model, mesh=line())
            return model, Modular(model.named_parameters(), *with_lr(make(), 1e-2))

        def half(model: Any, opt: Any, start: int) -> None:
            for step in range(start, start + 3):
                torch.manual_seed(step)
                model(torch.randn(8, 5)).square().mean().backward()
                opt.step()
                opt.zero_grad()

        model, opt = fresh()
        half(model, opt, 0)
        saved = copy.deepcopy(get_model_state_dict(model))
        held = copy.deepcopy(get_optimizer_state_dict(model, opt))
        half(model, opt, 3)
        other, resumed = fresh()
        resumed.init_state()
        set_model_state_dict(other, saved)
        set_optimizer_state_dict(other, resumed, held)
        half(other, resumed, 3)
        if not equal(weights(model, opt), weights(other, resumed), exact=True):
            wrong.append(f"modules {row.cls.__name__}: another end")
    return wrong


def prepare(opt: Any) -> None:
    if hasattr(opt, "init_state"):
        opt.init_state()


def on_disk(name: str, folder: Path, action: str) -> list[str]:
    """Saved by some ranks, loaded by others."""
    place = folder / name.replace(" ", "_")
    model, opt = build(name, sharded=True)
    if action == "save":
        train(model, opt, 0, HALF)
        dcp.save(content(model, opt), checkpoint_id=place)
        return []
    found = content(model, opt)
    dcp.load(found, checkpoint_id=place)
    set_model_state_dict(model, found["model"])
    for i, one in enumerate(both(model, opt)):
        set_optimizer_state_dict(model, one, found[f"optimizer{i}"])
    train(model, opt, HALF, END)
    plain, reference = build(name, sharded=False)
    train(plain, reference, 0, END)
    same = equal(weights(model, opt), weights(plain, reference), exact=False)
    return [] if same else [f"{name} on {dist.get_world_size()}: another end"]


def content(model: Any, opt: Any) -> dict[str, Any]:
    held = {
        f"optimizer{i}": get_optimizer_state_dict(model, one)
        for i, one in enumerate(both(model, opt))
    }
    return {"model": get_model_state_dict(model), **held}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, action = Path(sys.argv[1]), sys.argv[2]
    wrong = modules() if action == "memory" else []
    for name in [*chains(), "attached"]:
        wrong += in_memory(name) if action == "memory" else on_disk(name, folder, action)
    print(f"{action}: {len(wrong)} wrong", *wrong, sep="\n", flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
