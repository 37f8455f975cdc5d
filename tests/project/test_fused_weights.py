"""docs/fused_weights.md: its function converts the state of every rule about matrices."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import ROOT, saved
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    InBasis,
    KLBasis,
    Kron,
    Modular,
    NeuronNorm,
    Orthogonalize,
    Rows,
    Shampoo,
    Transform,
)

ENTRY = "(qkv rows) d -> qkv rows d, qkv=3"
SHAPE = (12, 5)


def joined_state() -> Any:
    """Return the function of the page, with the names that it uses."""
    page = (ROOT / "docs" / "fused_weights.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    wanted = []
    for statement in ast.parse(code).body:
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        text = ast.unparse(statement)
        if is_import or text.startswith(("PER_MATRIX =", "def joined_state(")):
            wanted.append(text)
    namespace: dict[str, Any] = {}
    exec("\n".join(wanted), namespace)
    return namespace["joined_state"]


def chain(rule: str, layout: Any) -> list[Transform]:
    rules: dict[str, list[Transform]] = {
        "NeuronNorm": [EMA(0.9), Orthogonalize(layout=layout), NeuronNorm(0.9, layout=layout)],
        "Rows": [Rows(0.5, Orthogonalize(), layout=layout)],
        "Kron": [Kron(layout=layout)],
        "Shampoo": [Shampoo(every=2, layout=layout)],
        "KLBasis": [InBasis(KLBasis(0.9, every=2, layout=layout), Adam())],
    }
    return [*rules[rule], LR(0.1)]


def step(opt: Modular, grads: torch.Tensor) -> None:
    params = opt.param_groups[0]["params"]
    for p, grad in zip(params, grads.view(len(params), -1), strict=True):
        p.grad = grad.view(p.shape).clone()
    opt.step()


@pytest.mark.parametrize("rule", ["NeuronNorm", "Rows", "Kron", "Shampoo", "KLBasis"])
def test_a_fused_weight_continues_as_the_separate_weights_would(rule: str) -> None:
    draw = torch.Generator().manual_seed(0)
    grads = torch.randn(5, 3, 4, 5, generator=draw)
    weights = [Parameter(w) for w in torch.randn(3, 4, 5, generator=draw)]
    separate = Modular(zip("qkv", weights, strict=True), *chain(rule, None))
    for i in range(3):
        step(separate, grads[i])
    fused = Parameter(torch.cat([w.detach() for w in weights]))
    opt = Modular([("qkv", fused)], *chain(rule, {"qkv": ENTRY}))
    old = saved(separate.state_dict())
    new = opt.state_dict()
    new["state"] = {0: joined_state()(ENTRY, SHAPE, [old["state"][i] for i in range(3)])}
    (old_group,) = old["param_groups"]
    (new_group,) = new["param_groups"]
    new_group["chain"] = {**old_group["chain"], **new_group["chain"]}
    opt.load_state_dict(new)
    for i in (3, 4):
        step(separate, grads[i])
        step(opt, grads[i])
    assert torch.equal(fused, torch.cat([w.detach() for w in weights]))
