"""Cases: models whose gradients are known, as each kind of parallelism lays them out on a rank.

A gradient is what the parameter itself holds, so that it is known however torch cuts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchzero_clip.core.sharding.layout import local

RANKS = 4


@dataclass
class ClipCase:
    """A model on this rank, with gradients, and the norm that they have.

    Attributes:
        params: The parameters of this rank, as an optimizer has them.
        norm: The norm of the gradients of the whole model, on all ranks.
        model: The module of the parameters, where there is one.
        group: The processes that hold the other stages of a pipeline.
        mistakes: The norms that known mistakes find.
        bad: Whether the norm is no number.
        loose: The relative error that a norm may have.
        share: The limit, in norms of the gradients. Rounded to bfloat16 it is another number.
        once: Whether the parameters are a generator, as those of a module are.
    """

    params: list[nn.Parameter]
    norm: float
    model: nn.Module | None = None
    group: Any = None
    mistakes: dict[str, float] = field(default_factory=dict)
    bad: bool = False
    loose: float = 1e-4
    share: float = 0.3
    once: bool = False

    @property
    def here(self) -> list[Tensor]:
        """The gradients on this rank."""
        return [local(p.grad) for p in self.params if p.grad is not None]


def size(tensors: Iterable[Tensor]) -> float:
    """The norm of all, in float64."""
    return math.sqrt(sum([t.detach().double().square().sum().item() for t in tensors]))


def values(
    *shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Numbers that are the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def given(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters, each with its own values as its gradient."""
    rows = list(params)
    for p in rows:
        p.grad = p.detach().clone()
    return rows


def plain(*, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Four parameters on one device, with gradients of this size."""
    shapes = ((16, 8), (16,), (8, 16), (8,))
    rows = [values(*shape, seed=i, scale=scale, dtype=dtype) for i, shape in enumerate(shapes)]
    return given(map(nn.Parameter, rows))


# ---------------------------------------------------------------------- in one process


def whole() -> ClipCase:
    """Whole gradients of an ordinary size."""
    params = plain()
    return ClipCase(params, size(params), mistakes=of_tensors(params))


def within() -> ClipCase:
    """Gradients below the limit, which stay as they are."""
    params = plain()
    return ClipCase(params, size(params), mistakes=of_tensors(params), share=4.0)


def once() -> ClipCase:
    """Parameters that can be gone through one time, as `model.parameters()`."""
    params = plain()
    return ClipCase(params, size(params), mistakes=of_tensors(params), once=True)


def tiny() -> ClipCase:
    """Numbers whose squares are zero in float32."""
    params = plain(scale=1e-30)
    return ClipCase(params, size(params), mistakes={"squares vanish in float32": 0.0})


def huge() -> ClipCase:
    """Numbers whose squares are infinite in float32."""
    params = plain(scale=1e30)
    return ClipCase(params, size(params), mistakes={"squares overflow float32": math.inf})


def float16() -> ClipCase:
    """Numbers whose squares, and some of whose norms, are infinite in float16."""
    params = plain(scale=2000.0, dtype=torch.float16)
    mistakes = {"squares or norms overflow float16": math.inf}
    return ClipCase(params, size(params), mistakes=mistakes, loose=2e-3)


def bfloat16() -> ClipCase:
    """Many equal numbers: a sum in bfloat16 stops growing."""
    params = given([nn.Parameter(torch.full((64, 64), 0.5, dtype=torch.bfloat16))])
    return ClipCase(params, size(params), loose=1e-2)


def large() -> ClipCase:
    """Many numbers: where they are added one after the other in float32, small ones are lost."""
    params = given([nn.Parameter(values(1 << 24, seed=1))])
    rough = params[0].detach().norm().item()
    return ClipCase(params, size(params), mistakes={"a sum in float32 loses what is small": rough})


def frozen() -> ClipCase:
    """A frozen parameter in the middle, and one that took no part."""
    params = plain()
    params[1].requires_grad_(False)
    params[1].grad, params[2].grad = None, None
    rows = [params[0], params[3]]
    return ClipCase(params, size(rows), mistakes={"parameters are measured": size(params)})


def nothing() -> ClipCase:
    """No gradient at all."""
    params = plain()
    for p in params:
        p.grad = None
    return ClipCase(params, 0.0)


def tied() -> ClipCase:
    """Two layers that share a weight, each listed with its own."""
    params = plain()
    listed = [*params, params[0]]
    mistakes = {"a tensor that is listed twice counts twice": size(listed)}
    return ClipCase(listed, size(params), mistakes=mistakes)


def nan() -> ClipCase:
    """One entry that is no number."""
    params = plain()
    grad = params[0].grad
    assert grad is not None
    grad[0, 0] = math.nan
    return ClipCase(params, math.nan, bad=True)


# ---------------------------------------------------------------------- in four


def mesh(*shape: int, names: Sequence[str]) -> Any:
    """A mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))


def net(wide: int, dims: int = 8) -> nn.Sequential:
    """Two layers and a norm between them, of known values."""
    model = nn.Sequential(nn.Linear(dims, wide), nn.LayerNorm(wide), nn.Linear(wide, dims))
    for i, p in enumerate(model.parameters()):
        p.data = values(*p.shape, seed=i)
    return model


def of_model(model: nn.Module, lay: Callable[[nn.Module], Any], loose: float = 1e-4) -> ClipCase:
    """The case of a model that is laid out over the ranks."""
    norm = size(model.parameters())
    alone = of_tensors(list(model.parameters()))
    lay(model)
    params = given(model.parameters())
    case = ClipCase(params, norm, model, mistakes=alone, loose=loose)
    case.mistakes |= of_ranks(case.here)
    return case


