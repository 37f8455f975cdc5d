"""What `test_sharded.py` starts on every rank: each module, sharded and on one process, compared.

    torchrun --nproc-per-node 2 tests/processes/sharded.py fsdp tp
    torchrun --nproc-per-node 2 tests/processes/sharded.py every ddp

Every setting wraps a model as users do. Then all modules of the contract table take the same
gradients on plain parameters and on the wrapped ones, and whatever they leave must be equal.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import seed
from tests.modules.rows import adaptive, descent
from tests.modules.rows.row import with_lr
from tests.table import ROWS
from torchzero_clip import (
    AGC,
    LR,
    AdaGC,
    Adam,
    Cautious,
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    Clipper,
    DAdaptAdam,
    Guard,
    Modular,
    Momentum,
    NormRule,
    Prodigy,
    SkipLarge,
    SkipSpike,
    TensorwiseTransform,
    Transform,
    WeightDecay,
    ZClip,
    attach,
    clip_grad_norm_,
    zeros_like_state,
)
from torchzero_clip.core.norms import shards
from torchzero_clip.core.sharding.layout import full, layout_of, local
from torchzero_clip.core.sharding.owned_tensors import owner_of

BRIEF = "brief" in sys.argv
STEPS = 6 if BRIEF else 20
LARGE = 3 if BRIEF else 7  # the step with large gradients
EVERY = "every" in sys.argv  # construction of the table, not only the first of each row
SCOPES = [
    *[(ClipNorm, scope) for scope in ("layer", "group", "global", "rows", "columns", "two dims")],
    *[(ClipNormGrowth, scope) for scope in ("layer", "group", "global")],
]
ALIKE = [row for row in (*adaptive.ROWS, *descent.ROWS) if row.per_entry]
"""Optimizers that treat each entry by itself; if brief, one in four is compared."""
LEFT_OUT = [row for i, row in enumerate(ALIKE) if BRIEF and i % 4]


class Net(nn.Module):
    """Shapes that neither two nor four ranks divide, and parameters of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 3, bias=False)
        self.scale, self.lift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.down(torch.tanh(self.up(x))))) * self.scale + self.lift


class Even(nn.Module):
    """Shapes for tensor parallelism, which wants divisible ones; the norm stays plain."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.up(x))))


def ddp() -> tuple[Any, Any]:
    plain, wrapped = twins(Net)
    return plain, DistributedDataParallel(wrapped)


def fsdp() -> tuple[Any, Any]:
    plain, wrapped = twins(Net)
    mesh = line()
    fully_shard(wrapped.down, mesh=mesh, shard_placement_fn=columns)
    return plain, fully_shard(wrapped, mesh=mesh)


def columns(p: nn.Parameter) -> Shard:
    """The last dim, which must divide evenly where it is not the first."""
    return Shard(p.dim() - 1)


def partly() -> tuple[Any, Any]:
    """One layer sharded, the others plain."""
    plain, wrapped = twins(Net)
    fully_shard(wrapped.up, mesh=line())
    return plain, wrapped


def tp() -> tuple[Any, Any]:
    plain, wrapped = twins(Even)
    return plain, parallelize_module(wrapped, line(), PLAN)


def hsdp() -> tuple[Any, Any]:
    plain, wrapped = twins(Net)
    return plain, fully_shard(wrapped, mesh=square())


def both() -> tuple[Any, Any]:
    """FSDP over tensor parallelism, on a mesh of two dims."""
    plain, wrapped = twins(Even)
    mesh = square()
    parallelize_module(wrapped, mesh["tp"], PLAN)
    return plain, fully_shard(wrapped, mesh=mesh["dp"])


@functools.cache
def line() -> Any:
    """All processes in a row; a mesh has threads and sockets, so one is enough."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


@functools.cache
def square() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SETTINGS = {f.__name__: f for f in (ddp, fsdp, partly, tp, hsdp, both)}


def twins(make: type[nn.Module]) -> tuple[Any, Any]:
    models = []
    for _ in range(2):
        seed()
        models.append(make())
    return models[0], models[1]


