"""Methods of technical reports that orthogonalize each attention head separately."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torchzero_clip.core import Chain
from torchzero_clip.core.layout_patterns import MatrixLayout
from torchzero_clip.modules.descent import LR, Heads, Momentum, QKClip, WeightDecay
from torchzero_clip.modules.matrices import Orthogonalize
from torchzero_clip.published.name import published

MaxLogits = Callable[[str, Tensor], Heads | Sequence[Heads] | None]
"""The type of `max_logits` in `QKClip`."""


@published
def kimi_k3(
    lr: float = 2e-4,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = False,
    tau: float = 100.0,
    layout: MatrixLayout = None,
    max_logits: MaxLogits | None = None,
) -> Chain:
    """Run Muon on each attention head, then clip query and key weights. For matrices only.

    The report of Kimi K3 describes the split into heads ("Per-Head Muon") and the weight decay. It
    refers to the report of Kimi K2 for the other parts: the sum of gradients, the factor of a
    matrix, and the clipping (`QKClip`). The learning rate is the learning rate of Kimi K2. The
    reports do not give the value of `momentum`.

    Pass `layout=layout_of(model, per_head=True)`. Without `layout`, heads are not separate. Pass
    `max_logits`, the function of `QKClip`. Without it, nothing clips the weights.

    Reference:
        Kimi Team, "Kimi K3: open frontier intelligence", arXiv 2607.24653, section 2.5; Kimi Team,
        "Kimi K2: open agentic intelligence", arXiv 2507.20534, algorithm 1.
    """
    clip = QKClip(max_logits or _no_logits, tau)  # checks `tau` in any case
    last = () if max_logits is None else (clip,)
    return Chain(
        Momentum(momentum, nesterov),
        Orthogonalize(scale="match_rms_adamw", layout=layout),
        WeightDecay(weight_decay),
        LR(lr),
        *last,
    )


def _no_logits(name: str, p: Tensor) -> None:
    """Return None, because no logits are known."""


@published
def glm5(
    lr: float = 2.5e-4,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    layout: MatrixLayout = None,
) -> Chain:
    """Run Muon on each head of the queries, keys and values (Muon Split). For matrices only.

    The report of GLM-5 describes the split into heads, and reports that attention logits need no
    clipping with it. The other values are from the report of GLM-4.5, whose recipe GLM-5 adapts.
    The reports do not mention Nesterov momentum. The default is as in the code of Muon that they
    cite.

    Pass `layout=layout_of(model, per_head=True)`. Without `layout`, heads are not separate.

    Reference:
        GLM-5 Team, "GLM-5: from vibe coding to agentic engineering", arXiv 2602.15763, section 2.1;
        GLM-4.5 Team, "GLM-4.5: agentic, reasoning, and coding (ARC) foundation models", arXiv
        2508.06471, section 2.4.
    """
    return Chain(
        Momentum(momentum, nesterov),
        Orthogonalize(scale="match_rms_adamw", layout=layout),
        WeightDecay(weight_decay),
        LR(lr),
    )
