"""A checkpoint of each kind, as released code wrote it, which every later release has to load.

`python -m tests.data.kinds FILE` writes them with the code that is there. The file that lies beside
this script is never written again; a later release adds one of its own. `checkpoints.py` has those
of plain chains; here are averages of weights, matrices and their bases, small state, rounding,
methods with a name, released gradients, handles, distributed checkpoints and written files.
"""

from __future__ import annotations

import io
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from tests.data.checkpoints import (
    BEFORE,
    DOUBLE,
    HALF,
    SINGLE,
    Named,
    here,
    is_weight,
    kind,
    model,
)
from tests.source.files import written
from torchzero_clip import (
    ADOPT,
    EMA,
    LR,
    ACClip,
    Accumulate,
    AdaClip,
    AdaGN,
    Adam,
    AdaptiveClip,
    AutoClip,
    Carry,
    Chain,
    ClipNorm,
    ClipValueGrowth,
    EMAQuantile,
    EMARatio,
    GeometricQuantile,
    Graft,
    Guard,
    Hyperball,
    InBasis,
    Kron,
    Lion,
    Lookahead,
    Masked,
    Modular,
    Momentum,
    Noise,
    Normalize,
    NormalizeByEMA,
    Orthogonalize,
    P2Quantile,
    Parallel,
    Partition,
    Prodigy,
    Reset,
    RMSprop,
    Rows,
    ScheduleFree,
    Shampoo,
    SkipLarge,
    SkipSpike,
    SOAPBasis,
    SpikeClip,
    TensorList,
    Transform,
    WeightAverage,
    WeightDecay,
    WeightEMA,
    When,
    ZClip,
    ZScoreClip,
    attach,
    named,
    release,
)
from torchzero_clip.core.sharding.layout import local

METHODS = (  # of which each keeps something else
    "adafactor",
    "adabelief",
    "adadelta",
    "adagc",
    "adagrad",
    "adam_atan2",
    "adamax",
    "adan",
    "ademamix",
    "asgd",
    "came",
    "dadapt_adam",
    "laprop",
    "lamb",
    "mars_adamw",
    "nadam",
    "prodigy",
    "radam",
    "rprop",
    "schedule_free_radam",
    "spam",
    "stable_adamw",
    "stable_spam",
    "yogi",
)
AFTER = 6  # steps after those of BEFORE, so that some are replayed where steps are
Grads = dict[str, Tensor | None]
Links = tuple[Transform, ...]
SECOND = {"lr": 0.02}  # what the group of the last parameter has of its own


def matrices(dtype: torch.dtype) -> Named:
    """The parameters that are matrices."""
    return {name: p for name, p in model(dtype).items() if p.dim() == 2}


def flat(params: Named) -> Tensor:
    """The values of all parameters, those that are here."""
    return torch.cat([local(p.detach()).reshape(-1) for p in params.values()])


def packed(data: bytes) -> Tensor:
    """The bytes of a file, most of which are air, in a tensor."""
    return torch.frombuffer(bytearray(zlib.compress(data, 9)), dtype=torch.uint8)


class Run:
    """A training that can be saved, loaded and gone on with.

    Args:
        params: Its parameters.
        links: The chain.
        shown: The links whose weights for evaluation are looked at.
        options: Of `Modular`, or of what makes the optimizer in its place.
    """

    def __init__(
        self, params: Named, links: Links, shown: tuple[str, ...] = (), **options: Any
    ) -> None:
        self.params, self.links, self.shown, self.options = params, links, shown, options
        self.start()

    def start(self) -> None:
        self.opt: Any = Modular(self.groups(), *self.links, **self.options)

    def groups(self) -> list[dict[str, Any]]:
        """The parameters, the last in a group of its own."""
        *most, last = self.params.items()
        return [{"params": most}, {"params": [last], **SECOND}]

    def steps(self, numbers: range) -> None:
        """Steps with gradients of their own; one parameter has none now and then."""
        for i in numbers:
            generator = torch.Generator().manual_seed(i)
            grads: Grads = {}
            for name, p in self.params.items():
                noise = torch.rand(p.shape, generator=generator, dtype=torch.float64) * 2 - 1
                missing = name == "b.weight" and i % 4 == 1
                grads[name] = None if missing else (noise * (1 + i % 3)).to(p.dtype)
            self.step(grads)

    def step(self, grads: Grads) -> None:
        for name, p in self.params.items():
            p.grad = grads[name]
        self.opt.step()

    def saved(self) -> Any:
        return self.opt.state_dict()

    def load(self, saved: Any) -> None:
        self.opt.load_state_dict(saved)

    def end(self) -> Tensor:
        """The weights, and those for evaluation."""
        seen = [flat(self.params)]
        for name in self.shown:
            with self.opt.averaged(name):
                seen.append(flat(self.params))
        return torch.cat(seen)


