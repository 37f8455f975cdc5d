"""What ultralytics makes of an optimizer's state in a checkpoint, and who can load it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.frameworks.common import CHAINS, data, need, network
from tests.helpers import equal
from torchzero_clip import Modular, ZClip, attach

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


def saved(opt: Any, model: torch.nn.Module) -> Any:
    """Its checkpoint's optimizer after some steps."""
    need("ultralytics")
    from ultralytics.utils.torch_utils import convert_optimizer_state_dict_to_fp16

    for x, y in data():
        opt.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        opt.step()
    return convert_optimizer_state_dict_to_fp16(deepcopy(opt.state_dict()))


def test_a_chain_is_not_resumed_and_an_error_says_so():
    model = network()
    held = saved(Modular(model.parameters(), *CHAINS["adaptive"]()), model)
    fresh = Modular(network().parameters(), *CHAINS["adaptive"]())
    with pytest.raises(ValueError, match=r"the checkpoint has dtype torch\.float16"):
        fresh.load_state_dict(held)


def test_adamw_with_a_rule_in_front_is_resumed_bit_for_bit():
    def start() -> tuple[Any, Any, Any]:
        model = network()
        opt = torch.optim.AdamW(model.parameters())
        return opt, model, attach(opt, ZClip(warmup_steps=2), in_checkpoint=True)

    opt, model, _handle = start()
    held = saved(opt, model)
    fresh, _, handle = start()
    fresh.load_state_dict(held)
    assert equal(fresh.state_dict(), opt.state_dict())
    assert handle.param_groups[0]["chain"]["ZClip/count"] == 8
