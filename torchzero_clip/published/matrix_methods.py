"""Methods that treat the weight of a layer as a matrix."""

from __future__ import annotations

from typing import Any, Literal

from torchzero_clip.core import Chain, Transform
from torchzero_clip.core.layout_patterns import MatrixLayout
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
    layout: MatrixLayout = None,
) -> Chain:
    """Orthogonalize the momentum (Muon). This method is for matrices only.

    The argument `scale` is called `adjust_lr_fn` in torch.optim.Muon. There, None means "original".
    Here, None means no scale.

    Reference:
        Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024);
        torch.optim.Muon.
    """
    return Chain(
        EMA(momentum, nesterov=nesterov),
        Orthogonalize(scale=scale, layout=layout),
        WeightDecay(weight_decay),
        LR(lr),
    )


@published
def normuon(
    lr: float = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    beta: float = 0.95,
    nesterov: bool = True,
    layout: MatrixLayout = None,
) -> Chain:
    """Run Muon, and scale neurons so that all move about equally far. For matrices only.

    In the authors' code, `beta` is called `beta2`. Tensors with four or more dims are matrices of
    shape (first, rest) here. In the authors' code, only the iteration uses this shape.

    Reference:
        Li et al., "NorMuon: making Muon more efficient and scalable", arXiv 2510.05491;
        zichongli5/NorMuon.
    """
    return Chain(
        EMA(momentum, nesterov=nesterov),
        Orthogonalize(scale="original", layout=layout),
        NeuronNorm(beta, layout=layout),
        WeightDecay(weight_decay),
        LR(lr),
    )


@published
def muoneq(
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: Literal["original", "match_rms_adamw"] | None = "match_rms_adamw",
    layout: MatrixLayout = None,
) -> Chain:
    """Give the rows of the momentum equal norms before Muon (MuonEq R). For matrices only.

    The defaults are the authors' values for language models. For CIFAR-10, the authors use a
    learning rate of 5e-3, a momentum of 0.9, no decay and no scale. In the authors' code,
    `weight_decay` is called `wd`.

    Reference:
        Chang et al., "MuonEq: balancing before orthogonalization with lightweight equilibration",
        arXiv 2603.28254; MaeChd/muon-eq.
    """
    return Chain(
        Momentum(momentum, nesterov),
        EqualRows(layout=layout),
        Orthogonalize(scale=scale, layout=layout),
        WeightDecay(weight_decay),
        LR(lr),
    )


@published
def muon_plus(
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
) -> Chain:
    """Normalize the rows and then the columns of Muon's update (Muon+ row_col). For matrices only.

    The authors' code also multiplies the normalized update by √(rows / columns). It does not
    multiply the decay. There is no `layout`, because `Normalize` measures whole parameters.

    Reference:
        Zhang et al., "Muon+: towards better Muon via one additional normalization step", arXiv
        2602.21545; K1seki221/MuonPlus.
    """
    return Chain(
        Momentum(momentum, nesterov),
        Orthogonalize(),
        Normalize(dim=1),
        Normalize(dim=0),
        WeightDecay(weight_decay),
        LR(lr),
    )


@published
def adamuon(
    lr: float = 0.02,
    weight_decay: float = 0.01,
    momentum: float = 0.95,
    nesterov: bool = True,
    eps: float = 1e-8,
) -> Chain:
    """Orthogonalize the signs of a momentum, then divide as in RMSprop. For matrices only.

    Both averages have the same decay rate. The elements of the update are about as large as the
    elements of an Adam update. The authors' code also adds `eps` to the norm of the update. There
    is no `layout`, because `Normalize` measures whole parameters.

    Reference:
        Si et al., "AdaMuon: adaptive Muon optimizer", arXiv 2507.11005; Chongjie-Si/AdaMuon.
    """
    return Chain(
        EMA(momentum, nesterov=nesterov),
        Sign(),
        Orthogonalize(),
        RMSprop(None, eps),
        Normalize(0.2, "rms"),
        WeightDecay(weight_decay),
        LR(lr),
    )


POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""The coefficients of Polar Express in five steps."""


def polar_express(safety: float) -> tuple[tuple[float, float, float], ...]:
    """Return coefficients of Polar Express that include a division of the matrix by `safety`.

    The division is part of the coefficients of the first step, so it costs nothing.
    """
    (a, b, c), *rest = POLAR_EXPRESS
    return (a / safety, b / safety**3, c / safety**5), *rest


NANOCHAT_COEFFICIENTS = polar_express(1.01)
DION_COEFFICIENTS = polar_express(1.02)


@published
def nanochat(
    lr: float = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    beta: float = 0.9,
) -> Chain:
    """Train matrices as nanochat does: MuonEq, Polar Express, a norm, NorMuon, cautious decay.

    If a matrix has more rows than columns, nanochat also multiplies the decay by √(rows / columns).
    To do the same, put these matrices into a parameter group with a larger `weight_decay`. In
    nanochat, `beta` is called `beta2`. There is no `layout`, because `Normalize` measures whole
    parameters.

    Reference:
        karpathy/nanochat, `nanochat/optim.py`.
    """
    return Chain(
        EMA(momentum, nesterov=True),
        EqualRows(),
        Orthogonalize(None, NANOCHAT_COEFFICIENTS),
        Normalize(per_shape="sqrt_rows"),
        NeuronNorm(beta, neurons="longer"),
        WeightDecay(weight_decay, cautious=True),
        LR(lr),
    )


@published
def dion2(
    lr: float = 0.01,
    fraction: float = 0.25,
    ef_decay: float = 0.95,
    weight_decay: float = 0.01,
    layout: MatrixLayout = None,
) -> Chain:
    """Run Muon on a fraction of the rows, or of the columns if there are fewer. For matrices only.

    `lr` multiplies updates with an operator norm of about 1, if the norm of a vector is its root
    mean square.

    Reference:
        Ahn et al., Dion2; microsoft/dion, `dion/dion2.py`.
    """
    rows = Rows(fraction, Orthogonalize(None, DION_COEFFICIENTS), ef_decay, layout=layout)
    return Chain(rows, ScaleByShape(layout=layout), WeightDecay(weight_decay), LR(lr))


@published
def nordion2(
    lr: float = 0.01,
    fraction: float = 0.25,
    mu: float = 0.95,
    muon_beta2: float = 0.95,
    weight_decay: float = 0.01,
    layout: MatrixLayout = None,
) -> Chain:
    """Run NorMuon on the rows with the largest momentum in each step. For matrices only.

    `lr` multiplies updates with an operator norm of about 1, if the norm of a vector is its root
    mean square.

    Reference:
        microsoft/dion, `dion/nordion2.py`, with `selection_scope="global"`.
    """
    return Chain(
        Rows(fraction, Orthogonalize(None, DION_COEFFICIENTS), mu, "rows", layout),
        NeuronNorm(muon_beta2, layout=layout),
        ScaleByShape(layout=layout),
        WeightDecay(weight_decay),
        LR(lr),
    )


@published
def dion3(
    lr: float = 0.01,
    fraction: float = 0.25,
    mu: float = 0.95,
    muon_beta2: float = 0.95,
    weight_decay: float = 0.01,
    layout: MatrixLayout = None,
) -> Chain:
    """Run NorDion2, which the authors also call Dion3. For matrices only.

    Reference:
        microsoft/dion, `dion/dion3.py`.
    """
    return nordion2(lr, fraction, mu, muon_beta2, weight_decay, layout)


@published
def polar(
    lr: float = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    method: Literal["polar_express", "ns"] = "polar_express",
    inner_steps: int = 8,
    layout: MatrixLayout = None,
) -> Chain:
    """Multiply Muon's update by the nuclear norm of the momentum (PolarGrad). For matrices only.

    By default, the authors' code uses two steps of QDWH, which needs matrix decompositions. The two
    methods here need only matrix products. Eight steps of "polar_express" are as accurate.

    Reference:
        Lau et al., "PolarGrad: a class of matrix-gradient optimizers from a unifying
        preconditioning perspective", arXiv 2505.21799; timlautk/polargrad.
    """
    coefficients = method if method == "polar_express" else (3.4445, -4.7750, 2.031)
    return Chain(
        EMA(momentum),
        Steepest(Orthogonalize(inner_steps, coefficients, layout=layout)),
        WeightDecay(weight_decay),
        LR(lr),
    )


@published
def scion(
    lr: float = 1e-3,
    momentum: float = 1.0,
    norm: Literal["Spectral", "Sign"] = "Spectral",
    scale: float = 1.0,
    unconstrained: bool = False,
    layout: MatrixLayout = None,
) -> Chain:
    """Take steps of fixed size in a matrix norm that suits layers of any width (Scion).

    Use "Spectral" for hidden matrices, and "Sign" for the first and the last matrix. `scale` is the
    size of a step before the learning rate. As in the authors' code, `momentum` is the weight of
    the new gradient, so 1 means no momentum.

    Reference:
        Pethick et al., "Training deep learning models with norm-constrained LMOs", arXiv
        2502.07529; LIONS-EPFL/scion.
    """
    average = () if momentum == 1 else (EMA(1 - momentum),)
    if norm == "Sign":
        direction: tuple[Transform, ...] = Sign(), ScaleByShape(scale, "inverse_columns", layout)
    else:
        direction = Orthogonalize(layout=layout), ScaleByShape(scale, layout=layout)
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
    layout: MatrixLayout = None,
) -> Chain:
    """Run Adam in the bases of Shampoo, which are renewed every few steps (SOAP).

    Vectors use Adam alone. By default, `shampoo_beta` is the second value of `betas`, even if a
    schedule changes `betas`. The authors' code keeps the value of the first step. If `first` is
    "skip", the first gradient only initializes the bases, as in the authors' code. The authors'
    code applies the decay after the step. If `first` is "step", the method follows NVIDIA's code.
    Both codes add `eps` to √v before the bias correction of v. Their `eps` therefore acts like
    eps / √(1 - β₂ᵗ) here. Tensors with four or more dims are matrices of shape (first, rest).

    Reference:
        Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", arXiv 2409.11321;
        nikhilvyas/SOAP; NVIDIA-NeMo/Emerging-Optimizers.
    """
    basis = SOAPBasis(shampoo_beta, precondition_frequency, first, max_precond_dim, layout=layout)
    return Chain(InBasis(basis, Adam(betas, eps)), WeightDecay(weight_decay), LR(lr))


@published
def soap_hyperball(
    lr: float = 1e-2,
    ema_beta: float = 0.9,
    momentum: float = 0.95,
    q_freq: int = 1,
    eps: float = 1e-8,
) -> Chain:
    """Take SOAP steps relative to the norm of the matrix, and keep this norm constant (SOAP-H).

    This method is for matrices only. The authors train a GPT with 124 million weights with a
    learning rate of 0.018 that falls to zero. In the authors' code, a matrix of zeros stays zero.
    Here, a matrix of zeros moves freely. There is no `layout`, because `TrustRatio` and `Hyperball`
    measure whole parameters.

    Reference:
        KellerJordan/modded-nanogpt, track 3, `results/20260518_soaph`; Wen et al., "Fantastic
        pretraining optimizers and where to find them II: Hyperball optimization", arXiv 2606.16899.
    """
    adam = Adam((momentum, ema_beta), eps, bias_correction=False)
    direction = InBasis(SOAPBasis(None, q_freq, "use"), adam)
    return Chain(direction, TrustRatio(), LR(lr), Hyperball())


@published
def klsoap(
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.98),
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    layout: MatrixLayout = None,
) -> Chain:
    """Run SOAP with bases that are computed after whitening the other side (KL-SOAP).

    By default, `shampoo_beta` is the second value of `betas`, even if a schedule changes `betas`.
    The authors' code keeps the value of the first step. The first gradient only initializes the
    bases. The authors' code applies the decay after the step. Vectors use Adam alone. The authors'
    code does not accept vectors.

    Reference:
        Lin et al., "Understanding and improving Shampoo and SOAP via Kullback-Leibler
        minimization", arXiv 2509.03378; yorkerlin/KL-Methods.
    """
    basis = KLBasis(shampoo_beta, precondition_frequency, layout=layout)
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
    layout: MatrixLayout = None,
) -> Chain:
    """Run Shampoo with the norm of Adam's step. For matrices only.

    The authors' code has other defaults. With `betas` of (0.9, 1.0), it sums the statistics instead
    of averaging them. It renews the eigenvectors in each step whose number is divisible by
    `precondition_frequency`, which is 1 by default. Until the first renewal, the authors' code
    takes the step of Adam. Here, the first step already has eigenvectors. The authors' code cuts
    sides longer than `max_preconditioner_dim` into blocks. Here, such sides are not preconditioned.
    The authors' code first merges neighboring dims if the product of their sizes is at most
    `max_preconditioner_dim`, so small matrices become vectors. To turn this off for matrices, set
    `target_parameter_dimensionality=2` in its `distributed_config`. The authors' code preconditions
    a vector by one full matrix with the exponent 1/2. Here, a vector moves along its gradient,
    without momentum, by the norm of Adam's step. Give vectors to `Adam`, with `Partition`. Tensors
    with four or more dims are matrices of shape (first, rest).

    Reference:
        Shi et al., "A distributed data-parallel PyTorch implementation of the distributed Shampoo
        optimizer", arXiv 2309.06497; facebookresearch/optimizers.
    """
    direction = Shampoo(
        betas,
        epsilon,
        every=precondition_frequency,
        max_dim=max_preconditioner_dim,
        layout=layout,
    )
    step = Graft(Adam(betas, grafting_epsilon), direction)
    return Chain(step, WeightDecay(weight_decay), LR(lr))


KRON_DIAGONALS: dict[str | None, Any] = {
    "smart_one_diag": "longer",
    "one_diag": "one",
    "all_diag": "all",
    None: None,
}
"""The value of `diagonal` in `Kron` for each `memory_save_mode` of the official code."""


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
    """Whiten a momentum with two learned Kronecker factors, and clip large updates (PSGD Kron).

    `every=None` is the official schedule. The official code decays only matrices. To do the same,
    put vectors into a group with `weight_decay=0`. The official code reshapes a tensor with three
    or more dims to (all but the last, last) if this shape is closer to a square. Here, such a
    tensor is reshaped to (first, rest). There is no `layout`, because `ClipRMS` measures whole
    parameters.

    Reference:
        Pooladzandi, Li, "Curvature-informed SGD via general purpose Lie-group preconditioners",
        arXiv 2402.04553; evanatyourservice/kron_torch.
    """
    diagonal = KRON_DIAGONALS[memory_save_mode]
    direction = Kron(b1, precond_lr, every, max_size_triangular, diagonal, precond_init_scale)
    return Chain(direction, ClipRMS(1.1), WeightDecay(weight_decay), LR(lr))