class Evaluated(Run):
    """Saved while the weights for evaluation are in the parameters."""

    def saved(self) -> Any:
        self.opt.eval()
        held = self.opt.state_dict()
        self.opt.train()
        return held

    def load(self, saved: Any) -> None:
        super().load(saved)
        self.opt.train()


class Released(Run):
    """Gradients are dropped in the pass backward."""

    def start(self) -> None:
        self.opt = release(self.groups(), *self.links, **self.options)

    def step(self, grads: Grads) -> None:
        pairs = [(self.params[name], grad) for name, grad in grads.items() if grad is not None]
        torch.stack([(p * grad).sum() for p, grad in pairs]).sum().backward()
        self.opt.step()


class Attached(Run):
    """Behind an optimizer of torch's, whose checkpoint is another, or has it inside."""

    def start(self) -> None:
        self.inner = torch.optim.AdamW(self.groups(), lr=0.01)
        self.opt = attach(self.inner, *self.links, **self.options)

    def step(self, grads: Grads) -> None:
        for name, p in self.params.items():
            p.grad = grads[name]
        self.inner.step()

    def saved(self) -> Any:
        inner = self.inner.state_dict()
        alone = not self.options.get("in_checkpoint")
        return {"optimizer": inner, **({"handle": self.opt.state_dict()} if alone else {})}

    def load(self, saved: Any) -> None:
        self.inner.load_state_dict(saved["optimizer"])
        if "handle" in saved:
            self.opt.load_state_dict(saved["handle"])


class Written(Run):
    """The class of a file that the chain wrote, with that file."""

    def start(self) -> None:
        self.text = Modular(self.groups(), *self.links, **self.options).to_source()
        self.made()

    def made(self) -> None:
        self.opt = written(self.text)(self.groups())

    def saved(self) -> Any:
        return {"file": self.text, "state": self.opt.state_dict()}

    def load(self, saved: Any) -> None:
        self.text = saved["file"]
        self.made()
        self.opt.load_state_dict(saved["state"])


class Distributed(Run):
    """A distributed checkpoint of one process: a model and an optimizer in a folder of files."""

    def start(self) -> None:
        layers = {name.partition(".")[0]: nn.ParameterDict() for name in self.params}
        for name, p in self.params.items():
            layer, _, own = name.partition(".")
            layers[layer][own] = p
        self.model = nn.ModuleDict(layers)
        super().start()

    def content(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.opt)
        return {"model": get_model_state_dict(self.model), "optimizer": optimizer}

    def saved(self) -> Any:
        """The files, by their names."""
        with tempfile.TemporaryDirectory() as folder:
            dcp.save(self.content(), checkpoint_id=folder, no_dist=True)
            files = sorted(Path(folder).iterdir())
            return {file.name: packed(file.read_bytes()) for file in files}

    def load(self, saved: Any) -> None:
        self.opt.init_state()
        found = self.content()
        with tempfile.TemporaryDirectory() as folder:
            for name, held in saved.items():
                Path(folder, name).write_bytes(zlib.decompress(bytes(held.tolist())))
            dcp.load(found, checkpoint_id=folder, no_dist=True)
        set_model_state_dict(self.model, found["model"])
        set_optimizer_state_dict(self.model, self.opt, found["optimizer"])


