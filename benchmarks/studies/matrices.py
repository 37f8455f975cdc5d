"""What each method for matrices costs GPT-2 small, on one rank and on several under FSDP2.

    python -m benchmarks.studies.matrices              # counts, and writes results/matrices.csv
    python -m benchmarks.studies.matrices soap shampoo # these lines of it anew
    python -m benchmarks.studies.matrices --table      # the table of what the file says

The 48 matrices have the method, the other 100 tensors Adam, as `matrices_and_rest` parts them. Real
steps are done by the real code on fake tensors of an imagined GPU and, for several ranks, in a
process group that only pretends: each rank is a process that does all that it would do, and
computes nothing. Counted is what reaches torch's dispatcher: products of matrices as torch's own
counter has them, decompositions by the formulas of DECOMPOSITIONS, bytes that leave a rank. What
goes over entries, as Adam does, is no operation here.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import torchzero_clip
from benchmarks import rows
from benchmarks.step.shapes import gpt
from torchzero_clip import LR, Adam, Chain, Hyperball, Modular, Partition, WeightDecay, named
from torchzero_clip.audit import fake_cuda

RESULTS = Path(__file__).parents[1] / "results" / "matrices.csv"
RANKS = 4
METHODS: dict[str, dict[str, Any]] = {  # names, and what is not as `named` has it
    "adamw": {},
    "muon": {},
    "normuon": {},
    "dion2": {},
    "dion3": {},
    "adamuon": {},
    "polar": {},
    "scion": {"momentum": 0.1},
    "soap": {},
    "soap_hyperball": {},
    "klsoap": {},
    "shampoo": {},
    "kron": {"every": 10},  # at first each step has a lesson, at last every 34th
}
MATRICES, REST = "matrices", "rest"
Shapes = Sequence[tuple[int, ...]]
Named = dict[str, tuple[int, ...]]

aten = torch.ops.aten
DECOMPOSITIONS: dict[Any, Callable[..., float]] = {
    # Golub and Van Loan, Matrix computations: eigenvectors of a symmetric n x n by QR iteration
    aten._linalg_eigh: lambda a, *_, **__: 9.0 * a.shape[-1] * a.numel(),
    # Householder's R, and as much again for Q
    aten.linalg_qr: lambda a, *_, **__: _qr(a, *sorted(a.shape[-2:])),
    aten.linalg_solve_triangular: lambda a, b, **_: float(a.shape[-1] * b.numel()),
}
UNCOUNTED = ("linalg", "cholesky", "lu_", "svd", "inverse", "solve", "lstsq")
ENTRIES = ("linalg_vector_norm",)  # not products


def _qr(a: Tensor, short: int, long: int) -> float:
    """The QR decompositions of a stack of matrices."""
    return a.numel() / (short * long) * 2 * 2 * short**2 * (long - short / 3)


class Counted(TorchDispatchMode):
    """What a step asks of one rank: operations, and bytes that it sends to others."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks, self.operations, self.sent = rank, ranks, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):  # it comes again, as its parts
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet, name = func.overloadpacket, func.overloadpacket.__name__
        if packet in flop_registry:
            self.operations += flop_registry[packet](*args, **kwargs, out_val=out)
        elif packet in DECOMPOSITIONS:
            self.operations += DECOMPOSITIONS[packet](*args, **kwargs)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self.sent += self._sends(name, *args)
        elif name not in ENTRIES and any(word in name for word in UNCOUNTED):
            raise NotImplementedError(f"{func}: say in DECOMPOSITIONS how many operations it does")
        return out

    def _sends(self, name: str, *args: Any) -> float:
        """The bytes that leave this rank, where collectives of all ranks go in a ring."""
        if name == "alltoall_base_":
            _, data, _, _, parts, *_ = args
            return float((sum(parts) - parts[self.rank]) * data.element_size())
        if name == "_allgather_base_":
            return float((self.ranks - 1) * args[1].numel() * args[1].element_size())
        if name == "allreduce_":
            size = sum(t.numel() * t.element_size() for t in args[0])
            return 2 * (self.ranks - 1) / self.ranks * size
        raise NotImplementedError(f"{name}: say in Counted._sends what it sends")


@dataclass
class Costs:
    """What one rank does in each step of a method, from the first, and the state that it keeps."""

    operations: list[float]
    sent: list[float]
    state: int


