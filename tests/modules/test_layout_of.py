"""layout_of: each matrix of a layout is one that the forward of the module multiplies by."""

from __future__ import annotations

from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchzero_clip import (
    LR,
    Chain,
    Modular,
    Momentum,
    Orthogonalize,
    layout_of,
    logical_matrices,
)

WIDTH = 12


def matrices(model: nn.Module, **options: Any) -> dict[str, list[Tensor]]:
    """Return the matrices of each parameter that has a layout, in their order."""
    layout = layout_of(model, **options)
    cut: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        for glob, entry in layout.items():
            if fnmatchcase(name, glob):
                cut[name] = logical_matrices(entry, p.detach())
    return cut


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def filled(module: nn.Module) -> Any:
    """Return the module with random parameters, so that no two parts of a weight are equal."""
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=source) / p.shape[-1] ** 0.5)
    return module


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of (heads, tokens, size), heads side by side."""
    return F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


# ---------------------------------------------------------------------- torch


def test_the_three_matrices_of_in_proj_weight_give_the_output_of_multihead_attention() -> None:
    attention = filled(nn.MultiheadAttention(WIDTH, 3, bias=False))
    x = drawn(5, WIDTH)
    q, k, v = [x @ w.T for w in matrices(attention)["in_proj_weight"]]
    heads = [t.unflatten(1, (3, 4)).transpose(0, 1) for t in (q, k, v)]
    expected, _ = attention(x, x, x)
    torch.testing.assert_close(attended(*heads) @ attention.out_proj.weight.T, expected)


@pytest.mark.parametrize("other_width", [WIDTH, 8])
def test_each_head_of_multihead_attention_is_a_matrix(other_width: int) -> None:
    """Keys and values of another width are separate parameters."""
    sizes = {"kdim": other_width, "vdim": other_width}
    attention = filled(nn.MultiheadAttention(WIDTH, 3, bias=False, **sizes))
    x = drawn(5, WIDTH)
    y = drawn(6, other_width) if other_width != WIDTH else x
    weights = [w for cut in matrices(attention, per_head=True).values() for w in cut]
    assert len(weights) == 9
    heads = [source @ w.T for source, w in zip([x] * 3 + [y] * 6, weights, strict=True)]
    output = attended(*[torch.stack(heads[i : i + 3]) for i in (0, 3, 6)])
    expected, _ = attention(x, y, y)
    torch.testing.assert_close(output @ attention.out_proj.weight.T, expected)


@pytest.mark.parametrize(
    "convolution",
    [nn.Conv1d(6, 4, 3), nn.Conv1d(6, 4, 3, groups=2), nn.Conv2d(6, 4, (2, 3), groups=2)],
    ids=["one group", "two groups", "two dims"],
)
def test_the_kernel_of_a_convolution_has_a_matrix_for_each_group(convolution: Any) -> None:
    convolution = filled(convolution)
    flat = convolution.weight.dim() == 3
    image = drawn(1, 6, 7) if flat else drawn(1, 6, 4, 7)
    size = (1, *convolution.kernel_size) if flat else convolution.kernel_size
    groups = image.unsqueeze(2).chunk(convolution.groups, 1) if flat else image.chunk(2, 1)
    cut = matrices(convolution)["weight"]
    assert len(cut) == convolution.groups
    patches = [F.unfold(group, size)[0] for group in groups]
    output = torch.cat([w @ columns for w, columns in zip(cut, patches, strict=True)])
    expected = convolution(image)[0] - convolution.bias.view(-1, *[1] * (image.dim() - 2))
    torch.testing.assert_close(output, expected.flatten(1))


@pytest.mark.parametrize("convolution", [nn.Conv1d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3)])
def test_other_kernels_need_no_layout(convolution: nn.Module) -> None:
    assert layout_of(convolution) == {}


class Unfused(nn.Module):
    """An attention module as in transformers, with grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj = nn.Linear(WIDTH, 16)
        self.k_proj = nn.Linear(WIDTH, 8)
        self.v_proj = nn.Linear(WIDTH, 8)


def test_heads_of_separate_projections_are_matrices_if_you_ask_for_them() -> None:
    module = filled(Unfused())
    assert layout_of(module) == {}
    cut = matrices(module, per_head=True)
    assert {name: len(heads) for name, heads in cut.items()} == {
        "q_proj.weight": 4,
        "k_proj.weight": 2,
        "v_proj.weight": 2,
    }
    x = drawn(5, WIDTH)
    heads = F.linear(x, module.q_proj.weight).view(5, -1, module.head_dim)
    for i, w in enumerate(cut["q_proj.weight"]):
        torch.testing.assert_close(x @ w.T, heads[:, i])


# ---------------------------------------------------------------------- Megatron-LM

# The following modules are small modules of our own. Their forward reads the weights as the
# forward of the class with the same name does, in Megatron-LM at d98e8a6 and in torchtitan at
# b5bcd76. They have the attributes that `layout_of` reads.


