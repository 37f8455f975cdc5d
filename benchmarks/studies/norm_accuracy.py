"""Print the errors of global gradient norms: torch's and ours, for one large tensor on CPU.

    python -m benchmarks.studies.norm_accuracy

The gradient is one float32 tensor of normally distributed elements. Both functions compute its norm
of order 2 with one thread. The error is relative to the norm in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.circumstances import watched
from benchmarks.guide.report import markdown
from torchzero_clip import clip_grad_norm_

ELEMENTS = (1_000_000, 16_777_216, 38_597_376)
"""The last one is the number of elements of the embedding of GPT-2 small."""
SEED = 0
NORMS: dict[str, Callable[[Parameter], Tensor]] = {
    "torch": lambda p: torch.nn.utils.clip_grad_norm_([p], torch.inf),
    "torchzero_clip": lambda p: clip_grad_norm_([p], torch.inf, dim="global"),
}


def gradient(elements: int) -> Tensor:
    """Return the gradient, in float32."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(SEED))


def error(norm_of: Callable[[Parameter], Tensor], grad: Tensor) -> float:
    """Return the relative error of a norm."""
    p = Parameter(torch.empty_like(grad))
    p.grad = grad
    exact = torch.linalg.vector_norm(grad, dtype=torch.float64).item()
    return abs(norm_of(p).item() - exact) / exact


def row(elements: int) -> list[str]:
    """Return the errors of both functions for one number of elements."""
    grad = gradient(elements)
    return [f"{elements:,}", *[f"{100 * error(norm, grad):.2g} %" for norm in NORMS.values()]]


def main(elements: Sequence[int] = ELEMENTS) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with watched("benchmarks.studies.norm_accuracy", [], counts=True):
        print(markdown(["elements", *NORMS], [row(n) for n in elements]))
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
