"""layout_of: a function that returns the layouts of fused parameters in well-known modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

ReadyLayout: TypeAlias = "str | list[int]"
"""The layout of one parameter: a pattern, or the rows of each matrix."""
ReadyLayouts: TypeAlias = "dict[str, ReadyLayout]"
"""The layouts of a module's parameters, by their names in the module."""

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number in the name of a parameter, such as the 3 of "layers.3.mlp.weight"."""

GATE_THEN_UP = "(gate rows) d -> gate rows d, gate=2"
QUERY_THEN_KEY_THEN_VALUE = "(qkv rows) d -> qkv rows d, qkv=3"
EXPERTS = "e rows d -> e rows d"
EXPERTS_GATE_THEN_UP = "e (gate rows) d -> e gate rows d, gate=2"
EXPERTS_INTERLEAVED = "e (rows gate) d -> e gate rows d, gate=2"
# The forward of the following experts computes x @ w, so each column of w is one output.
TRANSPOSED_EXPERTS = "e d rows -> e rows d"
TRANSPOSED_EXPERTS_GATE_THEN_UP = "e d (gate rows) -> e gate rows d, gate=2"
TRANSPOSED_EXPERTS_INTERLEAVED = "e d (rows gate) -> e gate rows d, gate=2"


def layout_of(model: nn.Module, *, per_head: bool = False) -> dict[str, ReadyLayout]:
    """Return the `layout` of a model's fused parameters, for rules about matrices.

    A fused parameter contains several matrices, for example queries, keys and values. The function
    recognizes a module by the name of its class and takes the sizes from the module. It covers
    `torch.nn.MultiheadAttention` and fused modules of transformers, Megatron-LM and torchtitan. It
    skips all other modules, so print the result once for your model. Each matrix of a layout has
    one row per output, like the weight of `torch.nn.Linear`.

    Args:
        model: The module whose `named_parameters()` the optimizer receives.
        per_head: Whether each head of the queries, keys and values is a separate matrix. If it is
            True, the layout also covers projections that are not fused: in modules with the
            attributes `q_proj`, `k_proj`, `v_proj` and `head_dim`, and in the latent attention of
            DeepSeek-V3 and GLM-5. Default: False.

    Returns:
        A dict that maps names to layouts, without parameters that do not require gradients. If
        several layers have the same layout, their name contains `*` in place of the number.

    Example:
        >>> import torch
        >>> from torchzero_clip import EMA, Chain, Orthogonalize, layout_of
        >>> model = torch.nn.TransformerEncoderLayer(16, 2)
        >>> layout_of(model)
        {'self_attn.in_proj_weight': '(qkv rows) d -> qkv rows d, qkv=3'}
        >>> muon = Chain(EMA(0.95, nesterov=True), Orthogonalize(layout=layout_of(model)))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"layout_of: model must be a torch.nn.Module, got {model!r}")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    found: ReadyLayouts = {}
    for prefix, module in model.named_modules():
        for name, entry in _entries_of(module, per_head).items():
            # A module comes before its submodules, and knows more about their weights.
            found.setdefault(f"{prefix}.{name}" if prefix else name, entry)
    entries = {name: found[name] for name in trained if name in found}
    return _with_globs(entries, [name for name, _ in model.named_parameters()])


def _entries_of(module: nn.Module, per_head: bool) -> ReadyLayouts:
    """Return the layouts of the parameters of a module, or nothing if the module is unknown."""
    for cls in type(module).__mro__:
        if cls.__name__ in MODULES:
            return MODULES[cls.__name__](module)
        if cls.__name__ in ATTENTION:
            return ATTENTION[cls.__name__](module, per_head)
    if _has(module, "gate_up_proj", "down_proj", "is_transposed", "is_concatenated"):
        return _experts_of_transformers(module)
    if per_head and _has(module, "q_proj", "k_proj", "v_proj", "head_dim"):
        names = "q_proj.weight", "k_proj.weight", "v_proj.weight"
        return dict.fromkeys(names, _heads_of(module.head_dim))
    return {}


def _has(module: nn.Module, *names: str) -> bool:
    return all([getattr(module, name, None) is not None for name in names])


