"""The cases of a clip audit: models with known gradients, for each kind of parallelism.

The gradient of each parameter equals the parameter. So the gradients are known for every way in
which torch shards the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchzero_clip.core.sharding.layout import local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RANKS = 4


@dataclass
class ClipCase:
    """A case: parameters with gradients on this rank, and the norm of the gradients.

    Attributes:
        params: The parameters of this rank, in the form that an optimizer receives.
        norm: The norm of the gradients of the whole model, on all ranks.
        model: The module of the parameters, or None if there is none.
        group: The process group of the other pipeline stages, or None.
        mistakes: For each known mistake, the norm that a function with this mistake computes.
        is_nan: Whether the norm is NaN.
        tolerance: The relative error that the function's norm may have.
        share: `max_norm` as a multiple of the norm. Rounding to bfloat16 changes the default value.
        as_generator: Whether the function receives the parameters as a generator, such as
            `model.parameters()`.
    """

    params: list[nn.Parameter]
    norm: float
    model: nn.Module | None = None
    group: dist.ProcessGroup | None = None
    mistakes: dict[str, float] = field(default_factory=dict)
    is_nan: bool = False
    tolerance: float = 1e-4
    share: float = 0.3
    as_generator: bool = False

    @property
    def local_grads(self) -> list[Tensor]:
        """The gradients on this rank. For sharded gradients, the local shards."""
        return [local(p.grad) for p in self.params if p.grad is not None]


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the norm of all tensors together, computed in float64."""
    return math.sqrt(sum([t.detach().double().square().sum().item() for t in tensors]))


