"""Methods that treat a weight as a matrix."""

from __future__ import annotations

from typing import Any, Literal

from torchzero_clip.core import Chain, Transform
from torchzero_clip.modules.adaptive import TrustRatio
from torchzero_clip.modules.clipping import ClipRMS, Normalize, Sign
from torchzero_clip.modules.descent import (
    EMA,
    LR,
    Adam,
    Hyperball,
    Momentum,
    RMSprop,
    WeightDecay,
)
from torchzero_clip.modules.flow import Graft, Steepest
from torchzero_clip.modules.matrices import (
    EqualRows,
    InBasis,
    KLBasis,
    Kron,
    NeuronNorm,
    Orthogonalize,
    Rows,
    ScaleByShape,
    Shampoo,
    SOAPBasis,
)
from torchzero_clip.published.name import published


@published
def muon(
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: Literal["original", "match_rms_adamw"] | None = "original",
) -> Chain:
    """A momentum whose matrices are made orthogonal; for matrices alone.

    torch.optim.Muon calls `scale` `adjust_lr_fn`.

    Reference:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024);
        torch.optim.Muon.
    """
    direction = EMA(momentum, nesterov=nesterov), Orthogonalize(scale=scale)
    return Chain(*direction, WeightDecay(weight_decay), LR(lr))


@published
def normuon(
    lr: float = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    beta: float = 0.95,
    nesterov: bool = True,
) -> Chain:
    """Muon whose neurons move about equally far; for matrices alone.

    Reference:
        Li et al., "NorMuon: making Muon more efficient and scalable", arXiv 2510.05491;
        zichongli5/NorMuon.
    """
    average, neurons = EMA(momentum, nesterov=nesterov), NeuronNorm(beta)
    direction = average, Orthogonalize(scale="original"), neurons
    return Chain(*direction, WeightDecay(weight_decay), LR(lr))


@published
def muoneq(
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: Literal["original", "match_rms_adamw"] | None = "match_rms_adamw",
) -> Chain:
    """Muon of a momentum whose rows were made equal, MuonEq (R); for matrices alone.

    These are its authors' values for language models; for CIFAR-10 they take 5e-3, no decay, a
    momentum of 0.9 and no scale.

    Reference:
        Chang et al., "MuonEq: balancing before orthogonalization with lightweight equilibration",
        arXiv 2603.28254; MaeChd/muon-eq.
    """
    direction = Momentum(momentum, nesterov), EqualRows(), Orthogonalize(scale=scale)
    return Chain(*direction, WeightDecay(weight_decay), LR(lr))


@published
def muon_plus(
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
) -> Chain:
    """Muon whose rows, then columns, get norm one, Muon+ (row_col); for matrices alone.

    Its authors also multiply what the rows and columns make, not the decay, by √(rows / columns).

    Reference:
        Zhang et al., "Muon+: towards better Muon via one additional normalization step", arXiv
        2602.21545; K1seki221/MuonPlus.
    """
    lines = Normalize(dim=1), Normalize(dim=0)
    direction = Momentum(momentum, nesterov), Orthogonalize(), *lines
    return Chain(*direction, WeightDecay(weight_decay), LR(lr))


@published
def adamuon(
    lr: float = 0.02,
    weight_decay: float = 0.01,
    momentum: float = 0.95,
    nesterov: bool = True,
    eps: float = 1e-8,
) -> Chain:
    """Muon of the signs of a momentum, over the root of its mean square; for matrices alone.

    Both averages keep the same share, and entries of the update are as large as Adam's.

    Reference:
        Si et al., "AdaMuon: adaptive Muon optimizer", arXiv 2507.11005; Chongjie-Si/AdaMuon.
    """
    direction = EMA(momentum, nesterov=nesterov), Sign(), Orthogonalize()
    size = RMSprop(None, eps), Normalize(0.2, "rms")
    return Chain(*direction, *size, WeightDecay(weight_decay), LR(lr))