class SelfAttention(nn.Module):
    """Megatron-LM: two groups, each with two heads of queries, one of keys and one of values."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size_per_attention_head = 3
        self.groups = 2
        self.heads_per_group = 2
        self.linear_qkv = nn.Linear(WIDTH, 2 * (2 + 2) * 3, bias=False)

    def get_query_key_value_tensors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = self.hidden_size_per_attention_head
        mixed = self.linear_qkv(x).view(len(x), self.groups, (self.heads_per_group + 2) * size)
        query, key, value = mixed.split([self.heads_per_group * size, size, size], dim=2)
        return query.reshape(len(x), -1, size), key, value


def test_each_head_of_megatrons_linear_qkv_is_a_matrix() -> None:
    module = filled(SelfAttention())
    x = drawn(5, WIDTH)
    heads = [x @ w.T for w in matrices(module)["linear_qkv.weight"]]
    query, key, value = module.get_query_key_value_tensors(x)
    in_order = [query[:, 0], query[:, 1], key[:, 0], value[:, 0]]
    in_order += [query[:, 2], query[:, 3], key[:, 1], value[:, 1]]
    torch.testing.assert_close(heads, in_order)


class MLP(nn.Module):
    """Megatron-LM: a feed-forward layer whose linear_fc1 makes gate and up, or only one of them."""

    def __init__(self, gated: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=gated)
        self.linear_fc1 = nn.Linear(WIDTH, 16, bias=False)
        self.linear_fc2 = nn.Linear(8 if gated else 16, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x).chunk(2, dim=-1)
        return self.linear_fc2(F.silu(gate) * up)


class TEGroupedMLP(nn.Module):
    """Megatron-LM: experts, each with its own linear_fc1."""

    def __init__(self, block: int | None) -> None:
        super().__init__()
        self.num_local_experts = 2
        self.config = SimpleNamespace(gated_linear_unit=True, moe_mlp_glu_interleave_size=block)
        self.linear_fc1 = nn.ParameterDict(
            {f"weight{i}": nn.Parameter(torch.empty(16, WIDTH)) for i in range(2)}
        )

    def gate_and_up(self, x: Tensor, expert: int) -> tuple[Tensor, Tensor]:
        y = F.linear(x, self.linear_fc1[f"weight{expert}"])
        block = self.config.moe_mlp_glu_interleave_size
        if block is not None:
            y = y.reshape(len(x), -1, 2, block).transpose(1, 2).reshape(y.shape)
        gate, up = y.chunk(2, dim=-1)
        return gate, up


def test_gate_and_up_of_megatrons_linear_fc1_are_two_matrices() -> None:
    module = filled(MLP())
    x = drawn(5, WIDTH)
    gate, up = matrices(module)["linear_fc1.weight"]
    output = (F.silu(x @ gate.T) * (x @ up.T)) @ module.linear_fc2.weight.T
    torch.testing.assert_close(output, module(x))
    assert layout_of(MLP(gated=False)) == {}


@pytest.mark.parametrize("block", [None, 1, 4])
def test_gate_and_up_of_megatrons_experts_may_alternate_in_blocks(block: int | None) -> None:
    module = filled(TEGroupedMLP(block))
    x = drawn(5, WIDTH)
    cut = matrices(module)
    for expert in range(2):
        found = [x @ w.T for w in cut[f"linear_fc1.weight{expert}"]]
        torch.testing.assert_close(found, [*module.gate_and_up(x, expert)])


# ---------------------------------------------------------------------- torchtitan


class FusedQKVLinear(nn.Module):
    """torchtitan: two groups, each with two heads of queries, one of keys and one of values."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 3
        self.wqkv = nn.Linear(WIDTH, 2 * (2 + 2) * 3, bias=False)

    def forward(self, x: Tensor) -> list[Tensor]:
        heads = self.wqkv(x).view(len(x), -1, 4, self.head_dim).split([2, 1, 1], dim=-2)
        return [t.reshape(len(x), -1, self.head_dim) for t in heads]


