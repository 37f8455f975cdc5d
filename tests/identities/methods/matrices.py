"""Methods that treat a weight as a matrix."""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.identities.follow import need, official_file, official_package, official_text
from tests.identities.identity import optimizer
from tests.identities.inputs import MATRICES, Inputs
from torchzero_clip import LR, Chain, Momentum, Orthogonalize, WeightDecay, named
from torchzero_clip.modules.matrices import whitening
from torchzero_clip.published.matrix_methods import DION_COEFFICIENTS

GROUPS: Any = (
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.0},
)
NO_FACTOR = "the reference has no such option"


def official_muon() -> Any:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon since 2.9")
    return torch.optim.Muon


@optimizer(
    "muon",
    '`EMA(nesterov=True)`, `Orthogonalize(scale="original")`, `WeightDecay`, `LR` is Muon',
    source="torch.optim.Muon, its iteration in float32",
    groups=GROUPS,
    keys={"beta": "momentum"},
    inputs=Inputs(MATRICES),
    rtol={torch.float32: 1e-5},
)
def muon(groups: Any) -> Any:
    class InFloat32(official_muon()):  # type: ignore[misc]
        """torch's own steps, without the cast to bfloat16 in its iteration."""

        def step(self, closure: Any = None) -> Any:
            with NoBfloat16():
                return super().step(closure)

    return InFloat32(groups)