@functools.cache
def kept(setting: str, number: int) -> tuple[Any, Any, list[Tensor]]:
    """A pair of models, and the values that their parameters begin with."""
    plain, wrapped = SETTINGS[setting]()
    params = [*plain.parameters(), *wrapped.parameters()]
    return plain, wrapped, [local(p.detach()).clone() for p in params]


def anew(setting: str, number: int = 0) -> tuple[Any, Any]:
    """The pair of this number as it began: to wrap a model takes longer than its steps."""
    plain, wrapped, values = kept(setting, number)
    for p, value in zip([*plain.parameters(), *wrapped.parameters()], values, strict=True):
        local(p.detach()).copy_(value)
        p.grad = None
    return plain, wrapped


# ---------------------------------------------------------------------- comparing


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters()]


def everything(opt: Any, params: list[nn.Parameter]) -> dict[str, Any]:
    """Parameters, gradients, state, thresholds and metrics."""
    out: dict[str, Any] = {}
    for i, p in enumerate(params):
        out[f"p{i}"] = whole(p.detach())
        out[f"g{i}"] = None if p.grad is None else full(p.grad)
        out |= {f"s{i}/{key}": of_all(value) for key, value in opt.state.get(p, {}).items()}
    for g, group in enumerate(opt.param_groups):
        out |= {f"c{g}/{key}": value for key, value in group["chain"].items()}
    return out | {f"m/{key}": value for key, value in opt.metrics().items()}


def of_all(x: Any) -> Any:
    """A tensor as a whole: what one rank has alone comes from it."""
    owner = owner_of(x) if isinstance(x, DTensor) else None
    if owner is None:
        return full(x)
    here = x.to_local() if dist.get_rank() == owner else torch.empty(x.shape, dtype=x.dtype)
    dist.broadcast(here, owner)
    return here


def differ(a: dict[str, Any], b: dict[str, Any], rtol: float, atol: float) -> str:
    """The first that is not equal."""
    if a.keys() != b.keys():
        return f"only one has {sorted(a.keys() ^ b.keys())}"
    for key, x in a.items():
        y = b[key]
        if x is None or y is None:
            if x is not y:
                return f"{key}: {x} and {y}"
            continue
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{key}: {x.shape} {x.dtype} and {y.shape} {y.dtype}"
        if not torch.allclose(x.double(), y.double(), rtol=rtol, atol=atol, equal_nan=True):
            return f"{key}: off by {(x.double() - y.double()).abs().max():.2e}"
    return ""


def same_gradients(params: list[nn.Parameter], twin: list[nn.Parameter], step: int) -> None:
    gen = torch.Generator().manual_seed(step)
    for p, q in zip(params, twin, strict=True):
        size = 30.0 if step == LARGE else 1.0
        g = torch.randn(p.shape, generator=gen) * size
        p.grad, layout = g.clone(), layout_of(q)
        q.grad = g.clone() if layout is None else layout.wrap(layout.part(g).clone())


# ---------------------------------------------------------------------- what is compared


def constructions() -> Iterator[tuple[str, list[Transform], bool, int]]:
    """A name, a chain, whether for matrices alone, and how many steps."""
    for row in ROWS:
        if row in LEFT_OUT:
            continue
        for i, (label, make) in enumerate(row.good.items()):
            if i and not EVERY and (row.cls, label) not in SCOPES:
                continue
            steps = STEPS if i == 0 else 4
            yield f"{row.cls.__name__}[{label}]", with_lr(make(), 1e-2), row.matrices, steps
    clips: dict[str, Callable[[], list[Transform]]] = {
        "head": lambda: [ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.01), LR(1e-2)],
        "head/grad": lambda: [ClipNorm(0.5, dim="global", target="grad"), Adam(), LR(1e-2)],
        "zclip": lambda: [ZClip(warmup_steps=3), Adam(), ClipNorm(0.1), LR(1e-2)],
        "adagc": lambda: [AdaGC(warmup_steps=2), Adam(), Cautious(), LR(1e-2)],
        "agc": lambda: [AGC(0.01), Centralize(dim=0, inverse_dims=True), Momentum(0.9), LR(0.1)],
        "ema": lambda: [ClipNormByEMA(0.9, ord=3), LR(0.1)],
        "skip": lambda: [SkipLarge(60.0), Adam(), LR(1e-2)],
        "dot": lambda: [Aligned(dim="global"), Aligned(), Aligned(dim=0), LR(1e-2)],
        "factored": lambda: [Factored(), LR(1e-2)],
        "guards": lambda: [Guard(), SkipSpike(8, 0.5, 2), ClipNorm(1.0), Adam(), LR(1e-2)],
    }
    for name, make in clips.items():
        yield name, make(), False, STEPS


