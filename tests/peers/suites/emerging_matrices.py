"""NVIDIA's tests of functions of matrices, on `Orthogonalize`, `ClipSpectral` and `TrustRatio`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers import stacks
from torchzero_clip import ClipSpectral, Modular, Orthogonalize, Transform, TrustRatio

from . import emerging

SOURCE = emerging.SOURCE
COMMIT = emerging.COMMIT
PATHS = emerging.PATHS
SETTINGS = emerging.SETTINGS
FILES = {
    "tests/test_muon_utils.py": "3051e71f702a",
    "tests/test_spectral_clipping_utils.py": "fa9998271cfd",
    "tests/test_weight_update_hooks.py": "c335c3c09384",
}
LEFT_OUT = {
    "TestMuonUtils|TestBatched|no_op|radial_brake|orthogonalized_optimizer|constructor|_syrk_falls|"
    "raises_(value|type)_error": "the case tests functions or arguments that only NVIDIA's "
    "library has",
    "underflowed_norm": "the case uses zero iterations, which `Orthogonalize` does not accept",
    "clips_singular_values_to_range": "the function also raises small singular values, which no "
    "rule does",
    "hyperball": "`Hyperball` keeps the initial norm of the weights, and accepts no other norm",
}
DIFFERS = {
    "relative_update_eps_boundary": "`TrustRatio` uses norms of any size, and NVIDIA's update "
    "is 0 if a "
    "norm is below eps",
}


def through(x: Tensor, rule: Transform, at: Tensor | None = None) -> Tensor:
    """What a rule makes of a gradient, of a weight that is 0 or given."""
    weight = torch.nn.Parameter(torch.zeros_like(x) if at is None else at.clone())
    before, weight.grad = weight.detach().clone(), x.clone()
    Modular([weight], rule).step()
    return before - weight.detach()


def put_ours() -> None:
    emerging.make_importable()
    from emerging_optimizers import orthogonalized_optimizers, weight_update_hooks
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    def newton_schulz(x: Tensor, steps: int, coefficient_type: str = "quintic", **more: Any) -> Any:
        triples = more.get("custom_coefficient_sets")
        triples = triples or muon_utils._COEFFICIENT_SETS[coefficient_type]
        return through(x, Orthogonalize(steps, triples, layout=stacks))

    def relative(self: Any, param: Tensor, update: Tensor) -> None:
        update.copy_(through(update, TrustRatio(1.0), at=param))

    muon_utils.newton_schulz = newton_schulz
    orthogonalized_optimizers.spectral_hardcap = lambda x, beta: through(x, ClipSpectral(beta))
    weight_update_hooks.RelativeUpdateHook.pre_weight_update_inplace = relative
