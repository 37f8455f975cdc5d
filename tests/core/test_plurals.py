"""Counts with their nouns."""

from __future__ import annotations

import re

import torch
from torch.nn import Parameter

from tests.helpers import at_once, param
from torchzero_clip import LR, Adam, ClipNorm, Modular, TensorList, Trace, attach
from torchzero_clip.core.plurals import counted


@at_once(
    "count, noun, plural, words",
    [
        (0, "step", "", "0 steps"),
        (1, "step", "", "1 step"),
        (2, "step", "", "2 steps"),
        (1, "matrix", "matrices", "1 matrix"),
        (3, "matrix", "matrices", "3 matrices"),
        (1024, "element", "", "1,024 elements"),
    ],
)
def test_a_noun_agrees_with_its_count(count, noun, plural, words):
    assert counted(count, noun, plural) == words


ONE_OF_MANY = re.compile(r"(?<![\d.,])1 [a-z ]*(parameters|elements|tensors|steps|units|groups)\b")


def test_no_text_about_one_parameter_speaks_of_several():
    p = param(1.0, grad=[1.0])
    opt = Modular([p], ClipNorm(1.0), Adam(), LR(0.1))
    handle = attach(torch.optim.SGD([p], lr=0.1), ClipNorm(1.0))
    frozen = Modular([p, Parameter(torch.ones(1), requires_grad=False)], ClipNorm(1.0), LR(0.1))
    frozen.param_groups[0]["params"][1].grad = torch.ones(1)
    texts = [
        opt.explain(),
        opt.explain(parameters=True),
        repr(opt),
        handle.explain(),
        frozen.explain(),
        repr(TensorList([p])),
        repr(Trace(torch.ones(1, 1))),
    ]
    assert "1 parameter, 1 element in float32 on cpu" in texts[0]
    assert "updates 1 parameter with requires_grad=False" in texts[4]
    for text in texts:
        assert not ONE_OF_MANY.search(text), text