def _heads_of(size: Any) -> ReadyLayout:
    """Return the layout of a weight in which each head consists of this many rows."""
    return f"(head rows) d -> head rows d, rows={size}"


def _with_globs(entries: ReadyLayouts, names: Sequence[str]) -> ReadyLayouts:
    """Replace names that differ only in the numbers of layers by one glob.

    Keep the names if the glob matches other parameters too, or if the layouts differ.
    """
    names_by_glob: dict[str, list[str]] = {}
    for name in entries:
        names_by_glob.setdefault(NUMBER.sub("*", name), []).append(name)
    layout: ReadyLayouts = {}
    for glob, similar in names_by_glob.items():
        entry = entries[similar[0]]
        matched = [name for name in names if fnmatchcase(name, glob)]
        if matched == similar and all([entries[name] == entry for name in similar]):
            layout[glob] = entry
        else:
            layout.update({name: entries[name] for name in similar})
    return layout


# ---------------------------------------------------------------------- torch


def _multihead_attention(module: Any, per_head: bool) -> ReadyLayouts:
    """torch: the rows of in_proj_weight are the queries, then the keys, then the values.

    If keys or values have another width, there are three separate weights instead.
    """
    if not per_head:
        return {"in_proj_weight": QUERY_THEN_KEY_THEN_VALUE}
    names = "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"
    return dict.fromkeys(names, _heads_of(module.head_dim))


def _convolution(module: Any) -> ReadyLayouts:
    """torch: a kernel is one matrix per group of channels, with one row per output channel.

    A kernel with four or more dims and one group needs no layout. A depthwise kernel has none,
    because its groups are single rows.
    """
    sides = module.weight.dim() - 2
    if module.weight.shape[1] == 1 or (module.groups == 1 and sides > 1):
        return {}
    kernel = " ".join(["k1", "k2", "k3"][:sides])
    out = f"(g out) into {kernel} -> g out (into {kernel}), g={module.groups}"
    return {"weight": out if module.groups > 1 else f"out into {kernel} -> out (into {kernel})"}


# ---------------------------------------------------------------------- transformers


def _transposed_linear(module: Any) -> ReadyLayouts:
    """Conv1D: the forward computes x @ weight, as in GPT-2."""
    return {"weight": "d rows -> rows d"} if _has(module, "nf", "nx") else {}


def _gpt2_attention(module: Any, per_head: bool) -> ReadyLayouts:
    """GPT-2: the columns are the queries, then the keys, then the values.

    In cross-attention, the queries have a separate weight.
    """
    if per_head:
        head = f"d (head rows) -> head rows d, rows={module.head_dim}"
        return {"c_attn.weight": head, "q_attn.weight": head}
    parts = 2 if module.is_cross_attention else 3
    return {"c_attn.weight": f"d (part rows) -> part rows d, part={parts}"}


def _phi3_attention(module: Any, per_head: bool) -> ReadyLayouts:
    """Phi-3: the rows are the heads of the queries, then of the keys, then of the values."""
    if per_head:
        return {"qkv_proj.weight": _heads_of(module.head_dim)}
    queries = module.config.num_attention_heads * module.head_dim
    keys = module.config.num_key_value_heads * module.head_dim
    return {"qkv_proj.weight": [queries, keys, keys]}


def _phi3_mlp(module: Any) -> ReadyLayouts:
    """Phi-3: the rows are the gate, then the up projection."""
    return {"gate_up_proj.weight": GATE_THEN_UP}


def _latent_attention(module: Any, per_head: bool) -> ReadyLayouts:
    """DeepSeek-V3 and GLM-5: a head of kv_b_proj has the rows of its key, then of its value."""
    if not per_head:
        return {}
    query = _heads_of(module.qk_nope_head_dim + module.qk_rope_head_dim)
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    heads = module.kv_b_proj.weight.shape[0] // sum(sizes)
    equal = sizes[0] == sizes[1]
    return {
        "q_proj.weight": query,
        "q_b_proj.weight": query,  # in place of q_proj if the queries are latent too
        "kv_b_proj.weight": _heads_of(sizes[0]) if equal else sizes * heads,
    }