def random_values(
    *shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return random values that are the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def with_gradients(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Set the gradient of each parameter to a copy of the parameter, and return the parameters."""
    listed = list(params)
    for p in listed:
        p.grad = p.detach().clone()
    return listed


def four_params(*, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return four small parameters with gradients."""
    params = []
    for i, shape in enumerate([(16, 8), (16,), (8, 16), (8,)]):
        values = random_values(*shape, seed=i, scale=scale, dtype=dtype)
        params.append(nn.Parameter(values))
    return with_gradients(params)


# ---------------------------------------------------------------------- in one process


def whole() -> ClipCase:
    """Make a case of plain tensors."""
    params = four_params()
    return ClipCase(params, norm_of(params), mistakes=local_mistakes(params))


def within() -> ClipCase:
    """Make a case whose norm is below `max_norm`, so that the gradients must not change."""
    params = four_params()
    return ClipCase(params, norm_of(params), mistakes=local_mistakes(params), share=4.0)


def generator() -> ClipCase:
    """Make a case whose parameters are a generator, so that a function can iterate only once."""
    params = four_params()
    return ClipCase(params, norm_of(params), mistakes=local_mistakes(params), as_generator=True)


def tiny() -> ClipCase:
    """Make a case with gradients so small that their squares are zero in float32."""
    params = four_params(scale=1e-30)
    return ClipCase(params, norm_of(params), mistakes={"squares underflow in float32": 0.0})


def huge() -> ClipCase:
    """Make a case with gradients so large that their squares overflow float32."""
    params = four_params(scale=1e30)
    return ClipCase(params, norm_of(params), mistakes={"squares overflow in float32": math.inf})


def float16() -> ClipCase:
    """Make a case with gradients so large that their squares and some norms overflow float16."""
    params = four_params(scale=2000.0, dtype=torch.float16)
    mistakes = {"squares or norms overflow in float16": math.inf}
    return ClipCase(params, norm_of(params), mistakes=mistakes, tolerance=2e-3)


def bfloat16() -> ClipCase:
    """Make a case of many equal numbers. A running sum in bfloat16 stops growing."""
    params = with_gradients([nn.Parameter(torch.full((64, 64), 0.5, dtype=torch.bfloat16))])
    return ClipCase(params, norm_of(params), tolerance=1e-2)


def large() -> ClipCase:
    """Make a case with 16 million numbers. A running sum in float32 loses the small ones."""
    params = with_gradients([nn.Parameter(random_values(1 << 24, seed=1))])
    rough = params[0].detach().norm().item()
    mistakes = {"a sum in float32 loses small numbers": rough}
    return ClipCase(params, norm_of(params), mistakes=mistakes)


def frozen() -> ClipCase:
    """Make a case with a frozen parameter, and with a parameter that has no gradient."""
    params = four_params()
    params[1].requires_grad_(False)
    params[1].grad = None
    params[2].grad = None
    mistakes = {"it is the norm of the parameters, not of the gradients": norm_of(params)}
    return ClipCase(params, norm_of([params[0], params[3]]), mistakes=mistakes)


def nothing() -> ClipCase:
    """Make a case without any gradient."""
    params = four_params()
    for p in params:
        p.grad = None
    return ClipCase(params, 0.0)


def tied() -> ClipCase:
    """Make a case in which one parameter is listed twice, as tied weights may be."""
    params = four_params()
    listed = [*params, params[0]]
    mistakes = {"a parameter that is listed twice is counted twice": norm_of(listed)}
    return ClipCase(listed, norm_of(params), mistakes=mistakes)


def nan() -> ClipCase:
    """Make a case with one NaN among the gradients."""
    params = four_params()
    grad = params[0].grad
    assert grad is not None
    grad[0, 0] = math.nan
    return ClipCase(params, math.nan, is_nan=True)


# ---------------------------------------------------------------------- on four ranks


def mesh(*shape: int, names: Sequence[str]) -> DeviceMesh:
    """Return a mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))


def small_model(hidden: int, dims: int = 8) -> nn.Sequential:
    """Return a model of two linear layers and a LayerNorm, with the same values on every rank."""
    model = nn.Sequential(nn.Linear(dims, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, dims))
    for i, p in enumerate(model.parameters()):
        p.data = random_values(*p.shape, seed=i)
    return model


def case_of(model: nn.Module, distribute: Callable[[nn.Module], object]) -> ClipCase:
    """Distribute a model over the ranks, and make a case of its parameters."""
    norm = norm_of(model.parameters())
    mistakes = local_mistakes(list(model.parameters()))
    distribute(model)
    case = ClipCase(with_gradients(model.parameters()), norm, model, mistakes=mistakes)
    case.mistakes |= mistakes_of_ranks(case.local_grads)
    return case


def ddp() -> ClipCase:
    """Make a case with a full copy of the model on every rank."""
    return case_of(small_model(16), lambda model: None)


def fsdp(hidden: int) -> ClipCase:
    """Make a case in which every parameter is sharded along its first dim over all ranks."""
    from torch.distributed.fsdp import fully_shard

    ranks = mesh(RANKS, names=["data"])
    return case_of(small_model(hidden), lambda model: fully_shard(model, mesh=ranks))


def fsdp_even() -> ClipCase:
    """Make a case with large gradients, so that the used memory can be compared with theirs."""
    return fsdp(4096)


def fsdp_uneven() -> ClipCase:
    """Make a case whose shards have different sizes."""
    return fsdp(10)


def fsdp_empty() -> ClipCase:
    """Make a case with fewer rows than ranks in some parameters, so that some shards are empty."""
    return fsdp(3)


def hsdp() -> ClipCase:
    """Make a case that is sharded over two ranks. The two other ranks have a copy."""
    from torch.distributed.fsdp import fully_shard

    ranks = mesh(2, 2, names=["copies", "shards"])
    return case_of(small_model(16), lambda model: fully_shard(model, mesh=ranks))


def parallelize(model: nn.Module, ranks: DeviceMesh) -> None:
    """Apply tensor parallelism to the linear layers. The LayerNorm is the same on every rank."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    parallelize_module(model, ranks, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def tensor_parallel() -> ClipCase:
    """Make a case with matrices that are sharded over all four ranks."""
    ranks = mesh(RANKS, names=["tensor"])
    return case_of(small_model(16), lambda model: parallelize(model, ranks))


def fsdp_and_tensor_parallel() -> ClipCase:
    """Make a case with tensor parallelism over two ranks, combined with FSDP over two ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    ranks = mesh(2, 2, names=["data", "tensor"])

    def distribute(model: nn.Module) -> None:
        parallelize(model, ranks["tensor"])
        layer_norm = model.get_submodule("1")
        for name, p in list(layer_norm.named_parameters()):
            replicated = distribute_tensor(p.data, ranks["tensor"], [Replicate()])
            layer_norm.register_parameter(name, nn.Parameter(replicated))
        fully_shard(model, mesh=ranks["data"])

    return case_of(small_model(16), distribute)


def experts() -> ClipCase:
    """Make a case with a dense layer on one mesh, and experts on a second mesh of two dims."""
    from torch.distributed.tensor import Shard, distribute_tensor

    dense = mesh(RANKS, names=["data"])
    sparse = mesh(2, 2, names=["experts", "shards"])
    layouts = [("0", dense, [Shard(0)]), ("2", sparse, [Shard(0), Shard(1)])]

    def distribute(model: nn.Module) -> None:
        for name, ranks, placements in layouts:
            layer = model.get_submodule(name)
            sharded = distribute_tensor(layer.get_parameter("weight").data, ranks, placements)
            layer.register_parameter("weight", nn.Parameter(sharded))

    case = case_of(small_model(16), distribute)
    model = small_model(16)
    only_dense = norm_of([model.get_parameter("0.weight")])
    case.mistakes["only the dense layers are counted"] = only_dense
    only_experts = norm_of([model.get_parameter("2.weight")])
    case.mistakes["only the experts are counted"] = only_experts
    return case


def pipeline() -> ClipCase:
    """Make a case with two pipeline stages. Each stage has a copy on two ranks."""
    model = small_model(16)
    norm = norm_of(model.parameters())
    rank = dist.get_rank()
    stage = model[:1] if rank < 2 else model[1:]
    groups = [dist.new_group([r, r + 2]) for r in (0, 1)]
    mistakes = {"only the stage of this rank is counted": norm_of(stage.parameters())}
    params = with_gradients(stage.parameters())
    case = ClipCase(params, norm, stage, groups[rank % 2], mistakes)
    case.mistakes |= mistakes_of_ranks(case.local_grads)
    return case


def sharded_nan() -> ClipCase:
    """Make a case with a NaN on one rank."""
    case = fsdp_even()
    if dist.get_rank() == 1:
        case.local_grads[0][0, 0] = math.nan
    case.norm = math.nan
    case.is_nan = True
    return case


# ---------------------------------------------------------------------- known mistakes


def local_mistakes(params: Sequence[Tensor]) -> dict[str, float]:
    """Return the norms that functions with known mistakes compute in one process."""
    norms = [norm_of([p]) for p in params]
    return {
        "the norms of tensors are added instead of their squares": sum(norms),
        "it is the largest norm of a tensor": max(norms),
        "the square root is missing": sum([norm * norm for norm in norms]),
    }


def mistakes_of_ranks(local_grads: Sequence[Tensor]) -> dict[str, float]:
    """Return the norms that functions with known mistakes compute on several ranks."""
    norms: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(norms, norm_of(local_grads))
    squares = sum([norm * norm for norm in norms])
    return {
        "each rank counts only its own part": norm_of(local_grads),
        "gradients that several ranks have are counted several times": math.sqrt(squares),
        "the norms of ranks are added instead of their squares": sum(norms),
        "the mean over ranks is used instead of the sum": math.sqrt(squares / len(norms)),
        "it is the largest norm of a rank": max(norms),
    }


IN_ONE_PROCESS: dict[str, Callable[[], ClipCase]] = {
    "whole": whole,
    "within the limit": within,
    "a generator": generator,
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
DISTRIBUTED: dict[str, Callable[[], ClipCase]] = {
    "DDP": ddp,
    "FSDP2, even": fsdp_even,
    "FSDP2, uneven": fsdp_uneven,
    "FSDP2, empty shards": fsdp_empty,
    "FSDP2 of copies": hsdp,
    "TP": tensor_parallel,
    "FSDP2 × TP": fsdp_and_tensor_parallel,
    "experts on a second mesh": experts,
    "pipeline of two stages": pipeline,
    "FSDP2, NaN on one rank": sharded_nan,
}
