"""What `test_owners.py` starts on every rank: matrices that one rank each works on.

torchrun --nproc-per-node 4 tests/processes/owners.py balance equal save load
torchrun --nproc-per-node 2 tests/processes/owners.py brief balance equal
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.identities.methods.matrices import same_null_spaces
from torchzero_clip import (
    LR,
    Adam,
    Chain,
    ClipNorm,
    ClipRMS,
    ClipSpectral,
    EqualRows,
    InBasis,
    Kron,
    Live,
    Modular,
    Momentum,
    NeuronNorm,
    Normalize,
    Orthogonalize,
    Partition,
    Rows,
    ScaleByShape,
    SOAPBasis,
    Steepest,
    TensorwiseTransform,
    Transform,
    WeightDecay,
    heads,
)
from torchzero_clip.core.sharding import owners as exchange

WIDTH = 32  # of GPT-2 small, 768 wide; the shapes are the same
BRIEF = "brief" in sys.argv
LAYERS = 4 if BRIEF else 12
GPT2 = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
FUSED = {
    "p0": "(three rows) d -> three rows d, three=3",
    "p1": "d (head k) -> head d k, head=4",
    "p2": heads(2, 1, 1, size=WIDTH),
    "p4": [2, 3],
}
VECTORS = [(7,), (2,)]
ANY_WAY = "muon", "nanochat", "weights", "state", "soap", "state kron", "layout"
"""The chains that are compared in every way to shard, if brief."""
UNEVEN = [(5, 7), (3, 2), (7, 5), (9, 4), (1, 6), (2, 3), (5, 7)]  # and empty on some ranks


class Onto(TensorwiseTransform):
    """u ← u - w wᵀ u, done by the owner of the matrix, who needs the weights too"""

    reads = ("param",)

    def operations(self, rows: int, columns: int) -> float:
        return 4.0 * rows * rows * columns

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Any) -> Tensor:
        w = group["param"] / group["param"].norm()
        return u - w @ (w.T @ u)


class Whiten(TensorwiseTransform):
    """L ← β L + (1 - β) u uᵀ;   P ← (L + 1)^(-1/2) every third step;   u ← P u"""

    beta: Live[float] = 0.5
    every: int = 3

    def init_matrix(self, rows: int, columns: int) -> dict[str, Tensor]:
        return {"left": torch.zeros(rows, rows), "root": torch.eye(rows), "sum": torch.zeros(1)}

    def observe_matrix(self, u: Tensor, state: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
        left = torch.lerp(state["left"], u @ u.mT, 1 - group["beta"])
        return {"left": left, "sum": state["sum"] + u.sum()}

    def refresh_matrix(self, state: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
        values, vectors = torch.linalg.eigh(state["left"])
        return {"root": vectors * (values.clamp(min=0) + 1).rsqrt() @ vectors.mT}

    def update_tensor(self, u: Tensor, state: dict[str, Tensor], group: Any) -> Tensor:
        return state["root"] @ u


def muon() -> list[Transform]:
    return [Momentum(0.95, nesterov=True), Orthogonalize(scale="original"), WeightDecay(0.1)]


def nanochat() -> list[Transform]:
    """Momentum, equal rows, Polar Express, the norm √rows, neurons, cautious decay."""
    return [
        Momentum(0.95, nesterov=True, dampening=0.95),
        EqualRows(),
        Orthogonalize(5, "polar_express"),
        Normalize(per_shape="sqrt_rows"),
        NeuronNorm(0.9, neurons="longer"),
        WeightDecay(0.1, cautious=True),
    ]


def drawn(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sharded(t: Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    return distribute_tensor(t, mesh, list(placements), src_data_rank=None)


def both(
    shapes: Sequence[Sequence[int]], mesh: Any, placements: Callable[[int], Sequence[Any]]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The same parameters plain and sharded."""
    plain = [nn.Parameter(drawn(shape, i)) for i, shape in enumerate(shapes)]
    split = [nn.Parameter(sharded(p.detach(), mesh, placements(i))) for i, p in enumerate(plain)]
    return plain, split