def compare(setting: str) -> list[str]:
    """Every construction, from the same gradients."""
    wrong: list[str] = []
    for name, chain, matrices, steps in constructions():
        plain, wrapped = anew(setting)
        rows = zip_longest(named(plain), named(wrapped))
        pairs = [(a, b) for a, b in rows if not matrices or a[1].dim() == 2]
        ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
        params, twin = [p for _, p in ours], [p for _, p in theirs]
        try:
            opt, other = Modular(ours, *chain), Modular(theirs, *chain)
            for step in range(steps):
                same_gradients(params, twin, step)
                opt.step()
                other.step()
            text = differ(everything(opt, params), everything(other, twin), 2e-6, 1e-6)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        if text:
            wrong.append(f"{setting} {name}: {text}")
    return wrong


class Aligned(NormRule):
    """u ← u · min(1, |⟨w, g⟩| / ‖u‖²)"""

    dim: Any = None

    def limit(self, norm: Tensor, state: dict[str, Tensor], group: Any) -> Tensor:
        return self.dot(group["params"], group["grads"], group).abs() / norm


class Factored(TensorwiseTransform):
    """u ← u · RMS(w) / √v, of matrices with the means of rows and columns for v"""

    reads = ("param",)

    def init(self, param: Tensor) -> dict[str, Tensor | None]:
        shapes = (param.shape, None, None)
        if param.dim() == 2:
            shapes = (None, (param.shape[0], 1), (1, param.shape[1]))
        rows = zip(("v", "row", "column"), shapes, strict=True)
        return {name: None if x is None else zeros_like_state(param, x) for name, x in rows}

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Any) -> Tensor:
        size = group["param"].square().mean().sqrt() + 0.1
        if u.dim() != 2:
            return u.mul_(size).div_(state["v"].lerp_(u.square(), 0.1).sqrt())
        row = state["row"].lerp_(u.square().mean(1, keepdim=True), 0.1)
        column = state["column"].lerp_(u.square().mean(0, keepdim=True), 0.1)
        return u.mul_(size).div_((row * column / row.mean()).sqrt())


class Slow(TensorwiseTransform):
    """m ← 0.9 m + 0.1 u;   u ← m, of whole tensors"""

    def init(self, param: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(param)}

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Any) -> Tensor:
        return state["m"].lerp_(u, 0.1).clone()


def narrow(setting: str) -> list[str]:
    """State in bfloat16 is rounded alike, to the bit, however the parameters are sharded."""
    wrong: list[str] = []
    chains: dict[str, Callable[[], list[Transform]]] = {
        "adam": lambda: [Adam(), LR(1e-2)],
        "average": lambda: [ClipNormByEMA(0.9, max_ema_growth=None), LR(0.1)],
        "tensorwise": lambda: [Slow(), LR(0.1)],
    }
    for (name, make), compile in itertools.product(chains.items(), (False, True)):
        plain, wrapped = anew(setting)
        sides = [named(plain), named(wrapped)]
        opts = [Modular(s, *make(), compile=compile, state_dtype="bfloat16") for s in sides]
        for opt in opts if compile else ():
            opt.engine = opt.engine.twin()
        params = [[p for _, p in side] for side in sides]
        for step in range(3 if BRIEF else 5):
            same_gradients(*params, step)
            for opt in opts:
                opt.step()
        found = [everything(opt, some) for opt, some in zip(opts, params, strict=True)]
        states = [{k: x for k, x in one.items() if k.startswith("s")} for one in found]
        halves = [x for x in states[0].values() if x.dtype == torch.bfloat16]
        if not halves or not all([x.float().isfinite().all() and x.any() for x in halves]):
            wrong.append(f"{setting} narrow {name}: nothing was kept in bfloat16")
        if text := differ(*states, 0, 0) or differ(*found, 2e-6, 1e-6):
            wrong.append(f"{setting} narrow {name}, compile={compile}: {text}")
    return wrong