EXPRESS = (  # Polar Express in five steps
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def express(safety: float) -> tuple[tuple[float, float, float], ...]:
    """The steps where the first divides by a factor, as others do with the matrix."""
    (a, b, c), *rest = EXPRESS
    return (a / safety, b / safety**3, c / safety**5), *rest


NANOCHAT, DION = express(1.01), express(1.02)


@published
def nanochat(
    lr: float = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    beta: float = 0.9,
) -> Chain:
    """What nanochat does with matrices: MuonEq, Polar Express, a norm, NorMuon, cautious decay.

    It multiplies the decay of matrices with more rows than columns by √(rows / columns) too: give
    them a group with such a `weight_decay`.

    Reference:
        karpathy/nanochat, `nanochat/optim.py`.
    """
    average = EMA(momentum, nesterov=True)
    direction = average, EqualRows(), Orthogonalize(None, NANOCHAT)
    neurons = Normalize(per_shape="sqrt_rows"), NeuronNorm(beta, neurons="longer")
    return Chain(*direction, *neurons, WeightDecay(weight_decay, cautious=True), LR(lr))


@published
def dion2(
    lr: float = 0.01,
    fraction: float = 0.25,
    ef_decay: float = 0.95,
    weight_decay: float = 0.01,
) -> Chain:
    """Muon of a share of the rows, or of the columns where they are fewer; for matrices alone.

    The learning rate is that of steps whose matrices map vectors of mean square one to such.

    Reference:
        Ahn et al., Dion2; microsoft/dion, `dion/dion2.py`.
    """
    rows = Rows(fraction, Orthogonalize(None, DION), ef_decay)
    return Chain(rows, ScaleByShape(), WeightDecay(weight_decay), LR(lr))


@published
def nordion2(
    lr: float = 0.01,
    fraction: float = 0.25,
    mu: float = 0.95,
    muon_beta2: float = 0.95,
    weight_decay: float = 0.01,
) -> Chain:
    """NorMuon of a share of the rows, the largest of what has gathered; for matrices alone.

    The learning rate is that of steps whose matrices map vectors of mean square one to such.

    Reference:
        microsoft/dion, `dion/nordion2.py`, with `selection_scope="global"`.
    """
    rows = Rows(fraction, Orthogonalize(None, DION), mu, lines="rows")
    direction = rows, NeuronNorm(muon_beta2), ScaleByShape()
    return Chain(*direction, WeightDecay(weight_decay), LR(lr))


@published
def dion3(
    lr: float = 0.01,
    fraction: float = 0.25,
    mu: float = 0.95,
    muon_beta2: float = 0.95,
    weight_decay: float = 0.01,
) -> Chain:
    """Another name of NorDion2, as its authors have it; for matrices alone.

    Reference:
        microsoft/dion, `dion/dion3.py`.
    """
    return nordion2(lr, fraction, mu, muon_beta2, weight_decay)


@published
def polar(
    lr: float = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    method: Literal["polar_express", "ns"] = "polar_express",
    inner_steps: int = 8,
) -> Chain:
    """PolarGrad: Muon as long as the momentum's singular values together; for matrices alone.

    Its authors' code takes QDWH with two steps where `method` is not given, which decomposes
    matrices; the two here multiply, and "polar_express" comes as near in eight.

    Reference:
        Lau et al., "PolarGrad: a class of matrix-gradient optimizers from a unifying
        preconditioning perspective", arXiv 2505.21799; timlautk/polargrad.
    """
    coefficients = method if method == "polar_express" else (3.4445, -4.7750, 2.031)
    direction = EMA(momentum), Steepest(Orthogonalize(inner_steps, coefficients))
    return Chain(*direction, WeightDecay(weight_decay), LR(lr))


@published
def scion(
    lr: float = 1e-3,
    momentum: float = 1.0,
    norm: Literal["Spectral", "Sign"] = "Spectral",
    scale: float = 1.0,
    unconstrained: bool = False,
) -> Chain:
    """Steps to the edge of a ball of matrices, of a norm by which widths are alike.

    "Spectral" is for hidden matrices, "Sign" for those at the ends; `scale` is the radius of the
    ball. As in its authors' code `momentum` is the share of the new gradient, 1 is without.

    Reference:
        Pethick et al., "Training deep learning models with norm-constrained LMOs", arXiv
        2502.07529; LIONS-EPFL/scion.
    """
    average = () if momentum == 1 else (EMA(1 - momentum),)
    if norm == "Sign":
        direction: tuple[Transform, ...] = Sign(), ScaleByShape(scale, "inverse_columns")
    else:
        direction = Orthogonalize(), ScaleByShape(scale)
    ball = () if unconstrained else (WeightDecay(1.0),)
    return Chain(*average, *direction, *ball, LR(lr))


@published
def soap(
    lr: float = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
    first: Literal["skip", "step"] = "skip",
) -> Chain:
    """Adam in the bases of Shampoo, renewed every few steps; vectors have Adam alone.

    `shampoo_beta` is the second of `betas` unless it is given, in every step; the authors' code
    keeps that of the first. Where `first` is "skip" the first gradient only makes the bases, as in
    that code, which decays after the step; "step" is that of NVIDIA's. Tensors of four and more
    dims count as matrices of shape (first, rest).

    Reference:
        Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", arXiv 2409.11321;
        nikhilvyas/SOAP; NVIDIA-NeMo/Emerging-Optimizers.
    """
    basis = SOAPBasis(shampoo_beta, precondition_frequency, first, max_precond_dim)
    return Chain(InBasis(basis, Adam(betas, eps)), WeightDecay(weight_decay), LR(lr))


@published
def soap_hyperball(
    lr: float = 1e-2,
    ema_beta: float = 0.9,
    momentum: float = 0.95,
    q_freq: int = 1,
    eps: float = 1e-8,
) -> Chain:
    """SOAP in steps of a share of a matrix's norm, after which it has that norm again, SOAP-H.

    For matrices alone. Its run with a GPT of 124 million weights takes a learning rate of 0.018
    that falls to zero. A matrix of zeros, which stays one there, moves freely here.

    Reference:
        KellerJordan/modded-nanogpt, track 3, `results/20260518_soaph`; Wen et al., "Fantastic
        pretraining optimizers and where to find them II: Hyperball optimization", arXiv 2606.16899.
    """
    adam = Adam((momentum, ema_beta), eps, bias_correction=False)
    direction = InBasis(SOAPBasis(None, q_freq, "use"), adam), TrustRatio()
    return Chain(*direction, LR(lr), Hyperball())


@published
def klsoap(
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.98),
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
) -> Chain:
    """SOAP in bases that each side learns from what the other has whitened, KL-SOAP.

    `shampoo_beta` is the second of `betas` unless it is given, in every step; its authors' code
    keeps that of the first. The first gradient only makes the bases, and that code decays after
    the step. Vectors, which it does not take, have Adam alone.

    Reference:
        Lin et al., "Understanding and improving Shampoo and SOAP via Kullback-Leibler
        minimization", arXiv 2509.03378; yorkerlin/KL-Methods.
    """
    basis = KLBasis(shampoo_beta, precondition_frequency)
    adam = Adam(betas, eps, bias_correction=False)
    return Chain(InBasis(basis, adam), WeightDecay(weight_decay), LR(lr))