def give(params: Sequence[nn.Parameter], step: int) -> None:
    """Set the gradients of a step, sharded as their parameters are."""
    for i, p in enumerate(params):
        grad = drawn(p.shape, 1000 * (step + 1) + i)
        whole = isinstance(p, DTensor)
        p.grad = sharded(grad, p.device_mesh, p.placements) if whole else grad


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


@contextmanager
def counted(*names: str) -> Any:
    """Counts calls of functions of torch.distributed, and the bytes that they send."""
    calls: Counter[str] = Counter()
    kept = {name: getattr(dist, name) for name in names}

    def watch(name: str) -> Callable[..., Any]:
        def call(out: Tensor, data: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            calls["bytes"] += data.numel() * data.element_size()
            return kept[name](out, data, *args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, watch(name))
    try:
        yield calls
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def line() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("a", "b"))


def operations(step: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def entries(opt: Modular) -> int:
    """How many entries of matrices' state this rank has."""
    rows = [row.items() for row in opt.state.values()]
    state = [t for row in rows for key, t in row if key in ("Whiten/left", "Whiten/root")]
    return sum([(t.to_local() if isinstance(t, DTensor) else t).numel() for t in state])


# ---------------------------------------------------------------------- what is checked


def balance() -> list[str]:
    """GPT-2's matrices: a fair share of the operations, two collectives for each shape."""
    wrong = []
    shapes = [shape for _ in range(LAYERS) for shape in GPT2]
    for mesh, placements in ((line(), [Shard(0)]), (square(), [Replicate(), Shard(0)])):
        plain, split = both(shapes, mesh, lambda i, found=placements: found)
        soap = InBasis(SOAPBasis(), Adam())
        pairs = [Modular(params, soap, LR(0.0)) for params in (plain, split)]
        for step in range(2):
            for params in (plain, split):
                give(params, step)
            done = [operations(opt.step) for opt in pairs]
        share = torch.tensor([done[1] / done[0]])
        dist.all_reduce(share, dist.ReduceOp.MAX)
        if not 0 < share.item() <= 1.1 / dist.get_world_size():
            wrong.append(f"balance: {share.item():.3f} of SOAP's operations on one rank")
        opts = [Modular(params, *muon(), LR(0.02)) for params in (plain, split)]
        for params, opt in zip((plain, split), opts, strict=True):
            give(params, 0)
            opt.step()
            give(params, 1)
        all_of_it = operations(opts[0].step)
        with counted("all_to_all_single", "all_reduce", "all_gather_into_tensor") as calls:
            mine = operations(opts[1].step)
        share = torch.tensor([mine / all_of_it])
        dist.all_reduce(share, dist.ReduceOp.MAX)
        if not 0 < share.item() <= 1.1 / dist.get_world_size():
            wrong.append(f"balance: {share.item():.3f} of the operations on one rank")
        sent = calls.pop("bytes")
        world = dist.get_world_size()
        if (
            f"{len(shapes)} sharded matrices with an owner among {world} ranks"
            not in opts[1].explain()
        ):
            wrong.append(opts[1].explain())
        if calls != {"all_to_all_single": 2 * len(GPT2)}:
            wrong.append(f"balance: {dict(calls)}")
        most = 2 * 4 * sum(p.numel() for p in plain) / mesh.size(-1) * mesh.ndim
        if sent > most:  # its part goes once, and what it made comes back to all that share it
            wrong.append(f"balance: {sent} bytes sent, more than {most}")
    return wrong


def equal() -> list[str]:
    """Sharded in every way a matrix can be, a step is what it is on one process."""
    wrong = []
    world = dist.get_world_size()
    ways: dict[str, tuple[Any, Callable[[int], Sequence[Any]]]] = {
        "rows": (line(), lambda i: [Shard(0)]),
        "columns and whole": (line(), lambda i: [(Shard(0), Shard(1), Replicate())[i % 3]]),
    }
    if world == 4:
        ways["HSDP"] = square(), lambda i: [Replicate(), Shard(0)]
        ways["two dims"] = square(), lambda i: [Shard(0), Shard(1)]
        ways["some"] = square(), lambda i: [Replicate(), Shard(i % 2)]
        ways["half a mesh"] = square()["b"], lambda i: [Shard(0)]
    for name, (mesh, placements) in ways.items():
        for label, chain in {
            "muon": muon(),
            "nanochat": nanochat(),
            "spectral": [Momentum(0.9), ClipSpectral(0.5)],
            "weights": [Onto(), Momentum(0.9)],
            "state": [Whiten(), Momentum(0.9)],
            "soap": [InBasis(SOAPBasis(every=2, max_dim=100), Adam(eps=1e-3)), WeightDecay(0.1)],
            "soap 2": [InBasis(SOAPBasis(every=2, first="step"), Momentum(0.9), ClipNorm(1.0))],
            "soap 3": [InBasis(SOAPBasis(every=2, first="use"), Adam(eps=1e-3))],
            "state kron": [
                Kron(
                    every=2, max_dim=100, layout={"p0": "(three rows) d -> three rows d, three=3"}
                ),
                ClipRMS(1.1),
            ],
            "layout": [Orthogonalize(layout=FUSED)],
            "state rows": [Rows(0.25, Orthogonalize(), lines="rows"), NeuronNorm(), ScaleByShape()],
            "polar": [Momentum(0.9), Steepest(Orthogonalize())],
            "state columns": [
                Rows(0.5, Orthogonalize(), 0.9),
                ScaleByShape(0.5, "inverse_columns"),
            ],
            "74": muon(),
        }.items():
            if name != "rows" and (label == "74" or (BRIEF and label not in ANY_WAY)):
                continue
            shapes = [(8, 12)] * 74 if label == "74" else [*GPT2, *UNEVEN]
            if label == "state kron" and name == "rows":
                shapes += VECTORS
            plain, split = both(shapes, mesh, placements)
            opts = []
            for params in (plain, split):
                named = [(f"p{i}", p) for i, p in enumerate(params)]
                opts.append(Modular(named, *chain, LR(0.02)))
            many = 4 if BRIEF else 5
            for step in range(many if label[:4] in ("stat", "soap") else 2):
                for params, opt in zip((plain, split), opts, strict=True):
                    give(params, step)
                    with same_null_spaces():
                        opt.step()
            away = max((a - whole(b)).abs().max().item() for a, b in zip(plain, split, strict=True))
            if label == "state":
                held, mine = [entries(opt) for opt in opts]
                most = held / world + 2 * (4 * WIDTH) ** 2  # the largest is on one rank
                if name == "rows" and not 0 < mine <= most:
                    wrong.append(f"equal {name} {label}: {mine} of {held} entries on one rank")
            if not away < 1e-5:
                wrong.append(f"equal {name} {label}: off by {away:.1e}")
    return wrong


def beside() -> list[str]:
    """What an owner keeps of matrices of one shape lies side by side, and stays where it is."""
    _, split = both([(8, 12)] * 6, line(), lambda i: [Shard(0)])
    opt, seen = Modular(split, InBasis(SOAPBasis(every=2), Adam()), LR(0.02)), []
    for step in range(3):
        give(split, step)
        opt.step()
        held = [opt.state[p]["InBasis/SOAPBasis/left"].to_local() for p in split]
        seen.append([t.data_ptr() for t in held if t.numel()])
    size = 8 * 8 * 4
    right = seen[0] == seen[2] and seen[0] == [seen[0][0] + size * k for k in range(len(seen[0]))]
    return [] if right else [f"beside: {seen}"]


def told() -> list[str]:
    """A rank that owns no matrix tells how many it kept, none, under the name that others have."""
    _, split = both([(8, 12)], line(), lambda i: [Shard(0)])
    chain = Whiten(), Rows(0.5, Orthogonalize()), InBasis(SOAPBasis(first="step"), Adam())
    opt = Modular(split, *chain, LR(0.02))
    give(split, 0)
    opt.step()
    kept = {name: int(x) for name, x in opt.metrics().items() if name.endswith("kept")}
    wanted = ["InBasis/SOAPBasis/kept", "Rows/kept", "Whiten/kept"]
    return [] if kept == dict.fromkeys(wanted, 0) else [f"told: {kept}"]


def gathered() -> list[str]:
    """Where ranks that share a matrix share no group it is gathered, and comes out the same."""
    known, exchange.all_coordinates = exchange.all_coordinates, lambda mesh: ()
    try:
        plain, split = both(
            UNEVEN, square(), lambda i: [Shard(0), Shard(1) if i % 2 else Replicate()]
        )
        opts = [Modular(params, *muon(), LR(0.02)) for params in (plain, split)]
        for params, opt in zip((plain, split), opts, strict=True):
            give(params, 0)
            with counted("all_to_all_single") as calls:
                opt.step()
        plan = opts[1].explain()
    finally:
        exchange.all_coordinates = known
    owned = "4 sharded matrices with an owner among 2 ranks"
    if f"{owned}; 3 sharded matrices gathered on every rank" not in plan:
        return [plan]
    away = max((a - whole(b)).abs().max().item() for a, b in zip(plain, split, strict=True))
    right = away < 1e-5 and calls["all_to_all_single"] == 2 * 3  # of the shapes that have owners
    return [] if right else [f"gathered: off by {away:.1e}, {dict(calls)}"]


def loads() -> list[str]:
    """The dearest first, each to the rank with the least to do."""
    found = exchange.owners([1.0, 5.0, 3.0, 3.0, 1.0, 0.0], range(2))
    return [] if found == [0, 0, 1, 1, 0, 1] else [f"loads: {found}"]


def model_and_optimizer(mesh: Any) -> tuple[nn.Module, Modular]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers = [nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 5)]
    model = nn.Sequential(*layers, nn.Linear(5, 12, bias=False))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    kinds = {"4.* | 3.weight": "state", "*.weight": "a", "*": "b"}
    rows = Rows(0.5, Orthogonalize())
    state = Chain(Whiten(), rows, Kron(every=2), InBasis(SOAPBasis(every=2), Adam()))
    vectors = Chain(Kron(every=2, eps=1e-6), Adam())
    three = Partition({"a": Chain(*nanochat()), "b": vectors, "state": state}, kinds)
    return model, Modular(model.named_parameters(), three, LR(0.02))


