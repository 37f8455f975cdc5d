"""Hydra and OmegaConf: their lists and dicts are taken where Python's are."""

from __future__ import annotations

import pytest

from tests.frameworks.common import need
from tests.helpers import network
from torchzero_clip import LR, Adam, Chain, ClipNorm, Modular, Scale, named, optimizer_class

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

WRITTEN = """
chain:
  - {type: ClipNorm, max_norm: 1.0, dim: [0, 1]}
  - {type: Adam, betas: [0.9, 0.95]}
  - [Scale, {factor: 2.0}]
  - {type: LR, lr: 0.001}
made:
  _target_: torchzero_clip.Chain
  _convert_: all
  _args_:
    - {_target_: torchzero_clip.ClipNorm, max_norm: 1.0, dim: [0, 1]}
    - {_target_: torchzero_clip.Adam, betas: [0.9, 0.95]}
    - {_target_: torchzero_clip.Scale, factor: 2.0}
    - {_target_: torchzero_clip.LR, lr: 0.001}
arguments: {lr: 0.01, betas: [0.9, 0.95]}
"""
MEANT = Chain(ClipNorm(1.0, dim=(0, 1)), Adam((0.9, 0.95)), Scale(2.0), LR(0.001))


def test_a_chain_is_read_or_made_from_a_config():
    omegaconf, hydra = need("omegaconf"), need("hydra.utils")
    config = omegaconf.OmegaConf.create(WRITTEN)
    assert Chain.from_config(config.chain) == MEANT
    assert hydra.instantiate(config.made) == MEANT


def test_arguments_of_methods_and_classes_may_come_from_a_config():
    config = need("omegaconf").OmegaConf.create(WRITTEN)
    assert named("adamw", **config.arguments) == named("adamw", lr=0.01, betas=(0.9, 0.95))
    params = list(network().parameters())
    made = optimizer_class(Adam(), LR(0.1))(params, **config.arguments)
    opt = Modular([{"params": params, **config.arguments}], Adam(), LR(0.1))
    for each in (made, opt):
        (group,) = each.param_groups
        assert (group["lr"], group["betas"]) == (0.01, (0.9, 0.95))
        assert type(group["betas"]) is tuple