def names(shapes: Shapes) -> Named:
    """Names for shapes, by which embeddings, the first two, are told from hidden matrices."""
    return {f"{'embedding' if i < 2 else 'h'}.{i}": shape for i, shape in enumerate(shapes)}


def kind(name: str, param: Tensor) -> str:
    return MATRICES if param.dim() == 2 and name.startswith("h.") else REST


def method(name: str, stagger: bool) -> Chain:
    """The direction that it is, without what comes after; its matrices may take turns."""
    after = WeightDecay, LR, Hyperball
    chain = Chain(*[x for x in named(name, **METHODS[name]) if not isinstance(x, after)])
    return Chain.from_config(in_turns(chain.to_config())) if stagger else chain


def in_turns(config: Any) -> Any:
    """The config of a chain whose refreshed links let parameters take turns."""
    if isinstance(config, (list, tuple)):
        return [in_turns(x) for x in config]
    if not isinstance(config, dict):
        return config
    made = {name: in_turns(x) for name, x in config.items()}
    refreshed = hasattr(getattr(torchzero_clip, str(config.get("type")), None), "stagger")
    return {**made, "stagger": True} if refreshed else made


def period(name: str) -> int:
    """The steps from one refresh to the next."""
    return max([getattr(tfm, "every", None) or 1 for tfm in method(name, False).walk()])


def costs(name: str, shapes: Shapes, stagger: bool, rank: int = 0, ranks: int = 1) -> Costs:
    """The first step of a method and all up to the second refresh, as this rank does them."""
    with on_rank(rank, ranks) as mesh, fake_cuda():
        params = {n: Parameter(_part(s, mesh)) for n, s in names(shapes).items()}
        for p in params.values():
            p.grad = _part(tuple(p.shape), mesh)
        parts = Partition({MATRICES: method(name, stagger), REST: Adam()}, kind)
        opt = Modular(params.items(), parts, WeightDecay(0.1), LR(1e-3))
        found = Costs([], [], 0)
        for _ in range(1 + max(period(name), 2)):
            with Counted(rank, ranks) as counted:
                opt.step()
            found.operations.append(counted.operations)
            found.sent.append(counted.sent)
        found.state = sum(_size(t) for state in opt.state.values() for t in state.values())
    return found


@contextmanager
def on_rank(rank: int, ranks: int) -> Iterator[Any]:
    """A block in which this process is one of several, with their mesh, or the only one."""
    if ranks == 1:
        yield None
        return
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed = torch.distributed
    distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cuda", (ranks,))
    finally:
        distributed.destroy_process_group()


def _part(shape: tuple[int, ...], mesh: Any) -> Tensor:
    """A tensor, of which FSDP2 gives a rank some rows."""
    if mesh is None:
        return torch.empty(shape, device="cuda:0")
    from torch.distributed.tensor import DTensor, Shard

    whole = torch.empty(shape, device="meta")
    parts = whole.chunk(mesh.size())
    here = parts[mesh.get_rank()].shape if mesh.get_rank() < len(parts) else (0, *shape[1:])
    local = torch.empty(here, device="cuda:0")
    form = {"shape": whole.shape, "stride": whole.stride()}
    part: Tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **form)
    return part


def _size(t: Any) -> int:
    """The bytes of a tensor that are here."""
    if not isinstance(t, Tensor):
        return 0
    here: Any = t.to_local() if hasattr(t, "to_local") else t
    return int(here.numel() * here.element_size())


# ---------------------------------------------------------------------- lines


@dataclass
class Line:
    """A method. `_rank` is of the rank with most, `_whole` of one rank alone that has everything;
    `longest` is the longest step of those from one refresh to the next over their mean, where the
    slowest rank of each counts; `turns` is that where parameters take turns.
    """

    method: str
    between_rank: float
    between_whole: float
    refresh_rank: float
    refresh_whole: float
    first_rank: float
    first_whole: float
    state_rank: float
    state_whole: float
    sent_between: float
    sent_refresh: float
    every: int
    longest: float
    turns: float
    date: str
    commit: str


