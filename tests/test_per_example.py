"""per_example_clip: the gradient of each example clipped before the mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.helpers import about, close, network
from torchzero_clip import (
    AGC,
    ClipNorm,
    ClipNormGrowth,
    Clipper,
    ClipRMS,
    ClipValue,
    Normalize,
    SoftClip,
    TrustRatio,
    per_example_clip,
)

EXAMPLES = torch.tensor([[0.0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]])


def linear(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """A loss whose gradient is the example."""
    return (params["w"] * x).sum()


def test_every_example_is_clipped_by_itself() -> None:
    out = per_example_clip(linear, {"w": torch.ones(3)}, EXAMPLES, ClipNorm(1.25, dim="global"))
    assert (4 * out.grads["w"]).tolist() == about([1.75] * 3)
    assert out.clipped.item() == 0.75
    assert out.loss.item() == about(21 / 4)


RULES = {
    "global": lambda: ClipNorm(0.3, dim="global"),
    "group": lambda: ClipNorm(0.3, dim="group"),
    "tensor": lambda: ClipNorm(0.1),
    "layer": lambda: ClipNorm(0.1, dim="layer"),
    "rows": lambda: ClipNorm(0.05, dim=-1),
    "largest": lambda: ClipNorm(0.05, float("inf"), "global"),
    "soft": lambda: SoftClip(0.2, dim="global"),
    "normalized": lambda: Normalize(2.0, dim="global"),
    "rms": lambda: ClipRMS(0.02, dim="layer"),
    "weights": lambda: AGC(0.05),
    "trust": lambda: TrustRatio(0.1, dim="global"),
}


@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
@pytest.mark.parametrize("rule", RULES)
def test_it_is_what_a_loop_over_the_examples_gives(rule: str, chunk: int | None) -> None:
    torch.manual_seed(0)
    model, x, y = network(), torch.randn(7, 4), torch.randn(7, 1)
    params = dict(model.named_parameters())

    def loss_fn(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(model, params, (x,)) - y).square().mean()

    sums = {name: torch.zeros_like(p) for name, p in params.items()}
    flags = []
    clipper = Clipper(model.named_parameters(), RULES[rule]())
    for one in range(7):
        model.zero_grad()
        loss_fn(params, x[one], y[one]).backward()
        clipper.step()
        flags.append(next(v for k, v in clipper.metrics().items() if k.endswith("/clipped")))
        for name, p in params.items():
            sums[name] += p.grad
    model.zero_grad()
    out = per_example_clip(loss_fn, params, (x, y), RULES[rule](), chunk)
    close(out.grads, {name: total / 7 for name, total in sums.items()}, rtol=1e-5)
    assert out.clipped.item() == about(torch.stack(flags).double().mean().item())
    assert out.loss.item() == about(nn.functional.mse_loss(model(x), y).item())
    assert all(p.grad is None for p in params.values())


@pytest.mark.parametrize("rule", [ClipNormGrowth(), ClipValue(1.0), "ClipNorm", ClipNorm])
def test_a_rule_with_a_memory_or_without_norms_is_refused_in_a_sentence(rule: object) -> None:
    with pytest.raises(TypeError, match="per_example_clip: rule= must be a transform that clips"):
        per_example_clip(linear, {"w": torch.ones(3)}, EXAMPLES, rule)


def test_parameters_without_names_are_an_error() -> None:
    with pytest.raises(
        TypeError,
        match=r"params must be a dict from names to parameters, such as "
        r"dict\(model\.named_parameters\(\)\),",
    ):
        per_example_clip(linear, [torch.ones(3)], EXAMPLES, ClipNorm(1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [(EXAMPLES, EXAMPLES[:2]), torch.tensor(1.0), (), EXAMPLES[:0]])
def test_a_batch_whose_tensors_do_not_agree_is_refused_in_a_sentence(batch: object) -> None:
    with pytest.raises(ValueError, match="per_example_clip: all tensors of batch= must"):
        per_example_clip(linear, {"w": torch.ones(3)}, batch, ClipNorm(1.0))


def test_an_example_that_is_not_finite_is_not_hidden() -> None:
    examples = EXAMPLES.clone()
    examples[0, 0] = torch.nan
    rule = ClipNorm(1.25, dim="global")
    out = per_example_clip(linear, {"w": torch.ones(3)}, examples, rule)
    assert out.grads["w"].isnan().all()