def ddp() -> ClipCase:
    """A whole copy on every rank."""
    return of_model(net(16), lambda model: None)


def fsdp(wide: int) -> ClipCase:
    """Every parameter cut along its first dim, over all ranks."""
    from torch.distributed.fsdp import fully_shard

    over = mesh(RANKS, names=["data"])
    return of_model(net(wide), lambda model: fully_shard(model, mesh=over))


def fsdp_even() -> ClipCase:
    """Large enough for its memory to be that of gradients."""
    return fsdp(4096)


def fsdp_uneven() -> ClipCase:
    """Shards of different sizes."""
    return fsdp(10)


def fsdp_empty() -> ClipCase:
    """Fewer rows than ranks: some hold nothing of a tensor."""
    return fsdp(3)


def hsdp() -> ClipCase:
    """Shards over two ranks, copied to two others."""
    from torch.distributed.fsdp import fully_shard

    over = mesh(2, 2, names=["copies", "shards"])
    return of_model(net(16), lambda model: fully_shard(model, mesh=over))


def parallel(model: nn.Module, over: Any) -> None:
    """Tensor parallelism of the two layers; what is between them is whole on every rank."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    parallelize_module(model, over, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def tensor_parallel() -> ClipCase:
    """Matrices over four ranks."""
    over = mesh(RANKS, names=["tensor"])
    return of_model(net(16), lambda model: parallel(model, over))


def both() -> ClipCase:
    """Two ranks share each matrix, and two hold shards of it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    over = mesh(2, 2, names=["data", "tensor"])

    def lay(model: nn.Module) -> None:
        parallel(model, over["tensor"])
        between = model.get_submodule("1")
        for name, p in list(between.named_parameters()):
            spread = distribute_tensor(p.data, over["tensor"], [Replicate()])
            between.register_parameter(name, nn.Parameter(spread))
        fully_shard(model, mesh=over["data"])

    return of_model(net(16), lay)


def experts() -> ClipCase:
    """Dense layers over all ranks; experts over two, each cut over two others."""
    from torch.distributed.tensor import Shard, distribute_tensor

    dense, sparse = mesh(RANKS, names=["data"]), mesh(2, 2, names=["experts", "shards"])

    def lay(model: nn.Module) -> None:
        for layer, over, cut in (("0", dense, [Shard(0)]), ("2", sparse, [Shard(0), Shard(1)])):
            part = model.get_submodule(layer)
            some = distribute_tensor(part.get_parameter("weight").data, over, cut)
            part.register_parameter("weight", nn.Parameter(some))

    case = of_model(net(16), lay)
    for i, name in enumerate(("dense layers", "experts")):
        rows = [net(16).get_submodule("02"[i]).get_parameter("weight")]
        case.mistakes[f"the {name} alone"] = size(rows)
    return case


def pipeline() -> ClipCase:
    """Two stages on two ranks each, which hold copies of their stage."""
    model = net(16)
    norm, rank = size(model.parameters()), dist.get_rank()
    stage = model[:1] if rank < 2 else model[1:]
    groups = [dist.new_group([r, r + 2]) for r in (0, 1)]
    mistakes = {"the stages of the pipeline are not summed": size(stage.parameters())}
    params = given(stage.parameters())
    case = ClipCase(params, norm, stage, groups[rank % 2])
    case.mistakes = mistakes | of_ranks(case.here)
    return case


def sharded_nan() -> ClipCase:
    """A NaN on one rank."""
    case = fsdp_even()
    if dist.get_rank() == 1:
        case.here[0][0, 0] = math.nan
    case.norm, case.bad = math.nan, True
    return case


# ---------------------------------------------------------------------- what goes wrong


def of_tensors(params: Sequence[Tensor]) -> dict[str, float]:
    """Mistakes that need no second rank."""
    each = [size([p]) for p in params]
    return {
        "norms of tensors are added, not their squares": sum(each),
        "the largest norm of a tensor is taken for that of all": max(each),
        "the squares are added, and the root is missing": sum([x * x for x in each]),
    }


def of_ranks(here: Sequence[Tensor]) -> dict[str, float]:
    """Mistakes that come with ranks."""
    every: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, size(here))
    squares = sum([x * x for x in every])
    return {
        "each rank takes the norm of its own part": size(here),
        "what several ranks have counts once for each": math.sqrt(squares),
        "norms of ranks are added, not their squares": sum(every),
        "the mean over ranks is taken": math.sqrt(squares / len(every)),
        "the largest part is taken for all": max(every),
    }


ALONE: dict[str, Callable[[], ClipCase]] = {
    "whole": whole,
    "within the limit": within,
    "a generator": once,
    "tied, listed twice": tied,
    "frozen and missing": frozen,
    "no gradients": nothing,
    "16 million entries": large,
    "float16": float16,
    "bfloat16": bfloat16,
    "entries of 1e-30": tiny,
    "entries of 1e30": huge,
    "NaN": nan,
}
TOGETHER: dict[str, Callable[[], ClipCase]] = {
    "DDP": ddp,
    "FSDP2, even": fsdp_even,
    "FSDP2, uneven": fsdp_uneven,
    "FSDP2, empty shards": fsdp_empty,
    "FSDP2 of copies": hsdp,
    "TP": tensor_parallel,
    "FSDP2 × TP": both,
    "experts on a second mesh": experts,
    "pipeline of two stages": pipeline,
    "FSDP2, NaN on one rank": sharded_nan,
}