class NoBfloat16(TorchFunctionMode):
    """Gives a copy in its own dtype where a tensor is asked for in bfloat16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.bfloat16 or kwargs.get("dtype") == torch.bfloat16:
            return args[0].clone()
        return func(*args, **kwargs)


@optimizer(
    "muon_bfloat16",
    "The same chain is Muon as torch ships it, up to the rounding of bfloat16",
    source="torch.optim.Muon",
    ours=lambda **options: named("muon", **options),
    groups=GROUPS,
    keys={"beta": "momentum"},
    inputs=Inputs(MATRICES, zero_start=False),  # such a weight is the sum of roundings alone
    rtol={torch.float32: 3e-2},
)
def muon_bfloat16(groups: Any) -> Any:
    return official_muon()(groups)


@optimizer(
    "normuon",
    "Muon with `NeuronNorm` after `Orthogonalize` is NorMuon",
    source="zichongli5/NorMuon d45c9a4, `SingleDeviceNorMuon`, its iteration in float32",
    ours=lambda beta2, **options: named("normuon", beta=beta2, **options),
    groups=({**GROUPS[0], "beta2": 0.95}, {**GROUPS[1], "beta2": 0.9}),
    keys={"EMA/beta": "momentum", "NeuronNorm/beta": "beta2"},
    # it adds 1e-7 to norms and 1e-10 to √V; and rows without a gradient go on as if it were zero
    inputs=Inputs(MATRICES, size=100.0, gaps=False),
    rtol={torch.float32: 1e-5, torch.float64: 1e-6},
)
def normuon(groups: Any) -> Any:
    official: Any = official_file("zichongli5/NorMuon", "normuon.py").SingleDeviceNorMuon

    class InOnePrecision(official):  # type: ignore[misc]
        """The official steps, without the cast to bfloat16 in the iteration."""

        def step(self, closure: Any = None) -> Any:
            with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
                return super().step(closure)

    return InOnePrecision(groups)


@optimizer(
    "muoneq",
    "Muon with `EqualRows` in front of `Orthogonalize` is MuonEq (R)",
    source="MaeChd/muon-eq 99b6c8b, `MuonEq` of its language models, in one precision",
    ours=lambda wd, **options: named("muoneq", weight_decay=wd, **options),
    groups=(
        {"lr": 0.05, "momentum": 0.9, "wd": 0.1},
        {"lr": 0.02, "momentum": 0.8, "wd": 0.02},
    ),
    keys={"weight_decay": "wd"},
    constant={"dampening": NO_FACTOR},
    inputs=Inputs(MATRICES, size=1e4),  # it adds 1e-8 to squares of norms, and 1e-7 to a norm
    rtol={torch.float32: 1e-5, torch.float64: 1e-6},
)
def muoneq(groups: Any) -> Any:
    path = "llm-opt-baseline-gpu/llm-baselines/src/optim/muoneq.py"
    official: Any = official_file("MaeChd/muon-eq", path).MuonEq

    class InOnePrecision(official):  # type: ignore[misc]
        """The official steps, without the cast to bfloat16 in the iteration."""

        def step(self, closure: Any = None) -> Any:
            with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
                return super().step(closure)

    opt = InOnePrecision(muon_params=[p for group in groups for p in group["params"]])
    opt.param_groups = [{**opt.defaults, **group} for group in groups]  # it makes one group
    return opt


@optimizer(
    "muon_plus",
    "Muon with `Normalize` over rows, then columns, after `Orthogonalize` is Muon+ (row_col)",
    source="K1seki221/MuonPlus 8a9ace1, `norm_mode=row_col`, `rms_scaling=False`, in one precision",
    groups=GROUPS,
    constant={
        "dampening": NO_FACTOR,
        "Normalize/norm_value": NO_FACTOR,
        "Normalize_2/norm_value": NO_FACTOR,
    },
    inputs=Inputs(MATRICES, size=100.0),  # it adds 1e-7 to norms and to squares of norms
    rtol={torch.float32: 1e-5, torch.float64: 1e-5},
)
def muon_plus(groups: Any) -> Any:
    optim: Any = types.ModuleType("utils.optim")
    express: Any = types.ModuleType("utils.optim.polar_express")
    express.PolarExpress = express.FastApplyPolarExpress = None  # other iterations
    package = {"utils": types.ModuleType("utils"), "utils.optim": optim, express.__name__: express}
    uncompiled = mock.patch.object(torch, "compile", lambda function: function)
    with mock.patch.dict(sys.modules, package), uncompiled:
        official = official_file("K1seki221/MuonPlus", "utils/optim/muon_plus.py")

    class InOnePrecision(official.MuonPlus):  # type: ignore[misc,name-defined]
        """The official steps, without the cast to bfloat16 in the iteration."""

        def step(self, closure: Any = None) -> Any:
            with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
                return super().step(closure)

    names = [(f"weight{i}", p) for i, p in enumerate(p for g in groups for p in g["params"])]
    opt = InOnePrecision(names, norm_mode="row_col", rms_scaling=False)
    options = [{**opt.defaults, **group} for group in groups]  # it makes one group
    opt.param_groups = options
    return opt


@optimizer(
    "nanochat",
    "Momentum, `EqualRows`, Polar Express, `Normalize(per_shape=...)`, `NeuronNorm` and cautious "
    "decay are what nanochat does with matrices",
    source="karpathy/nanochat 92d63d4, `nanochat/optim.py`, in float32",
    groups=(
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0, "beta2": 0.9},  # the tall ones
        {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.1, "beta2": 0.8},
    ),
    ours=lambda beta2, **options: named("nanochat", beta=beta2, **options),
    keys={"EMA/beta": "momentum", "NeuronNorm/beta": "beta2"},
    constant={"norm_value": NO_FACTOR},
    # it adds 1e-6 to norms, and asks for a gradient of every row
    inputs=Inputs(MATRICES, size=100.0, gaps=False),
    rtol={torch.float32: 1e-5, torch.float64: 1e-6},
)
def nanochat(groups: Any) -> Any:
    common: Any = types.ModuleType("nanochat.common")
    common.COMPUTE_DTYPE = torch.float32
    package = {"nanochat": types.ModuleType("nanochat"), "nanochat.common": common}
    uncompiled = mock.patch.object(torch, "compile", return_value=lambda function: function)
    with mock.patch.dict(sys.modules, package), uncompiled:
        official = official_file("karpathy/nanochat", "nanochat/optim.py")
    rows = [  # a group for each shape, as it asks for
        {**group, "params": [p], "kind": "muon", "ns_steps": 5}
        for group in groups
        for p in group["params"]
    ]
    return official.MuonAdamW(rows)


@optimizer(
    "moonlight",
    '`Momentum(nesterov=True)`, `Orthogonalize(scale="match_rms_adamw")`, `WeightDecay`, `LR` is '
    "the Muon of Moonlight",
    source="MoonshotAI/Moonlight c2ad5b2, `Muon` of `examples/toy_train.py`, in one precision",
    ours=lambda lr, momentum, wd: Chain(
        Momentum(momentum, nesterov=True),
        Orthogonalize(scale="match_rms_adamw"),
        WeightDecay(wd),
        LR(lr),
    ),
    groups=(
        {"lr": 0.05, "momentum": 0.9, "wd": 0.1},
        {"lr": 0.02, "momentum": 0.8, "wd": 0.0},
    ),
    keys={"weight_decay": "wd"},
    constant={"dampening": NO_FACTOR},
    inputs=Inputs(MATRICES, size=100.0),  # it adds 1e-7 to norms
    rtol={torch.float32: 1e-5, torch.float64: 1e-6},
)
def moonlight(groups: Any) -> Any:
    uncompiled = mock.patch.object(torch, "compile", lambda function: function)
    of_its_model = ("datasets", "loguru", "tqdm", "transformers")
    stubs = mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in of_its_model})
    with uncompiled, stubs:
        official: Any = official_file("MoonshotAI/Moonlight", "examples/toy_train.py").Muon

    class InOnePrecision(official):  # type: ignore[misc]
        """The official steps, without the cast to bfloat16."""

        def step(self, closure: Any = None) -> Any:
            with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
                return super().step(closure)

    opt = InOnePrecision(muon_params=[p for group in groups for p in group["params"]])
    opt.param_groups = [{**opt.defaults, **group} for group in groups]  # it makes one group
    return opt


ODD: Any = (("a.wide", (5, 7)), ("a.tall", (7, 3)), ("b.square", (5, 5)), ("b.zero", (3, 5)))


@optimizer(
    "adamuon",
    '`EMA(nesterov=True)`, `Sign`, `Orthogonalize`, `RMSprop`, `Normalize(0.2, "rms")` is AdaMuon',
    source="Chongjie-Si/AdaMuon 369f0b3, `gpt2/models/optimizers/adamuon.py`, in one precision",
    groups=({**GROUPS[0], "eps": 1e-8}, {**GROUPS[1], "eps": 2e-8}),
    keys={"beta": "momentum"},
    constant={
        "alpha": "it is None here, and equals `beta`",
        "norm_value": "the reference always uses 0.2",
    },
    # where sides are even, signs may become orthogonal with zeros that are rounding, of which
    # RMSprop makes entries like the others
    inputs=Inputs(ODD),
    rtol={torch.float32: 1e-5, torch.float64: 2e-7},
)
def adamuon(groups: Any) -> Any:
    params = [p for group in groups for p in group["params"]]
    empty = torch.empty

    def on_host(*shape: int, **options: Any) -> Tensor:
        return empty(*shape, dtype=params[0].dtype)

    def gathered(out: Tensor, part: Tensor, async_op: bool) -> Any:
        out.copy_(part.view_as(out))
        return types.SimpleNamespace(wait=lambda: None)

    module = official_file("Chongjie-Si/AdaMuon", "gpt2/models/optimizers/adamuon.py")
    module.dist = types.SimpleNamespace(all_gather_into_tensor=gathered)

    class OnOneProcess(module.AdaMuon):  # type: ignore[misc,name-defined]
        """The official steps of what has a gradient, on the host, without the cast to bfloat16."""

        def step(self) -> Any:
            whole = [(group, group["params"]) for group in self.param_groups]
            for group, held in whole:
                group["params"] = [p for p in held if p.grad is not None]
            self.param_groups = [group for group, _ in whole if group["params"]]
            try:
                with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
                    super().step()
            finally:
                self.param_groups = [group for group, _ in whole]
                for group, held in whole:
                    group["params"] = held

    with mock.patch.object(torch, "empty", on_host):
        opt = OnOneProcess(params, rank=0, world_size=1)
    for group in opt.param_groups:  # one for each number of entries
        mine = next(g for g in groups if any(p is group["params"][0] for p in g["params"]))
        group.update({key: value for key, value in mine.items() if key != "params"})
    return opt


def official_polar(groups: Any, **options: Any) -> Any:
    root = "timlautk/polargrad"
    with mock.patch.object(torch, "compile", lambda function: function):
        files = {
            name: official_file(root, f"{name}.py", name)
            for name in ("newton_schulz", "polar_express", "polar")
        }
        with mock.patch.dict(sys.modules, files):
            official: Any = official_file(root, "polar_grad.py").PolarGrad

    class InOnePrecision(official):  # type: ignore[misc]
        """The official steps, without the cast to bfloat16."""

        def step(self, closure: Any = None) -> Any:
            uncast = mock.patch.object(Tensor, "bfloat16", Tensor.clone)
            with uncast, mock.patch.dict(sys.modules, files):
                return super().step(closure)

    return InOnePrecision(groups, **options)


@optimizer(
    "polar",
    '`EMA`, `Steepest(Orthogonalize(coefficients="polar_express"))`, `LR` is PolarGrad',
    source='timlautk/polargrad 79f3c6f, `PolarGrad(method="polar_express")`, in one precision',
    ours=lambda **options: named("polar", inner_steps=6, **options),
    groups=GROUPS,
    keys={"beta": "momentum"},
    inputs=Inputs(MATRICES, size=1e4),  # it adds 1e-7 to norms
    rtol={torch.float32: 5e-5, torch.float64: 1e-7},
)
def polar(groups: Any) -> Any:
    return official_polar(groups, method="polar_express", inner_steps=6)


@optimizer(
    "polar_ns",
    "`EMA`, `Steepest(Orthogonalize())`, `WeightDecay`, `LR` is PolarGrad by Newton-Schulz",
    source='timlautk/polargrad 79f3c6f, `PolarGrad(method="ns")`, in one precision',
    ours=lambda **options: named("polar", method="ns", inner_steps=4, **options),
    groups=GROUPS,
    keys={"beta": "momentum"},
    inputs=Inputs(MATRICES, size=1e4),  # it adds 1e-7 to norms
    rtol={torch.float32: 5e-5, torch.float64: 1e-7},
)
def polar_ns(groups: Any) -> Any:
    return official_polar(groups, method="ns", inner_steps=4)


SCIONS: Any = (
    {"lr": 0.05, "beta": 0.9, "scale": 3.0},
    {"lr": 0.02, "beta": 0.5, "scale": 0.4},
)
BALL = {"weight_decay": "in the reference it is the learning rate, which stays constant"}
EDGES = (*MATRICES, ("a.column", (5, 1)), ("b.row", (1, 4)))


def official_scion(groups: Any, norm: str) -> Any:
    with mock.patch.object(torch, "compile", lambda function: function):
        official: Any = official_file("LIONS-EPFL/scion", "scion.py").Scion

    class InOnePrecision(official):  # type: ignore[misc]
        """The official steps, whose momentum is 1 - β, without the cast to bfloat16."""

        def step(self) -> Any:
            for group in self.param_groups:
                group["momentum"] = 1 - group["beta"]
            with mock.patch.object(Tensor, "bfloat16", Tensor.clone), torch.no_grad():
                return super().step()

    return InOnePrecision(groups, norm=norm)


@optimizer(
    "scion",
    "`EMA`, `Orthogonalize`, `ScaleByShape(radius)`, `WeightDecay(1.0)`, `LR` is Scion",
    source="LIONS-EPFL/scion f58a393, `Scion` of the norm `Spectral`, in one precision",
    ours=lambda beta, **options: named("scion", momentum=1 - beta, **options),
    groups=SCIONS,
    keys={"factor": "scale"},
    constant=BALL,
    inputs=Inputs(EDGES, size=100.0),  # it adds 1e-7 to norms
    rtol={torch.float32: 1e-5, torch.float64: 1e-6},
)
def scion(groups: Any) -> Any:
    return official_scion(groups, "Spectral")


@optimizer(
    "scion_sign",
    '`EMA`, `Sign`, `ScaleByShape(radius, "inverse_columns")`, `WeightDecay(1.0)`, `LR` is Scion',
    source="LIONS-EPFL/scion f58a393, `Scion` of the norm `Sign`",
    ours=lambda beta, **options: named("scion", norm="Sign", momentum=1 - beta, **options),
    groups=SCIONS,
    keys={"factor": "scale"},
    constant=BALL,
    inputs=Inputs(EDGES),
)
def scion_sign(groups: Any) -> Any:
    return official_scion(groups, "Sign")


LINES = Inputs(
    (("a.wide", (6, 9)), ("a.tall", (9, 4)), ("b.square", (5, 5)), ("b.zero", (3, 4))),
    size=1e4,  # they add 1e-8 to norms
)
DIONS: Any = (
    {"lr": 0.05, "fraction": 0.5, "mu": 0.95, "muon_beta2": 0.95, "weight_decay": 0.1},
    {"lr": 0.02, "mu": 0.8, "muon_beta2": 0.9, "weight_decay": 0.02},
)
BY_SHAPE = {"factor": "the factor of the reference depends only on the shape"}


def official_dion(name: str) -> Any:
    """An optimizer of theirs, in one precision, without its kernels."""
    uncompiled = mock.patch.object(torch, "compile", return_value=lambda function: function)
    with uncompiled:
        official: Any = official_file("microsoft/dion", "dion/__init__.py", "dion")

    class InOnePrecision(getattr(official, name)):  # type: ignore[misc]
        """The official steps, without casts and with numbers in the dtype of the parameters."""

        def _sync_hyperparam_tensors(self) -> None:
            """Leave learning rates as they are; theirs go into tensors in float32."""

        def step(self, closure: Any = None) -> Any:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.param_groups[0]["params"][0].dtype)
            try:
                with mock.patch.object(Tensor, "float", Tensor.clone), NoBfloat16():
                    return super().step(closure)
            finally:
                torch.set_default_dtype(before)

    return InOnePrecision


@optimizer(
    "dion2",
    "`Rows(0.25, Orthogonalize())`, `ScaleByShape`, `WeightDecay`, `LR` is Dion2",
    source="microsoft/dion 0a059a4, `Dion2`, in one precision",
    groups=(
        {"lr": 0.05, "fraction": 0.5, "ef_decay": 0.95, "weight_decay": 0.1},
        {"lr": 0.02, "ef_decay": 0.8, "weight_decay": 0.02},
    ),
    keys={"error": "ef_decay"},
    constant=BY_SHAPE,
    inputs=LINES,
    rtol={torch.float32: 5e-5, torch.float64: 1e-9},
)
def dion2(groups: Any) -> Any:
    return official_dion("Dion2")(groups)


@optimizer(
    "nordion2",
    '`Rows(0.25, Orthogonalize(), lines="rows")`, `NeuronNorm`, `ScaleByShape` is NorDion2',
    source="microsoft/dion 0a059a4, `NorDion2`, in one precision",
    groups=DIONS,
    keys={"error": "mu", "beta": "muon_beta2"},
    constant=BY_SHAPE,
    inputs=LINES,
    rtol={torch.float32: 5e-5, torch.float64: 1e-9},
)
def nordion2(groups: Any) -> Any:
    return official_dion("NorDion2")(groups)


@optimizer(
    "dion3",
    "The same is Dion3, which is NorDion2",
    source="microsoft/dion 0a059a4, `Dion3`, in one precision",
    groups=({**DIONS[0], "fraction": 0.25}, DIONS[1]),
    keys={"error": "mu", "beta": "muon_beta2"},
    constant=BY_SHAPE,
    inputs=LINES,
    rtol={torch.float32: 5e-5, torch.float64: 1e-9},
)
def dion3(groups: Any) -> Any:
    return official_dion("Dion3")(groups)


BLOCKS: Any = (
    ("a.three heads", (6, 5)), ("a.tall", (9, 2)), ("b.wide", (6, 7)), ("b.zero", (6, 4)),
)  # fmt: skip


def heads_or_blocks(name: str, p: Tensor) -> Any:
    """The layout of the same weights, whose names the optimizer does not know."""
    return [4, 2] if p.shape in ((6, 7), (6, 4)) else [len(p) // 3] * 3


@optimizer(
    "muon_heads",
    "`Orthogonalize` with a layout is Muon of each head, or of blocks of rows",
    source="microsoft/dion 0a059a4, `Muon` with `num_heads` or `split_sizes`, in one precision",
    ours=lambda lr, mu, weight_decay, **options: Chain(
        Momentum(mu),
        Orthogonalize(None, DION_COEFFICIENTS, scale="match_rms_adamw", layout=heads_or_blocks),
        WeightDecay(weight_decay),
        LR(lr),
    ),
    groups=(
        {"lr": 0.05, "mu": 0.95, "weight_decay": 0.1, "num_heads": 3, "split_sizes": None},
        {"lr": 0.02, "mu": 0.8, "weight_decay": 0.02, "num_heads": None, "split_sizes": (4, 2)},
    ),
    keys={"momentum": "mu"},
    constant={"dampening": NO_FACTOR},
    inputs=Inputs(BLOCKS, size=1e4),  # they add 1e-8 to norms
    rtol={torch.float32: 5e-5, torch.float64: 1e-9},
)
def muon_heads(groups: Any) -> Any:
    return official_dion("Muon")(groups, adjust_lr="rms_norm")


BASES = Inputs(
    (*MATRICES, ("a.bias", (4,)), ("a.row", (1, 4)), ("b.bias", (3,)), ("b.column", (5, 1))),
    gaps=False,  # they renew bases by the steps of each parameter, a link by its own
)
EPS = 1e-2  # in its own basis the first gradient is diagonal: Adam would make 1 of what is rounding
SOAPS: Any = (
    {"lr": 0.05, "betas": (0.9, 0.95), "shampoo_beta": 0.9, "eps": EPS,
     "weight_decay": 0.0, "precondition_frequency": 5},
    {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.0},
)  # fmt: skip
SAME = {
    "beta": "the reference keeps the value of the first step",
    "eps": "the reference adds it before the bias correction of the second average",
}


def as_before_correction(first: int) -> Any:
    """Gives our Adam an eps that is theirs after the correction, from this step on."""

    def each_step(opt: Any, step: int) -> None:
        for group in opt.param_groups:
            t = max(step - first + 1, 1)
            group["eps"] = EPS / (1 - group["betas"][1] ** t) ** 0.5

    return each_step


def same_null_spaces() -> Any:
    """Decompositions whose eigenvectors without an eigenvalue do not depend on the machine.

    A first gradient that is not square leaves them open, and all later steps are seen in them.
    """
    eigh = torch.linalg.eigh

    def decided(matrix: Tensor) -> Any:
        if matrix.dim() > 2:
            pairs = zip(*map(decided, matrix), strict=True)
            return torch.return_types.linalg_eigh(tuple(map(torch.stack, pairs)))
        values, vectors = eigh(matrix)
        null = int((values <= values[-1] * 100 * torch.finfo(matrix.dtype).eps).sum())
        others = torch.eye(len(matrix), dtype=matrix.dtype)
        others -= vectors[:, null:] @ vectors[:, null:].mT
        vectors[:, :null] = torch.linalg.qr(others[:, :null]).Q
        return torch.return_types.linalg_eigh((values, vectors))

    return mock.patch.object(torch.linalg, "eigh", decided)


DECAYED: Any = ({**SOAPS[0], "weight_decay": 0.1}, {**SOAPS[1], "weight_decay": 0.02})


def in_one_precision(official: Any) -> Any:
    class InOnePrecision(official):  # type: ignore[misc]
        """The official steps, without the cast to float32 in decompositions."""

        def step(self, closure: Any = None) -> Any:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.param_groups[0]["params"][0].dtype)
            try:
                with mock.patch.object(Tensor, "float", Tensor.clone):
                    return super().step(closure)
            finally:
                torch.set_default_dtype(before)

    return InOnePrecision


@optimizer(
    "soap",
    "`InBasis(SOAPBasis(), Adam())`, `LR` is SOAP without decay, which it takes after the step",
    source="nikhilvyas/SOAP a1e5535, in one precision",
    groups=SOAPS,
    constant={**SAME, "weight_decay": "the reference decays after the step"},
    each_step=as_before_correction(first=2),
    inputs=BASES,
    within=same_null_spaces,
    rtol={torch.float32: 1e-4, torch.float64: 1e-12},
)
def soap(groups: Any) -> Any:
    return in_one_precision(official_file("nikhilvyas/SOAP", "soap.py").SOAP)(groups)


@optimizer(
    "soap_from_first_step",
    '`InBasis(SOAPBasis(first="step"), Adam())`, `WeightDecay`, `LR` is SOAP as NVIDIA has it',
    source="NVIDIA-NeMo/Emerging-Optimizers fd77292, `tests/soap_reference.py`, in one precision",
    ours=lambda **options: named("soap", first="step", **options),
    groups=DECAYED,
    constant=SAME,
    each_step=as_before_correction(first=1),
    inputs=BASES,
    within=same_null_spaces,
    rtol={torch.float32: 1e-4, torch.float64: 1e-12},
)
def soap_from_first_step(groups: Any) -> Any:
    official = official_file("NVIDIA-NeMo/Emerging-Optimizers", "tests/soap_reference.py")
    return in_one_precision(official.ReferenceSoap)(groups, **DECAYED[0])


SOAP_H: Any = (
    {"lr": 0.05, "ema_beta": 0.9, "momentum": 0.95, "eps": EPS},
    {"lr": 0.02, "ema_beta": 0.8, "momentum": 0.9},
)


def is_soap_h(name: str, q_freq: int) -> Any:
    """An identity with SOAP-H whose bases are renewed in every so many steps."""
    seldom = q_freq > 1
    return optimizer(
        name,
        f'`InBasis(SOAPBasis(0.9, {q_freq}, "use"), Adam(bias_correction=False))`, `TrustRatio`, '
        "`LR`, `Hyperball` is SOAP-H" + f", renewed every {q_freq} steps" * seldom,
        source="KellerJordan/modded-nanogpt f411b3d, `SOAPH` of track 3, in one precision",
        ours=lambda **options: named("soap_hyperball", **options),
        groups=tuple({**group, "q_freq": q_freq} for group in SOAP_H),
        keys={"betas": ("momentum", "ema_beta")},
        constant={
            "beta": "it is None here, and equals the second beta",
            "coefficient": "the reference always uses 1",
            "bounds": "the reference has no such option",
        },
        # it never moves a weight of zeros; where a side is longer by one its null space is a line;
        # it counts steps of each parameter, here the link does
        inputs=Inputs(
            (("a.wide", (3, 4)), ("a.tall", (6, 5)), ("b.square", (4, 4)), ("b.wide", (2, 3))),
            zero_start=False,
            gaps=not seldom,
        ),
        within=same_null_spaces,
        rtol={torch.float32: 1e-5, torch.float64: 1e-12},
    )(soap_h)


def soap_h(groups: Any) -> Any:
    file = "records/track_3_optimization/results/20260518_soaph/train_gpt_simple_soaph.py"
    found = official_text("KellerJordan/modded-nanogpt", file)
    begins, ends = (
        found.index("@torch.no_grad()\ndef scale_inv"),
        found.index("#                Setup"),
    )
    names: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "dist": torch.distributed}
    with mock.patch.object(torch, "compile", lambda function: function):
        exec(compile(found[begins:ends], file, "exec"), names)  # the rest of it trains
    opt = in_one_precision(names["SOAPH"])([p for group in groups for p in group["params"]])
    opt.param_groups = [{**opt.defaults, **group} for group in groups]  # it makes one group
    return opt


is_soap_h("soap_hyperball", q_freq=1)
is_soap_h("soap_hyperball_seldom", q_freq=3)


KL: Any = (
    {"lr": 0.05, "betas": (0.9, 0.95), "shampoo_beta": 0.9, "eps": 1e-3,
     "weight_decay": 0.0, "precondition_frequency": 5},
    {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.0},
)  # fmt: skip


@optimizer(
    "klsoap",
    "`InBasis(KLBasis(), Adam(bias_correction=False))`, `LR` is KL-SOAP without decay, which it "
    "takes after the step",
    source="yorkerlin/KL-Methods a02e622, `KLOpt(using_klsoap=True)`, in one precision",
    groups=KL,
    constant={"beta": SAME["beta"], "weight_decay": "the reference decays after the step"},
    inputs=Inputs(MATRICES, gaps=False),  # as SOAP's
    within=same_null_spaces,
    rtol={torch.float32: 1e-4, torch.float64: 1e-10},
)
def klsoap(groups: Any) -> Any:
    uncompiled = mock.patch.object(torch, "compile", lambda function: function)
    with uncompiled:
        official = in_one_precision(official_file("yorkerlin/KL-Methods", "optim/kl_opt.py").KLOpt)
    dtype = groups[0]["params"][0].dtype
    return official(groups, using_klsoap=True, cast_dtype=dtype)


SHAMPOOS: Any = (
    {"lr": 0.05, "betas": (0.9, 0.95), "epsilon": 1e-4, "grafting_epsilon": 1e-3,
     "weight_decay": 0.1, "precondition_frequency": 5},
    {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.02},
)  # fmt: skip


@optimizer(
    "shampoo",
    "`Graft(Adam(betas), Shampoo(betas))`, `WeightDecay`, `LR` is distributed Shampoo on matrices",
    source="facebookresearch/optimizers f606606, its eigenvectors by our iteration",
    groups=SHAMPOOS,
    keys={
        "Graft/norm_of/betas": "betas",
        "Graft/direction_of/betas": "betas",
        "Graft/norm_of/eps": "grafting_epsilon",
    },
    constant={
        "Graft/direction_of/eps": "the reference uses the value at its last basis update",
        "exponent": "the reference keeps the value of the first step",
    },
    inputs=Inputs(MATRICES, gaps=False),  # its number of the step is that of a group
    within=same_null_spaces,
    rtol={torch.float32: 1e-4, torch.float64: 1e-10},
)
def shampoo(groups: Any) -> Any:
    with official_package("facebookresearch/optimizers"):
        from distributed_shampoo import distributed_shampoo as code
        from distributed_shampoo import shampoo_types as types_of
        from distributed_shampoo.preconditioner import shampoo_preconditioner_list as lists_of
    every, dtype = SHAMPOOS[0]["precondition_frequency"], groups[0]["params"][0].dtype
    ours = "precondition_frequency", "grafting_epsilon"

    class InOurSteps(in_one_precision(code.DistributedShampoo)):  # type: ignore[misc]
        """The official steps, which renew when ours do, and read their betas in every step."""

        taken = 0

        def step(self, closure: Any = None) -> Any:
            for group, lists in zip(self.param_groups, self._per_group_state_lists, strict=True):
                group["precondition_frequency"] = 10**9 if self.taken % every else 1
                group["beta3"], beta2 = group["betas"]
                for kind in ("shampoo", "grafting"):
                    held = lists[f"{kind}_preconditioner_list"]
                    held._beta2, held._weighting_factor = beta2, 1 - beta2
                held._epsilon = group["grafting_epsilon"]
                for name in (types_of.LR_TENSOR, types_of.LR_CPU_PINNED):
                    lists[name] = lists[name].to(dtype)
            first, self.taken = not self.taken, self.taken + 1

            def nearer(
                A: Tensor, eigenvectors_estimate: Tensor, epsilon: float, **options: Any
            ) -> Any:
                """What it takes for its renewals: exact at first, then one iteration."""
                if first:
                    basis = torch.linalg.eigh(A).eigenvectors.flip(1)
                else:
                    basis = torch.linalg.qr(A @ eigenvectors_estimate).Q
                    basis = basis[:, (basis.mT @ A @ basis).diag().argsort(descending=True)]
                return (basis.mT @ A @ basis).diag() + epsilon, basis

            with mock.patch.object(lists_of, "matrix_eigendecomposition", nearer):
                return super().step(closure)

    official = [
        {
            **{key: x for key, x in group.items() if key not in ours},
            "grafting_config": types_of.AdamPreconditionerConfig(beta2=0.5, epsilon=1.0),
        }
        for group in groups
    ]
    opt = InOurSteps(
        official,
        start_preconditioning_step=1,
        preconditioner_config=types_of.EigendecomposedShampooPreconditionerConfig(
            factor_matrix_dtype=dtype,
            factor_matrix_eigenvectors_dtype=dtype,
            factor_matrix_eigenvalues_dtype=dtype,
        ),
        distributed_config=types_of.SingleDeviceDistributedConfig(
            target_parameter_dimensionality=2
        ),
    )
    for made, group in zip(opt.param_groups, groups, strict=True):
        made["grafting_epsilon"] = group["grafting_epsilon"]
    return opt


KRONS: Any = (
    {"lr": 0.05, "b1": 0.9, "weight_decay": 0.1, "precond_lr": 0.1},
    {"lr": 0.02, "b1": 0.8, "weight_decay": 0.0, "precond_lr": 0.3},  # its code decays no vectors
)
SIDES: Any = (*MATRICES, ("a.row", (1, 4)), ("a.column", (5, 1)), ("b.bias", (4,)))


def is_kron(name: str, every: int | None = None, **options: Any) -> Any:
    """An identity with the official package, whose noise is ours, and leaves its momentum alone."""

    def official(groups: Any) -> Any:
        with mock.patch.object(torch, "compile", lambda function: function):
            code = need("kron_torch.kron")
            share = None if every is None else (lambda n: 1.0 if int(n) % every == 0 else 1e-9)
            given = [{k: x for k, x in group.items() if k != "every"} for group in groups]
            dtype = groups[0]["params"][0].dtype
            opt = in_one_precision(code.Kron)(
                given, preconditioner_update_probability=share, precond_dtype=dtype
            )
        learn = code._update_precond

        def with_our_noise(Q: Any, exprs: Any, G: Tensor, *numbers: Tensor) -> None:
            (step,) = [state["step"] for state in opt.state.values() if state["Q"] is Q]
            rows = G.view(1, -1) if G.shape[1:] == (1,) else G if G.dim() > 1 else G.view(-1, 1)
            noise = whitening.normal(rows, torch.tensor([step], dtype=G.dtype)).view(G.shape)
            with mock.patch.object(torch, "randn_like", return_value=noise):
                learn(Q, exprs, G.clone(), *numbers)  # which it would write its noise to

        take = opt.step

        def step() -> None:
            with mock.patch.object(code, "_update_precond", with_our_noise):
                take()

        opt.step = step
        return opt

    settings = {} if every is None else {"every": every}
    claim = "" if every is None else f", of other sides and every {every} steps"
    optimizer(
        name,
        f"`Kron`, `ClipRMS(1.1)`, `WeightDecay`, `LR` is PSGD Kron{claim}",
        source="kron_torch 0.3.3, `Kron`, with our noise and in one precision",
        ours=lambda **given: named("kron", **given),
        groups=({**KRONS[0], **settings, **options}, KRONS[1]),
        keys={"beta": "b1"},
        constant={
            "eps": "the reference has no such option",
            "max_rms": "the reference always uses 1.1",
        },
        # a late first gradient is one to learn from, in theirs if it is one of every few steps
        inputs=Inputs(SIDES, gaps=every is None),
        rtol={torch.float32: 1e-5, torch.float64: 1e-11},
    )(official)


is_kron("kron")
# factors begin with a root, here with one that float32 has
is_kron("kron_longer", every=5, memory_save_mode="smart_one_diag", precond_init_scale=4.0)
is_kron("kron_one", every=4, memory_save_mode="one_diag", precond_init_scale=0.25)
is_kron("kron_all", every=3, memory_save_mode="all_diag")
is_kron("kron_short", every=2, max_size_triangular=4)