@published
def shampoo(
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-12,
    weight_decay: float = 0.0,
    precondition_frequency: int = 10,
    max_preconditioner_dim: int = 10000,
    grafting_epsilon: float = 1e-8,
) -> Chain:
    """Shampoo with the size of Adam's step; for matrices alone.

    Its authors sum the statistics up by default, where `betas` is (0.9, 1.0), and renew the
    eigenvectors in each step whose number `precondition_frequency` divides, 1 by default, with the
    step of Adam until then; here the first step has eigenvectors of its own. They cut sides longer
    than `max_preconditioner_dim` into blocks; here such sides are left as they are.

    Reference:
        Shi et al., "A distributed data-parallel PyTorch implementation of the distributed Shampoo
        optimizer", arXiv 2309.06497; facebookresearch/optimizers.
    """
    direction = Shampoo(
        betas, epsilon, every=precondition_frequency, max_dim=max_preconditioner_dim
    )
    step = Graft(Adam(betas, grafting_epsilon), direction)
    return Chain(step, WeightDecay(weight_decay), LR(lr))


SAVED: dict[str | None, Any] = {
    "smart_one_diag": "longer",
    "one_diag": "one",
    "all_diag": "all",
    None: None,
}


@published
def kron(
    lr: float = 3e-4,
    b1: float = 0.9,
    weight_decay: float = 0.0,
    every: int | None = None,
    max_size_triangular: int = 8192,
    memory_save_mode: Literal["smart_one_diag", "one_diag", "all_diag"] | None = None,
    precond_lr: float = 0.1,
    precond_init_scale: float = 1.0,
) -> Chain:
    """PSGD with Kronecker factors: a momentum that is whitened, and clipped where it is large.

    `every` None is the official schedule. Its code decays matrices alone: give vectors a group with
    `weight_decay=0`. Tensors of three and more dims are cut as (all but the last, last) there where
    that is less wide, here as (first, rest).

    Reference:
        Pooladzandi, Li, "Curvature-informed SGD via general purpose Lie-group preconditioners",
        arXiv 2402.04553; evanatyourservice/kron_torch.
    """
    saved = SAVED[memory_save_mode]
    direction = Kron(b1, precond_lr, every, max_size_triangular, saved, precond_init_scale)
    return Chain(direction, ClipRMS(1.1), WeightDecay(weight_decay), LR(lr))
