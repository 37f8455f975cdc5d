"""timm's tests of optimizers, with every published name in timm's registry.

`tests/test_optim.py` asks of whatever the registry lists: a loss that falls, groups with their own
learning rate, checkpoints, layouts, twenty steps of a small model, Rosenbrock's valley.
"""

from __future__ import annotations

from suites.chains import NAMES, published, takes

from torchzero_clip import ClipNorm

SOURCE = "huggingface/pytorch-image-models"
COMMIT = "aa4b5850c1543fa488abf260f18390eda46cf85d"
FILES = {"tests/test_optim.py": "65fb927fa20a"}
PATHS = ["."]
SETTINGS = {"TORCH_DEVICE": "cpu"}

OURS = {name.replace("_", ""): name for name in NAMES}  # timm cuts names at underscores
OURS["mars"] = OURS.pop("marsadamw")

LEFT_OUT = {
    r"compiled_foreach|compiled_muon|param_groups": "about timm's own classes and groups",
    rf"\[(?!({'|'.join(OURS)})\])": "no chain has this name",
}
DIFFERS = {
    r"test_adabelief\[adabelief\]": "timm makes it with `rectify=False`; rectified, as it is "
    "by the authors and here, timm's own class diverges there as well",
    r"test_lars\[lars\]": "timm leaves LARS's ratio out where weight_decay is 0; with "
    "`always_adapt=True` it ends at the same distance",
}


def put_ours() -> None:
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry as registry

    registry._optimizers.clear()
    for name, method in OURS.items():
        has_momentum = "momentum" in takes(method)
        front = (ClipNorm(1.0, dim="global"),) if method in ("lamb", "lambc") else ()
        cls = published(method, name, front=front)
        registry.register(OptimInfo(name, cls, has_momentum=has_momentum))