def train(setting: str) -> list[str]:
    """The wrapped model's own gradients, in float64: its sums have another order."""
    torch.set_default_dtype(torch.float64)
    try:
        return _train(setting)
    finally:
        torch.set_default_dtype(torch.float32)


def _train(setting: str) -> list[str]:
    plain, wrapped = SETTINGS[setting]()
    chain = [ZClip(warmup_steps=3), AGC(0.05), Adam(), LR(1e-2)]
    width = plain.up.in_features
    opts = [Modular(named(plain), *chain), Modular(named(wrapped), *chain)]
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(8, width)
        for model, opt in zip((plain, wrapped), opts, strict=True):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    params = [[p for _, p in named(m)] for m in (plain, wrapped)]
    text = differ(everything(opts[0], params[0]), everything(opts[1], params[1]), 1e-6, 1e-9)
    return [f"{setting} training: {text}"] if text else []


def helpers(setting: str) -> list[str]:
    """Clipper, attach and the stand-alone helper."""
    wrong: list[str] = []

    def attached(params: list[Any]) -> dict[str, Any]:
        opt = torch.optim.Adam([p for _, p in params], lr=1e-2)
        handle = attach(opt, ZClip(warmup_steps=2))
        return {"step": opt.step, "handle": handle}

    def clipper(params: list[Any]) -> dict[str, Any]:
        handle = Clipper(params, ClipNormByEMA(0.5))
        return {"step": handle.step, "handle": handle}

    def helper(params: list[Any]) -> dict[str, Any]:
        tensors = [p for _, p in params]
        return {"step": lambda: clip_grad_norm_(tensors, 1.0, dim="global", min_size=1)}

    for make in (attached, clipper, helper):
        plain, wrapped = SETTINGS[setting]()
        sides = [named(plain), named(wrapped)]
        kits = [make(side) for side in sides]
        params = [[p for _, p in side] for side in sides]
        for step in range(5):
            same_gradients(*params, step)
            norms = [kit["step"]() for kit in kits]
            found = [
                {f"p{i}": whole(p.detach()) for i, p in enumerate(some)}
                | {f"g{i}": full(p.grad) for i, p in enumerate(some)}
                for some in params
            ]
            for kit, out, norm in zip(kits, found, norms, strict=True):
                out["norm"] = norm
                out |= kit["handle"].metrics() if "handle" in kit else {}
            if text := differ(*found, 2e-6, 1e-6):
                wrong.append(f"{setting} {make.__name__}: {text}")
                break
    return wrong


def collectives(setting: str) -> list[str]:
    """One for each rule and mesh, whatever the number of tensors; guards need one of their own
    only where some gradient is whole, or several ranks have equal shards of it.
    """
    calls: list[Any] = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    _, wrapped = SETTINGS[setting]()
    params = [p for _, p in named(wrapped)]
    same_gradients(params, params, 0)
    guards = [Guard(), SkipLarge(60.0)]
    opt = Modular(params, *guards, ClipNorm(1.0, dim="global"), ClipNorm(0.1), Adam(), LR(1e-3))
    setattr(dist, name, counted)
    try:
        opt.step()
    finally:
        setattr(dist, name, original)
    layouts = [layout_of(p) for p in params]
    meshes = {layout.mesh for layout in layouts if layout and layout.split}
    counts = {x.shard_count if x is not None else 0 for x in layouts}
    expected = 2 * len(meshes) + (counts != {dist.get_world_size()}) * len(guards)
    return (
        [] if len(calls) == expected else [f"{setting}: {len(calls)} collectives, not {expected}"]
    )


