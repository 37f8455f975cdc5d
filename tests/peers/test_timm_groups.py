"""`groups` makes timm's groups, and torch's own: of four models as recorded, and of timm itself.

`timm_groups.json` has for each model the dims of its parameters, what it says of itself, and what
timm makes of it. To write it again, where timm is installed:

    python -m tests.peers.test_timm_groups
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchzero_clip import groups

RECORDED = Path(__file__).with_name("timm_groups.json")
DECAY, LAYERS, RATE = 0.05, 0.75, 1e-3
SMALL: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"depth": 4},
    "resnet18": {},
    "convnext_atto": {"depths": (2, 2, 3, 2)},
    "swin_tiny_patch4_window7_224": {"depths": (2, 2, 3, 2)},
}
Groups = list[dict[str, Any]]


class Recorded(nn.Module):
    """A model with the names and dims of another, which says of itself what that one says."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__()
        self.told = told
        for name, dims in told["dims"].items():
            *path, last = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(last, nn.Parameter(torch.zeros([1] * dims)))

    def group_matcher(self, coarse: bool) -> Any:
        assert not coarse
        return self.told["matcher"]

    def no_weight_decay(self) -> list[str]:
        return self.told["listed"]  # type: ignore[no-any-return]


def values(made: Groups, model: nn.Module, *keys: str) -> dict[str, list[Any]]:
    """What the group of each parameter has under the keys."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: [g.get(k) for k in keys] for g in made for p in g["params"]}


def theirs(model: nn.Module) -> dict[str, dict[str, list[Any]]]:
    """For each parameter, what timm gives it: its decay, and with layer decay its rate as well."""
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    listed = getattr(model, "no_weight_decay", set)()
    plain = param_groups_weight_decay(model, DECAY, no_weight_decay_list=listed)
    layered = param_groups_layer_decay(model, DECAY, listed, layer_decay=LAYERS)
    for group in layered:
        group["lr"] = RATE * group["lr_scale"]
    return {
        "plain": values(plain, model, "weight_decay"),
        "layered": values(layered, model, "weight_decay", "lr"),
    }


def ours(model: nn.Module) -> dict[str, dict[str, list[Any]]]:
    plain = groups(model, {"*": {"weight_decay": DECAY}})
    layered = groups(model, {"*": {"weight_decay": DECAY}}, lr=RATE, layer_decay=LAYERS)
    return {
        "plain": values(plain, model, "weight_decay"),
        "layered": values(layered, model, "weight_decay", "lr"),
    }


def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SMALL)
def test_groups_are_those_that_timm_gave(name: str) -> None:
    told = recorded()[name]
    made = ours(Recorded(told))
    assert made["plain"] == told["timm"]["plain"]
    assert made["layered"].keys() == told["timm"]["layered"].keys()
    for each, row in told["timm"]["layered"].items():
        assert made["layered"][each] == pytest.approx(row, rel=1e-12), each


@pytest.mark.parametrize("name", SMALL)
def test_where_nothing_is_asked_for_they_are_torchs_own(name: str) -> None:
    model = Recorded(recorded()[name])
    own = torch.optim.AdamW(model.named_parameters()).param_groups
    assert own == torch.optim.AdamW(groups(model, decay_vectors=True)).param_groups


@pytest.mark.parametrize("name", SMALL)
def test_without_a_rate_they_have_the_scales_that_timms_schedulers_read(name: str) -> None:
    told = recorded()[name]
    model = Recorded(told)
    with pytest.warns(UserWarning, match="lr_scale"):
        made = values(groups(model, layer_decay=LAYERS), model, "lr_scale")
    for each, (_, rate) in told["timm"]["layered"].items():
        assert made[each] == pytest.approx([rate / RATE], rel=1e-12), each


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", SMALL)
def test_groups_are_those_that_timm_gives(name: str) -> None:
    model = created(name)
    made, others = ours(model), theirs(model)
    assert made["plain"] == others["plain"]
    for each, row in others["layered"].items():
        assert made["layered"][each] == pytest.approx(row, rel=1e-12), each
    assert others == recorded()[name]["timm"]


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", SMALL)
def test_they_are_those_of_the_optimizers_that_timm_makes(name: str) -> None:
    pytest.importorskip("timm", reason="timm is not installed: see tests/peers/README.md")
    from timm.optim import create_optimizer_v2

    model = created(name)
    for layers in (None, LAYERS):
        opt = create_optimizer_v2(model, "adamw", lr=RATE, weight_decay=DECAY, layer_decay=layers)
        scaled = [{**g, "lr": RATE * g.get("lr_scale", 1.0)} for g in opt.param_groups]
        made = groups(model, {"*": {"weight_decay": DECAY}}, lr=RATE, layer_decay=layers)
        for each, row in values(scaled, model, "weight_decay", "lr").items():
            assert values(made, model, "weight_decay", "lr")[each] == pytest.approx(row, rel=1e-12)


def created(name: str) -> nn.Module:
    timm = pytest.importorskip("timm", reason="timm is not installed: see tests/peers/README.md")
    return timm.create_model(name, **SMALL[name])  # type: ignore[no-any-return]


def record() -> None:
    held = {}
    for name in SMALL:
        model = created(name)
        held[name] = {
            "dims": {each: p.dim() for each, p in model.named_parameters()},
            "matcher": model.group_matcher(coarse=False),  # type: ignore[operator]
            "listed": sorted(getattr(model, "no_weight_decay", set)()),
            "timm": theirs(model),
        }
    text = json.dumps(held, indent=1)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda m: " ".join(m[0].split()), text)  # a row on a line
    RECORDED.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(record())