class FusedSwiGLU(nn.Module):
    """torchtitan: gate and up are the middle dim of w13."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(8, 2, WIDTH))
        self.w2 = nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("...d,hgd->...hg", x, self.w13).unbind(-1)
        return self.w2(F.silu(gate) * up)


class GroupedExperts(nn.Module):
    """torchtitan: stacks of three matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.w1_EFD = nn.Parameter(torch.empty(3, 8, WIDTH))
        self.w2_EDF = nn.Parameter(torch.empty(3, WIDTH, 8))
        self.w3_EFD = nn.Parameter(torch.empty(3, 8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(x @ self.w1_EFD.mT) * (x @ self.w3_EFD.mT)
        return hidden @ self.w2_EDF.mT


class FusedGroupedExperts(GroupedExperts):
    """torchtitan: gate and up are a dim of w13."""

    def __init__(self) -> None:
        super().__init__()
        del self.w1_EFD
        del self.w3_EFD
        self.w13 = nn.Parameter(torch.empty(3, 8, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.w13.reshape(3, 16, WIDTH)
        gate, up = (x @ flat.mT).reshape(3, len(x[0]), 8, 2).unbind(-1)
        return (F.silu(gate) * up) @ self.w2_EDF.mT


def test_each_head_of_torchtitans_wqkv_is_a_matrix() -> None:
    module = filled(FusedQKVLinear())
    x = drawn(5, WIDTH)
    heads = [x @ w.T for w in matrices(module)["wqkv.weight"]]
    q, k, v = module(x)
    first = [q[:, 0], q[:, 1], k[:, 0], v[:, 0]]
    second = [q[:, 2], q[:, 3], k[:, 1], v[:, 1]]
    torch.testing.assert_close(heads, [*first, *second])


def test_gate_and_up_of_torchtitans_w13_are_two_matrices() -> None:
    module = filled(FusedSwiGLU())
    x = drawn(5, WIDTH)
    gate, up = matrices(module)["w13"]
    output = (F.silu(x @ gate.T) * (x @ up.T)) @ module.w2.weight.T
    torch.testing.assert_close(output, module(x))


@pytest.mark.parametrize("cls", [GroupedExperts, FusedGroupedExperts])
def test_each_expert_of_torchtitan_has_three_matrices(cls: Any) -> None:
    module = filled(cls())
    x = drawn(3, 5, WIDTH)
    cut = matrices(module)
    if "w13" in cut:
        gates = cut["w13"][::2]
        ups = cut["w13"][1::2]
    else:
        gates = cut["w1_EFD"]
        ups = cut["w3_EFD"]
    experts = zip(x, gates, ups, cut["w2_EDF"], strict=True)
    output = [(F.silu(t @ gate.T) * (t @ up.T)) @ down.T for t, gate, up, down in experts]
    torch.testing.assert_close(torch.stack(output), module(x))


# ---------------------------------------------------------------------- the dict


def test_layers_with_the_same_layout_share_a_glob() -> None:
    layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16) for _ in range(3)]
    encoder = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    pattern = "(qkv rows) d -> qkv rows d, qkv=3"
    assert layout_of(encoder) == {"layers.*.self_attn.in_proj_weight": pattern}


def test_layers_with_another_layout_keep_their_names() -> None:
    layers = nn.ModuleList([nn.MultiheadAttention(WIDTH, heads) for heads in (2, 3)])
    assert layout_of(layers, per_head=True) == {
        "0.in_proj_weight": "(head rows) d -> head rows d, rows=6",
        "1.in_proj_weight": "(head rows) d -> head rows d, rows=4",
    }


def test_a_glob_never_matches_a_parameter_without_a_layout() -> None:
    layers = nn.ModuleList([nn.MultiheadAttention(WIDTH, 2) for _ in range(3)])
    layers[1].in_proj_weight.requires_grad = False
    assert [*layout_of(layers)] == ["0.in_proj_weight", "2.in_proj_weight"]


def test_a_class_that_fsdp2_makes_is_known_by_the_class_that_it_extends() -> None:
    cls = type("FSDPMultiheadAttention", (nn.MultiheadAttention,), {})
    assert [*layout_of(cls(WIDTH, 2))] == ["in_proj_weight"]


def test_only_parameters_that_are_trained_have_a_layout() -> None:
    attention = nn.MultiheadAttention(WIDTH, 2)
    attention.in_proj_weight.requires_grad = False
    assert layout_of(attention) == {}


class Other:
    class SelfAttention(nn.Linear):
        """A class of a user, with the name of a class that `layout_of` knows."""

    class MLP(nn.Linear):
        """Another one."""


@pytest.mark.parametrize("cls", [Other.SelfAttention, Other.MLP, nn.Linear])
def test_other_modules_have_no_layout(cls: Any) -> None:
    assert layout_of(cls(4, 4), per_head=True) == {}


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"layout_of: model must be a torch\.nn\.Module, got \[\]"):
        layout_of([])  # type: ignore[arg-type]


@pytest.mark.parametrize("per_head", [False, True])
def test_a_step_is_the_step_of_the_separate_matrices(per_head: bool) -> None:
    model = filled(nn.MultiheadAttention(WIDTH, 3, bias=False))
    start = model.in_proj_weight.detach().clone()
    model.in_proj_weight.grad = drawn(3 * WIDTH, WIDTH)
    blocks = 9 if per_head else 3
    separate = [nn.Parameter(block.clone()) for block in start.chunk(blocks)]
    for p, grad in zip(separate, model.in_proj_weight.grad.chunk(blocks), strict=True):
        p.grad = grad.clone()
    named = {"in_proj_weight": model.in_proj_weight}
    layout = layout_of(model, per_head=per_head)
    muon = Chain(Momentum(0.9), Orthogonalize(scale="match_rms_adamw", layout=layout), LR(0.1))
    Modular(named.items(), muon).step()
    plain = Chain(Momentum(0.9), Orthogonalize(scale="match_rms_adamw"), LR(0.1))
    Modular(separate, plain).step()
    assert torch.equal(model.in_proj_weight, torch.cat([p.detach() for p in separate]))