def line(name: str, ranks: Sequence[Costs], staggered: Sequence[Costs], whole: Costs) -> Line:
    """The line of a method, of what its ranks did without turns and with, and of one alone."""
    slowest = _slowest([x.operations for x in ranks])
    sent = _slowest([x.sent for x in ranks])
    ask = ["git", "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.run(ask, check=False, capture_output=True, text=True, cwd=RESULTS.parent)
    turns = _slowest([x.operations for x in staggered])
    numbers = [
        min(slowest[1:]),
        min(whole.operations[1:]),
        max(slowest[1:]),
        max(whole.operations[1:]),
        slowest[0],
        whole.operations[0],
        max(x.state for x in ranks),
        whole.state,
        min(sent[1:]),
        max(sent[1:]),
    ]
    return Line(
        name,
        *map(float, numbers),
        period(name),
        *[rows.digits(max(x[1:]) * len(x[1:]) / (sum(x[1:]) or 1)) for x in (slowest, turns)],
        datetime.date.today().isoformat(),
        commit.stdout.strip() or "none",
    )


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """For each step the rank with most."""
    return [max(step) for step in zip(*ranks, strict=True)]


def _rank(rank: int, ranks: int, asked: Sequence[str], shapes: Shapes, folder: str) -> None:
    """All that one rank does: a process, since torch keeps much of what a rank is."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = {(n, s): costs(n, shapes, s, rank, ranks) for n in asked for s in turns_of(n)}
    torch.save({key: asdict(x) for key, x in found.items()}, Path(folder) / str(rank))


def turns_of(name: str) -> tuple[bool, ...]:
    """Where nothing is refreshed there are no turns to take."""
    return (False, True) if period(name) > 1 else (False,)


def counted(asked: Sequence[str], shapes: Shapes, ranks: int) -> Iterator[Line]:
    """The lines of methods."""
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, asked, shapes, folder)
        torch.multiprocessing.spawn(_rank, args, nprocs=ranks)
        found = [torch.load(Path(folder) / str(rank)) for rank in range(ranks)]
    for name in asked:
        each = {s: [Costs(**x[name, s]) for x in found] for s in turns_of(name)}
        yield line(name, each[False], each.get(True, each[False]), costs(name, shapes, False))


def table(lines: Sequence[Line] | None = None) -> str:
    """A row for each method, and when it was counted."""
    lines = rows.read(RESULTS, Line) if lines is None else lines
    out = [
        "| | operations a rank, 10⁹ | at a refresh | of the whole | first step | "
        "state a rank, MB | in all | sent a rank, MB | at a refresh | "
        "longest step over the mean | with turns |",
        "|---|" + "--:|" * 10,
    ]
    for x in lines:
        shares = [_share(x.between_rank, x.between_whole), _share(x.refresh_rank, x.refresh_whole)]
        once = x.every == 1
        cells = [
            _giga(x.between_rank),
            "" if once else _giga(x.refresh_rank),
            shares[0] if once or shares[0] == shares[1] else ", ".join(shares),
            "" if x.first_rank == x.between_rank else _giga(x.first_rank),
            *[f"{size / 1e6:.0f}" for size in (x.state_rank, x.state_whole)],
            f"{x.sent_between / 1e6:.0f}",
            "" if x.sent_refresh == x.sent_between else f"{x.sent_refresh / 1e6:.0f}",
            *(["", ""] if once else [f"{x.longest:.2g}", f"{x.turns:.2g}"]),
        ]
        out.append(f"| `{x.method}` | {' | '.join(cells)} |")
    when = sorted({(x.date, x.commit) for x in lines})
    told = "; ".join(f"{date}, commit {commit}" for date, commit in when)
    return "\n".join([*out, "", f"*`python -m benchmarks.studies.matrices`, {told}*"])


def _giga(count: float) -> str:
    return f"{count / 1e9:.0f}"


def _share(rank: float, whole: float) -> str:
    return f"{rank / whole:.3f}" if whole else ""


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.studies.matrices", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("methods", nargs="*", help="all, unless given")
    parser.add_argument("--table", action="store_true", help="count nothing, print the table")
    options = parser.parse_args(given)
    if not options.table:
        asked = options.methods or list(METHODS)
        made = list(counted(asked, gpt(768, 12), RANKS))
        others = [x for x in rows.read(RESULTS, Line) if x.method not in asked]
        order = list(METHODS)
        rows.write(RESULTS, Line, sorted([*others, *made], key=lambda x: order.index(x.method)))
    print(table())


if __name__ == "__main__":
    main()