def _llama4_experts(module: Any) -> ReadyLayouts:
    """Llama 4: the forward computes x @ gate_up_proj. The gate is the first half of the columns."""
    return {"gate_up_proj": TRANSPOSED_EXPERTS_GATE_THEN_UP, "down_proj": TRANSPOSED_EXPERTS}


def _experts_of_transformers(module: Any) -> ReadyLayouts:
    """Qwen3-MoE, gpt-oss and others: attributes describe how the forward reads the weights."""
    if module.is_transposed:
        single = TRANSPOSED_EXPERTS
        gate_then_up = TRANSPOSED_EXPERTS_GATE_THEN_UP
        interleaved = TRANSPOSED_EXPERTS_INTERLEAVED
    else:
        single = EXPERTS
        gate_then_up = EXPERTS_GATE_THEN_UP
        interleaved = EXPERTS_INTERLEAVED
    gate_up = gate_then_up if module.is_concatenated else interleaved
    return {"gate_up_proj": gate_up, "down_proj": single}


# ---------------------------------------------------------------------- Megatron-LM


def _megatron_attention(module: Any, per_head: bool) -> ReadyLayouts:
    """Megatron-LM: each group has its heads of queries, then one head of keys and one of values.

    The rows of all queries are not contiguous, so each head is a matrix in any case.
    """
    if not _has(module, "linear_qkv", "hidden_size_per_attention_head"):
        return {}
    return {"linear_qkv.weight": _heads_of(module.hidden_size_per_attention_head)}


def _megatron_mlp(module: Any) -> ReadyLayouts:
    """Megatron-LM: the rows of a gated linear_fc1 are the gate, then the up projection."""
    if not _has(module, "linear_fc1", "linear_fc2", "config"):
        return {}
    gated = getattr(module.config, "gated_linear_unit", False)
    return {"linear_fc1.weight": GATE_THEN_UP} if gated else {}


def _megatron_grouped_mlp(module: Any) -> ReadyLayouts:
    """Megatron-LM: each expert has its own weight, and its rows may alternate in blocks."""
    if not module.config.gated_linear_unit:
        return {}
    entry = GATE_THEN_UP
    block = module.config.moe_mlp_glu_interleave_size
    if block is not None:
        entry = f"(blocks gate rows) d -> gate (blocks rows) d, gate=2, rows={block}"
    return {f"linear_fc1.weight{i}": entry for i in range(module.num_local_experts)}


# ---------------------------------------------------------------------- torchtitan


def _torchtitan_qkv(module: Any, per_head: bool) -> ReadyLayouts:
    """torchtitan: the rows have the same order as the rows of Megatron-LM's linear_qkv."""
    return {"wqkv.weight": _heads_of(module.head_dim)}


def _torchtitan_swiglu(module: Any) -> ReadyLayouts:
    """torchtitan: w13[:, 0] is the gate and w13[:, 1] is the up projection."""
    return {"w13": "rows gate d -> gate rows d"}


def _torchtitan_experts(module: Any) -> ReadyLayouts:
    """torchtitan: w13[:, :, 0] is the gate and w13[:, :, 1] is the up projection of all experts."""
    separate = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), EXPERTS)
    return {"w13": "e rows gate d -> e gate rows d", **separate}


ATTENTION: Mapping[str, Callable[[Any, bool], ReadyLayouts]] = {
    "MultiheadAttention": _multihead_attention,
    "GPT2Attention": _gpt2_attention,
    "Phi3Attention": _phi3_attention,
    "DeepseekV3Attention": _latent_attention,
    "GlmMoeDsaAttention": _latent_attention,
    "SelfAttention": _megatron_attention,
    "FusedQKVLinear": _torchtitan_qkv,
}
"""For the class of an attention module, a function of the module and `per_head`."""
MODULES: Mapping[str, Callable[[Any], ReadyLayouts]] = {
    "Conv1d": _convolution,
    "Conv2d": _convolution,
    "Conv3d": _convolution,
    "Conv1D": _transposed_linear,
    "Phi3MLP": _phi3_mlp,
    "Llama4TextExperts": _llama4_experts,
    "MLP": _megatron_mlp,
    "TEGroupedMLP": _megatron_grouped_mlp,
    "FusedSwiGLU": _torchtitan_swiglu,
    "GroupedExperts": _torchtitan_experts,
}
"""For the class of another module, a function of the module."""
