"""timm's tests of optimizers, with every published name in timm's registry.

`tests/test_optim.py` asks of whatever the registry lists: a loss that falls, groups with their own
learning rate, checkpoints, layouts, twenty steps of a small model, Rosenbrock's valley.
"""

from __future__ import annotations

from typing import Any

from torchzero_clip import LR, Cautious, ClipNorm, Transform, WeightDecay

from .chains import NAMES, Published, defaults, published

SOURCE = "huggingface/pytorch-image-models"
COMMIT = "aa4b5850c1543fa488abf260f18390eda46cf85d"
FILES = {"tests/test_optim.py": "65fb927fa20a"}
PATHS = ["."]
SETTINGS = {"TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}

THEIRS: dict[str, tuple[str, dict[str, Any]]] = {  # with the arguments of timm's registry
    "adabelief": ("adabelief", {"rectify": False}),
    "radabelief": ("adabelief", {"rectify": True}),
    "adamuon": ("adamuon", {"nesterov": False}),
    "nadamuon": ("adamuon", {"nesterov": True}),
    "adamwlegacy": ("adamw", {}),
    "adanw": ("adan", {"no_prox": True}),
    "adoptw": ("adopt", {"decouple": True}),
    "mars": ("mars_adamw", {}),
    "momentum": ("sgd", {"nesterov": False}),
    "muon": ("muon", {"nesterov": False}),
    "nmuon": ("muon", {"nesterov": True}),
    "nadamlegacy": ("nadam", {}),
    "nadamw": ("nadam", {"decoupled_weight_decay": True}),
    "nlars": ("lars", {"nesterov": True}),
    "radamlegacy": ("radam", {}),
    "radamw": ("radam", {"decoupled_weight_decay": True}),
    "rmsprop": ("rmsprop", {"alpha": 0.9}),
    "sgd": ("sgd", {"nesterov": True}),
}
OURS = {name.replace("_", ""): (name, {}) for name in NAMES} | THEIRS  # timm cuts at underscores
CAREFUL = ("adan", "adanw", "adopt", "lamb", "laprop", "lion", "mars", "nadamw")

LEFT_OUT = {
    r"compiled_foreach|compiled_muon|param_groups": "the case tests timm's own classes and groups",
    rf"\[(?!(lookahead_|c(?=({'|'.join(CAREFUL)})\]))?({'|'.join(OURS)})\])": "no method of "
    "this library has this name",
}
DIFFERS = {
    r"test_lars\[n?lars\]": "timm does not scale LARS if weight_decay is 0, and ends at the same "
    "distance with `always_adapt=True`",
}


class Careful(Published):
    """timm's caution: `Cautious` behind the direction, in front of a decay that is decoupled."""

    def links(self, arguments: dict[str, Any], turned: bool) -> list[Transform]:
        *front, chain = super().links(arguments, turned)
        direction = [link for link in chain if not isinstance(link, WeightDecay | LR)]
        place = list(chain).index(direction[-1]) + 1
        return [*front, *chain[:place], Cautious(), *chain[place:]]


def put_ours() -> None:
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry as registry

    registry._optimizers.clear()
    table = [(name, *row, Published) for name, row in OURS.items()]
    table += [(f"c{name}", *OURS[name], Careful) for name in CAREFUL]
    for name, method, arguments, kind in table:
        has_momentum = "momentum" in defaults(method)
        front = (ClipNorm(1.0, dim="global"),) if method in ("lamb", "lambc") else ()
        cls = published(method, name, kind, front=front)
        info = OptimInfo(name, cls, has_momentum=has_momentum, defaults=arguments)
        registry.register(info)
