"""attach(..., in_checkpoint=True): the state of the transforms rides in the optimizer's own."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import equal, network, state_of
from torchzero_clip import ClipNorm, ClipNormGrowth, Guard, ZClip, attach

KEY = "torchzero_clip"
MAKERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=2),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
}


def rules() -> list[Any]:
    return [Guard(), ZClip(warmup_steps=2, max_norm=None), ClipNormGrowth(mul=1.1)]


def start(name: str = "AdamW", **kwargs: Any) -> tuple[nn.Module, Any, Any]:
    model = network()
    opt = MAKERS[name](model.parameters())
    return model, opt, attach(opt, *rules(), **kwargs)


def train(model: nn.Module, opt: Any, steps: int = 5, seed: int = 0) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    for i in range(steps):
        x = (1 + 3 * (i % 2)) * torch.randn(8, 4, generator=rng)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss.detach()

        opt.step(closure)
    return [p.detach().clone() for p in model.parameters()]


def through_a_file(checkpoint: Any) -> Any:
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_that_saves_model_and_optimizer_alone_goes_on_bit_for_bit(name):
    model, opt, _ = start(name, in_checkpoint=True)
    train(model, opt)
    saved = through_a_file([model.state_dict(), opt.state_dict()])
    straight = train(model, opt, seed=1)

    other, resumed, handle = start(name, in_checkpoint=True)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert equal(state_of(handle), saved[1][KEY])
    assert equal(train(other, resumed, seed=1), straight)

    forgetful, plain, _ = start(name)
    forgetful.load_state_dict(saved[0])
    plain.load_state_dict({key: value for key, value in saved[1].items() if key != KEY})
    assert not equal(train(forgetful, plain, seed=1), straight)


def test_by_default_the_state_dict_is_the_optimizers_own():
    _, opt, handle = start()
    assert KEY not in opt.state_dict()
    handle.remove()
    _, opt, handle = start(in_checkpoint=True)
    assert KEY in opt.state_dict()
    handle.remove()
    assert KEY not in opt.state_dict()


def test_loading_takes_it_out_whether_saving_puts_it_in_or_not():
    model, opt, handle = start(in_checkpoint=True)
    train(model, opt)
    saved = copy.deepcopy(opt.state_dict())
    kept = copy.deepcopy(saved)
    _, other, fresh = start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(saved)
    assert equal(state_of(fresh), state_of(handle))
    assert equal(saved, kept)
    assert KEY not in other.state_dict()


def test_an_optimizer_without_transforms_loads_it_as_ever():
    model, opt, handle = start(in_checkpoint=True)
    train(model, opt)
    plain = MAKERS["AdamW"](network().parameters())
    plain.load_state_dict(opt.state_dict())
    handle.remove()
    assert equal(state_of(plain), state_of(opt))


def test_a_checkpoint_without_it_is_a_warning_and_leaves_the_transforms_alone():
    model, opt, handle = start(in_checkpoint=True)
    train(model, opt)
    before = state_of(handle)
    with pytest.warns(
        UserWarning, match="has no state for the attached transforms, so the transforms continue"
    ):
        opt.load_state_dict(MAKERS["AdamW"](network().parameters()).state_dict())
    assert equal(state_of(handle), before)


def test_the_state_of_other_transforms_is_refused_before_anything_changes():
    model, opt, _ = start(in_checkpoint=True)
    train(model, opt)
    other = MAKERS["AdamW"](network().parameters())
    attach(other, ClipNorm(1.0), in_checkpoint=True)
    with pytest.raises(ValueError, match="saved with different transforms"):
        other.load_state_dict(opt.state_dict())
    assert not other.state


def test_a_format_that_has_no_place_for_it_is_an_error():
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": super().state_dict()}

    opt = Own(network().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="in_checkpoint=True is not supported for Own"):
        attach(opt, ZClip(), in_checkpoint=True)
    attach(opt, ZClip())  # nothing of the first is left
