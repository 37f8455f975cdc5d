"""What `explain` tells of branches: whose norm is taken, and what acts on each parameter."""

from __future__ import annotations

import re

import torch
from torch.nn import Linear, Sequential

from torchzero_clip import (
    EMA,
    LR,
    Adam,
    AdaptiveClip,
    Chain,
    ClipNorm,
    Freeze,
    Identity,
    Masked,
    Modular,
    Orthogonalize,
    Partition,
    WeightDecay,
    ZStat,
    groups,
    matrices_and_rest,
)


def model() -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(4, 8), Linear(8, 6), Linear(6, 2))


def muon(net: Sequential, *inside: ClipNorm) -> Partition:
    matrices = Chain(*inside, EMA(0.95, nesterov=True), Orthogonalize(scale="match_rms_adamw"))
    return Partition({"matrices": matrices, "rest": Adam()}, matrices_and_rest(net))


def line(text: str, start: str) -> str:
    (found,) = [one for one in text.splitlines() if one.startswith(start)]
    return found


def test_a_norm_over_branches_is_told_with_what_each_has_of_it() -> None:
    net = model()
    opt = Modular(net.named_parameters(), ClipNorm(1.0, dim="global"), muon(net), LR(0.1))
    told = line(opt.explain(), "ClipNorm uses one norm over all branches of Partition")
    assert told.endswith("Call explain() before zero_grad() to see the share of each branch.")
    for name, p in net.named_parameters():
        p.grad = torch.full_like(p, 1.0 if matrices_and_rest(net)[name] == "rest" else 0.0)
    for p in list(net[0].parameters())[:1]:
        p.grad = torch.full_like(p, 2.0)  # 32 entries: 128 of the 156 that the square is
    told = line(opt.explain(), "ClipNorm uses one norm")
    assert told.endswith("Shares of the squared norm now: matrices 82.051%, rest 17.949%.")


def test_a_branch_that_decides_is_warned_of() -> None:
    net = model()
    opt = Modular(net.named_parameters(), ClipNorm(1.0, dim="global"), muon(net), LR(0.1))
    for name, p in net.named_parameters():
        p.grad = torch.full_like(p, 1e3 if matrices_and_rest(net)[name] == "matrices" else 1.0)
    assert "matrices dominates this norm" in opt.explain()


def test_norms_of_branches_are_their_own() -> None:
    net = model()
    opt = Modular(net.named_parameters(), muon(net, ClipNorm(1.0, dim="global")), LR(0.1))
    assert "uses one norm over" not in opt.explain()


def test_each_parameter_has_a_row_with_its_links_rate_and_decay() -> None:
    net = model()
    decay = Masked(WeightDecay(0.1), lambda name, p: p.dim() > 1)
    frozen = Freeze(lambda name, p: name == "2.bias")
    halves = [
        {"params": list(net[0].named_parameters())},
        {"params": [(f"2.{n}", p) for n, p in net[2].named_parameters()], "lr": 0.5},
    ]
    opt = Modular(halves, frozen, Adam(), decay, LR(0.1))
    rows = opt.explain(parameters=True).splitlines()[-5:]
    assert [row.split(maxsplit=1)[0] for row in rows] == [
        "parameter", "weight", "bias", "2.weight", "2.bias",
    ]  # fmt: skip
    assert rows[1].split()[:6] == ["weight", "(8,", "4)", "0", "0.1", "0.1"]
    assert rows[1].endswith("Freeze, Adam, Masked/WeightDecay, LR")
    assert rows[2].split() == ["bias", "(8,)", "0", "0.1", "-", "Freeze,", "Adam,", "LR"]
    assert rows[3].split()[3:5] == ["1", "0.5"]
    assert rows[4].endswith("none: it stays as it is")
    assert "parameter " not in opt.explain()


def test_what_falls_through_a_partition_is_named() -> None:
    net = model()
    two = Partition({"a": Adam(), "b": Chain()}, lambda name, p: "a" if p.dim() > 1 else "b")
    opt = Modular(net.named_parameters(), two, LR(0.1))
    told = opt.explain(parameters=True)
    assert "Partition does not change the updates of 0.bias, 1.bias, 2.bias." in told
    opt = Modular(net.named_parameters(), Masked(Identity(), lambda name, p: True), LR(0.1))
    assert "does not change the updates" not in opt.explain(parameters=True)


def test_parameters_that_differ_in_numbers_and_rates_alone_share_a_row() -> None:
    net = Sequential(*[Linear(4, 4) for _ in range(40)])
    made = groups(net, {"39.*": {"max_norm": 0.5}}, lr=1.0, layer_decay=0.5)
    opt = Modular(made, ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.1), LR(1.0))
    rows = [re.split("  +", row) for row in opt.explain(parameters=True).splitlines()[-5:]]
    assert [row[:-1] for row in rows] == [
        ["parameter", "shape", "group", "lr", "weight_decay", "max_norm"],
        ["*.weight (39)", "(4, 4)", "0 to 76", f"{0.5**39:g} to 0.5", "0.1", "1.0"],
        ["*.bias (39)", "(4,)", "1 to 77", f"{0.5**39:g} to 0.5", "0", "1.0"],
        ["39.weight", "(4, 4)", "78", "1", "0.1", "0.5"],
        ["39.bias", "(4,)", "79", "1", "0", "0.5"],
    ]


def test_a_value_that_differs_between_groups_has_a_column_for_the_links_that_read_it() -> None:
    net = Sequential(Linear(4, 4), Linear(4, 4))
    made = groups(net, {"1.*": {"z_thresh": 1.5}}, decay_vectors=True)
    first = Masked(AdaptiveClip(ZStat()), lambda name, p: name != "0.bias")
    opt = Modular(made, first, LR(1.0))
    rows = [re.split("  +", row) for row in opt.explain(parameters=True).splitlines()[-5:]]
    assert [row[5] for row in rows] == ["z_thresh", "2.5", "-", "1.5", "1.5"]