def _checkpoint(folder: str, save: bool) -> list[str]:
    """Save in the middle of a run, or load and compare every bit of state with what was saved."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, opt = model_and_optimizer(line())
    if save:
        for step in range(3):
            give(list(model.parameters()), step)
            opt.step()
    else:
        opt.init_state()
    state = get_optimizer_state_dict(model, opt)
    full, options = os.path.join(folder, "full.pt"), StateDictOptions(full_state_dict=True)
    if save:
        dcp.save(state, checkpoint_id=os.path.join(folder, "dcp"))
        both = _whole_state(opt), get_optimizer_state_dict(model, opt, options=options)
        if dist.get_rank() == 0:
            torch.save(both, full)
        return []
    dcp.load(state, checkpoint_id=os.path.join(folder, "dcp"))
    set_optimizer_state_dict(model, opt, state)
    wrong = _differences("load", _whole_state(opt), torch.load(full)[0])
    model, other = model_and_optimizer(line())
    other.init_state()
    set_optimizer_state_dict(model, other, torch.load(full)[1], options=options)
    wrong += _differences("full", _whole_state(other), torch.load(full)[0])
    for step in range(3, 5):  # the new owners go on, with what they were handed
        give(list(model.parameters()), step)
        other.step()
    lost = [key for key, t in _whole_state(other).items() if not torch.isfinite(t).all()]
    return [*wrong, *[f"on: {key}" for key in lost]]


def _whole_state(opt: Modular) -> dict[str, Tensor]:
    """All state of a state dict, gathered."""
    rows = opt.state_dict()["state"].items()
    return {f"{i}/{k}": whole(torch.as_tensor(t)) for i, row in rows for k, t in row.items()}


def _differences(label: str, got: dict[str, Tensor], kept: dict[str, Tensor]) -> list[str]:
    other = [key for key in got if not (key in kept and torch.equal(got[key], kept[key]))]
    return [f"{label}: {other} are others"] * bool(other) + [
        f"{label}: {key} was lost" for key in kept if key not in got
    ]


CHECKS = {f.__name__: f for f in (balance, beside, equal, gathered, loads, told)}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        if name == "brief":
            continue
        if name in ("save", "load"):
            wrong = _checkpoint(os.environ["CHECKPOINT_FOLDER"], name == "save")
        else:
            wrong = CHECKS[name]()
        print(f"{name}: {len(wrong)} wrong", *wrong, sep="\n", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


if __name__ == "__main__":
    main()
