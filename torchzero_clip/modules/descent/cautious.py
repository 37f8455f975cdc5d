"""Cautious: only the entries that agree with the gradient."""

from __future__ import annotations

import torch

from torchzero_clip.core import Group, State, TensorList, Transform


class Cautious(Transform):
    """u ← u · [u g > 0] / max(share kept, 1e-3)

    Put it after an optimizer such as Adam. The share is taken over each tensor.

    Example:
        >>> opt = Modular(model.parameters(), Adam(), Cautious(), LR(1e-3))

    Reference:
        Liang et al., "Cautious optimizers: improving training with one line of code",
        arXiv 2411.16085.
    """

    reads_grads = True

    def update(self, u: TensorList, state: State, group: Group) -> TensorList:
        same = u.sign().mul_(group["grads"])  # u · g of two tiny numbers would be 0
        agree = same.map(lambda product: (product > 0).to(product.dtype))
        kept = torch.stack([t.mean() for t in agree]).nan_to_num()  # the mean of nothing is NaN
        return u.mul_(agree).div_(kept.clamp(min=1e-3).unbind())