def stages() -> list[str]:
    """Each process holds some of the layers, as in a pipeline; norms are those of all."""
    wrong: list[str] = []
    rank, n = dist.get_rank(), dist.get_world_size()
    chains: dict[str, Callable[[], list[Transform]]] = {
        "global": lambda: [ZClip(warmup_steps=2), ClipNormGrowth(dim="global"), LR(0.1)],
        "group": lambda: [ClipNorm(0.1, dim="group"), LR(0.1)],
        "spread": lambda: [ClipNorm(0.1, "std", dim="global"), LR(0.1)],
        "mean": lambda: [Centralize(dim="global"), LR(0.1)],
        "large": lambda: [SkipLarge(60.0), ClipNorm(0.1), Adam(), LR(0.1)],
        "spike": lambda: [Guard(), SkipSpike(8, 0.5, 2), ZClip(), Adam(), LR(0.1)],
        "distance": lambda: [Prodigy(d0=0.01), LR(1.0)],
        "lower bound": lambda: [DAdaptAdam(d0=0.01)],
    }
    for name, make in chains.items():
        plain, split = twins(Net)
        groups = [[[p for _, p in named(m)][i::2] for i in range(2)] for m in (plain, split)]
        mine = [[p for i, p in enumerate(group) if i % n == rank] for group in groups[1]]
        opt = Modular([{"params": group} for group in groups[0]], *make())
        part = Modular(
            [{"params": group} for group in mine], *make(), process_group=dist.group.WORLD
        )
        for step in range(10):
            same_gradients([p for _, p in named(plain)], [p for _, p in named(split)], step)
            opt.step()
            part.step()
        pairs = [(p, q) for a, b in zip(*groups, strict=True) for p, q in zip(a, b, strict=True)]
        here = {id(p) for group in mine for p in group}
        found = [{}, {}]
        for i, (p, q) in enumerate(pairs):
            if id(q) in here:
                found[0][f"p{i}"], found[1][f"p{i}"] = p.detach(), q.detach()
        for out, one in zip(found, (opt, part), strict=True):
            out |= {f"c/{k}": v for k, v in one.param_groups[0]["chain"].items()}
            out |= {} if name == "large" else {f"m/{k}": v for k, v in one.metrics().items()}
        if text := differ(*found, 2e-6, 1e-6):
            wrong.append(f"stages {name}: {text}")
    return wrong


def flat() -> list[str]:
    """FSDP1 is refused, with either of its ways to hold parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrong: list[str] = []
    for original in (True, False):
        model = FullyShardedDataParallel(
            Net(), device_id=torch.device("cpu"), use_orig_params=original
        )
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for make in (
            lambda params: Modular(params, ClipNorm(1.0), LR(0.1)),
            lambda params: attach(torch.optim.SGD(params), ClipNorm(1.0)),
            lambda params: clip_grad_norm_(params, 1.0, dim=None),
        ):
            try:
                make(list(model.parameters()))
            except TypeError as error:
                if "fully_shard" in str(error):
                    continue
            wrong.append(f"flat: not refused, use_orig_params={original}")
    return wrong


def again() -> list[str]:
    """A process group that was made anew, under a mesh that equals the old one."""
    dist.barrier()
    dist.destroy_process_group()
    line.cache_clear()
    place = Path(tempfile.gettempdir()) / f"again-{os.getppid()}"
    dist.init_process_group(
        "gloo",
        init_method=place.as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    used: list[Any] = []
    original = shards.gather

    def watched(column: Tensor, group: Any) -> Tensor:
        used.append(group)
        return original(column, group)

    shards.gather = watched
    wrong = train("fsdp")
    dist.barrier()
    place.unlink(missing_ok=True)
    here = line().get_group(0)  # a group that is gone may answer still, with gloo
    fresh = bool(used) and all(group is here for group in used)
    return wrong if fresh else [*wrong, "again: a process group that is gone was asked"]


ALONE = {"stages": stages, "flat": flat, "again": again}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for setting in sys.argv[1:]:
        if setting in ("every", "brief"):
            continue
        if setting in ALONE:
            wrong = ALONE[setting]()
        else:
            checks = (train, helpers, narrow, collectives, compare)
            wrong = [line for check in checks for line in check(setting)]
        print(f"{setting}: {len(wrong)} wrong", *wrong, sep="\n", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


if __name__ == "__main__":
    main()