class Sharded(Distributed):
    """The same of parameters that lie on a mesh, of this process alone."""

    def start(self) -> None:
        self.mesh = init_device_mesh("cpu", (1,))
        self.params = {name: Parameter(self.sharded(p)) for name, p in self.params.items()}
        super().start()

    def sharded(self, t: Tensor) -> Tensor:
        return distribute_tensor(t.detach(), self.mesh, [Shard(0)])

    def step(self, grads: Grads) -> None:
        super().step({n: None if grad is None else self.sharded(grad) for n, grad in grads.items()})


class Kind(NamedTuple):
    """What is saved: how it is made, of which parameters, and in which dtype."""

    links: Links
    run: type[Run] = Run
    dtype: torch.dtype = SINGLE
    only_matrices: bool = False
    options: Mapping[str, Any] = MappingProxyType({})
    shown: tuple[str, ...] = ()

    def start(self, **ways: Any) -> Run:
        """A new run, in one of the ways of execution."""
        params = (matrices if self.only_matrices else model)(self.dtype)
        return self.run(params, self.links, self.shown, **{**self.options, **ways})


ADAM: Links = (ClipNorm(0.5), Adam(), WeightDecay(0.1), LR(0.01))
RATE = LR(0.01)


def odd(step: int) -> bool:
    return step % 2 == 1


def total(branches: Mapping[str, TensorList]) -> TensorList:
    """The sum of two branches."""
    fast, slow = branches.values()
    return fast.add_(slow)


def method(name: str, only_matrices: bool = False, **options: Any) -> Kind:
    """A method with a name."""
    free = {"prodigy": {"d0": 0.01}, "dadapt_adam": {"d0": 0.01}, "adadelta": {"lr": 30.0}}
    made = named(name, **free.get(name, {"lr": 0.01}))
    return Kind((made,), only_matrices=only_matrices, options=options)


def judged(*criteria: Any) -> Links:
    return tuple([AdaptiveClip(criterion, warmup_steps=2) for criterion in criteria])


KINDS: dict[str, Kind] = {
    # weights for evaluation
    "weight ema": Kind((*ADAM, WeightEMA(0.9)), shown=("WeightEMA",)),
    "weight average": Kind((*ADAM, WeightAverage()), shown=("WeightAverage",)),
    "lookahead": Kind((*ADAM, Lookahead(2)), shown=("Lookahead",)),
    "schedule free": Kind((*ADAM, ScheduleFree()), shown=("ScheduleFree",)),
    "two averages": Kind(
        (*ADAM, WeightEMA(0.5, name="short"), WeightEMA(0.9, name="long")), shown=("short", "long")
    ),
    "average of half": Kind(
        (*ADAM, WeightEMA(0.9)), dtype=HALF, options={"rounding": "kahan"}, shown=("WeightEMA",)
    ),
    "in evaluation": Kind((*ADAM, ScheduleFree()), Evaluated, shown=("ScheduleFree",)),
    # matrices and bases
    "muon beside adam": Kind(
        (
            ClipNorm(0.5),
            Partition({"matrix": Chain(EMA(0.9), Orthogonalize()), "other": Adam()}, kind),
            RATE,
        )
    ),
    "shampoo": Kind((Graft(Shampoo(every=2), Adam()), RATE), only_matrices=True),
    "kron": Kind((Kron(), RATE), only_matrices=True),
    "in basis": Kind((InBasis(SOAPBasis(every=2), Lion()), RATE), only_matrices=True),
    "rows": Kind((Rows(0.5, Orthogonalize()), RATE), only_matrices=True),
    "muon": method("muon", True),
    "normuon": method("normuon", True),
    "adamuon": method("adamuon", True),
    "nanochat": method("nanochat", True),
    "dion3": method("dion3", True),
    "soap": method("soap", True),
    "klsoap": method("klsoap", True),
    "soap_hyperball": method("soap_hyperball", True),
    # small state and rounding
    "small state": Kind(ADAM, options={"state_dtype": "bfloat16"}),
    "small state of one link": Kind(
        (Momentum(), ADOPT(state_dtype="bfloat16"), RATE), options={"rounding": "nearest"}
    ),
    "small muon": method("muon", True, state_dtype="bfloat16"),
    "small and stochastic": Kind(
        ADAM, dtype=HALF, options={"state_dtype": "bfloat16", "rounding": "stochastic"}
    ),
    "small and kahan": Kind(
        ADAM, dtype=HALF, options={"state_dtype": "bfloat16", "rounding": "kahan"}
    ),
    "stochastic in float16": Kind(
        (Momentum(), RATE), dtype=torch.float16, options={"rounding": "stochastic"}
    ),
    # methods with a name
    **{name: method(name) for name in METHODS},
    "prodigy in double": Kind((Prodigy(d0=0.01), LR(1.0)), dtype=DOUBLE),
    # rules with memory that no method has
    "criteria": Kind(
        (*judged(EMAQuantile(0.5), P2Quantile(0.5), GeometricQuantile(0.5), EMARatio()), RATE),
    ),
    "clips": Kind(
        (
            AutoClip(warmup_steps=2),
            ZScoreClip(warmup_steps=2),
            AdaGN(),
            ACClip(),
            AdaClip(),
            LR(1.0),
        )
    ),
    "norms": Kind((ClipValueGrowth(), NormalizeByEMA(), SpikeClip(), Hyperball(), LR(1.0))),
    "flow": Kind(
        (
            When(odd, Momentum()),
            Reset(EMA(0.5), 3, 2),
            Parallel({"fast": EMA(0.1), "slow": EMA(0.9)}, total),
            Carry(ClipNorm(0.5)),
            Graft(Normalize(), EMA(0.5)),
            Noise(0.1),
            RATE,
        )
    ),
    "guards": Kind(
        (Guard(), SkipLarge(50.0), SkipSpike(window=4, least=2, sigmas=1.0), Accumulate(2), *ADAM)
    ),
    # gradients that are released
    "released": Kind(ADAM, Released),
    "released by the last step's norm": Kind(
        (ClipNorm(0.5, dim="global"), Adam(), RATE), Released, options={"limit": "last step"}
    ),
    "released small": Kind(ADAM, Released, options={"state_dtype": "bfloat16"}),
    # a handle of torch's optimizer
    "attached": Kind((ZClip(warmup_steps=2), Momentum(0.5)), Attached),
    "attached with an average": Kind(
        (ZClip(warmup_steps=2),), Attached, options={"after": WeightEMA(0.9)}, shown=("WeightEMA",)
    ),
    "attached in its checkpoint": Kind(
        (ZClip(warmup_steps=2), Masked(EMA(0.5), is_weight)),
        Attached,
        options={"in_checkpoint": True},
    ),
    # files
    "written": Kind((ClipNorm(0.5, dim="global"), Adam(), WeightDecay(0.1), RATE), Written),
    "written with memory": Kind((ZClip(warmup_steps=2), RMSprop(), RATE, WeightEMA(0.9)), Written),
    "written with a criterion": Kind(
        (*judged(P2Quantile(0.5)), ADOPT(), WeightDecay(0.1), RATE, Lookahead(2)), Written
    ),
    # folders of files
    "distributed": Kind((ZClip(warmup_steps=2), *ADAM), Distributed),
    "distributed matrices": Kind((named("soap", lr=0.01),), Distributed, only_matrices=True),
    "sharded": Kind((ZClip(warmup_steps=2), *ADAM), Sharded),
    "sharded matrices": Kind((named("muon", lr=0.01),), Sharded, only_matrices=True),
}


@contextmanager
def one_process(kind: Kind) -> Iterator[None]:
    """A group of this process alone, for those that are sharded."""
    if issubclass(kind.run, Sharded):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def recorded(name: str) -> dict[str, Any]:
    """One run: what is saved after some steps, and the weights then and after more."""
    with one_process(KINDS[name]):
        run = KINDS[name].start()
        run.steps(range(BEFORE))
        before = {"weights": flat(run.params), "saved": run.saved()}
        before = through_a_file(before)
        run.steps(range(BEFORE, BEFORE + AFTER))
        return {**before, "end": run.end()}


def through_a_file(saved: Any) -> Any:
    """What is read of what is saved now, which the run does not change any more."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def mark() -> str:
    """What the last bit may hang on."""
    return f"{here()} torch {torch.__version__}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs = {name: recorded(name) for name in KINDS}
    torch.save({"machine": mark(), "runs": runs}, sys.argv[1])
