"""layout_of on fused modules of frameworks: their output, computed from the matrices."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.frameworks.common import need
from torchzero_clip import (
    EMA,
    LR,
    Adam,
    Chain,
    ClipNorm,
    Modular,
    Orthogonalize,
    Partition,
    layout_of,
    logical_matrices,
    matrices_and_rest,
)

transformers = need("transformers")
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

WIDTH = 16
HIDDEN = 12
EXPERTS = 3
TOKENS = 7
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def of_transformers(model: str, name: str) -> Any:
    module = need(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, name)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(module: nn.Module) -> Any:
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=source) / WIDTH**0.5)
    return module


def matrices(module: nn.Module, **options: Any) -> dict[str, list[Tensor]]:
    """Return the matrices of each parameter that has a layout, in their order."""
    layout = layout_of(module, **options)
    cut: dict[str, list[Tensor]] = {}
    for name, p in module.named_parameters():
        for glob, entry in layout.items():
            if fnmatchcase(name, glob):
                cut[name] = logical_matrices(entry, p.detach())
    return cut


def experts_of(module: nn.Module) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return gate, up and down of each expert."""
    cut = matrices(module)
    gate_up = cut["gate_up_proj"]
    return list(zip(gate_up[::2], gate_up[1::2], cut["down_proj"], strict=True))


# ---------------------------------------------------------------------- experts


def test_llama4() -> None:
    config = transformers.Llama4TextConfig(**SIZES, num_local_experts=EXPERTS)
    module = filled(of_transformers("llama4", "Llama4TextExperts")(config))
    x = drawn(EXPERTS, TOKENS, WIDTH)
    experts = experts_of(module)
    for gate, up, down in experts:
        assert gate.shape == up.shape == (HIDDEN, WIDTH)
        assert down.shape == (WIDTH, HIDDEN)
    output = [
        (F.silu(tokens @ gate.T) * (tokens @ up.T)) @ down.T
        for tokens, (gate, up, down) in zip(x, experts, strict=True)
    ]
    torch.testing.assert_close(torch.cat(output), module(x))


def routed(one_expert: Any, x: Tensor) -> Tensor:
    """Return the sum over the two experts of each token, each with its share."""
    where, shares = routes()
    rows = []
    for token, experts, share in zip(x, where, shares, strict=True):
        outputs = [s * one_expert(token, int(i)) for i, s in zip(experts, share, strict=True)]
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)


def routes() -> tuple[Tensor, Tensor]:
    """Return two experts for each token, and their shares."""
    where = torch.tensor([[i % EXPERTS, (i + 1 + i % 2) % EXPERTS] for i in range(TOKENS)])
    return where, drawn(TOKENS, 2, seed=5).softmax(-1)


@pytest.mark.parametrize(
    ("model", "name", "count"),
    [
        ("qwen3_moe", "Qwen3Moe", "num_experts"),
        ("deepseek_v3", "DeepseekV3", "n_routed_experts"),
        ("glm_moe_dsa", "GlmMoeDsa", "n_routed_experts"),
    ],
)
def test_experts_of_transformers(model: str, name: str, count: str) -> None:
    sizes = {**SIZES, "moe_intermediate_size": HIDDEN, count: EXPERTS}
    config = getattr(transformers, f"{name}Config")(**sizes)
    config._experts_implementation = "eager"
    module = filled(of_transformers(model, f"{name}Experts")(config))
    experts = experts_of(module)
    x = drawn(TOKENS, WIDTH)

    def one_expert(token: Tensor, i: int) -> Tensor:
        gate, up, down = experts[i]
        return down @ (F.silu(gate @ token) * (up @ token))

    torch.testing.assert_close(routed(one_expert, x), module(x, *routes()))


def test_gpt_oss() -> None:
    config = transformers.GptOssConfig(**SIZES, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    module = filled(of_transformers("gpt_oss", "GptOssExperts")(config))
    experts = experts_of(module)
    gate_biases = module.gate_up_proj_bias[:, ::2]
    up_biases = module.gate_up_proj_bias[:, 1::2]
    x = drawn(TOKENS, WIDTH)

    def one_expert(token: Tensor, i: int) -> Tensor:
        gate, up, down = experts[i]
        g = (gate @ token + gate_biases[i]).clamp(max=module.limit)
        u = (up @ token + up_biases[i]).clamp(-module.limit, module.limit)
        return down @ ((u + 1) * g * torch.sigmoid(g * module.alpha)) + module.down_proj_bias[i]

    torch.testing.assert_close(routed(one_expert, x), module(x, *routes()))


# ---------------------------------------------------------------------- GPT-2


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_attention_of_gpt2(cross: bool, per_head: bool) -> None:
    config = transformers.GPT2Config(n_embd=WIDTH, n_head=4, attn_implementation="eager")
    cls = of_transformers("gpt2", "GPT2Attention")
    module = filled(cls(config, is_cross_attention=cross, layer_idx=0)).eval()
    x = drawn(1, TOKENS, WIDTH)
    y = drawn(1, 5, WIDTH, seed=1) if cross else x
    cut = matrices(module, per_head=per_head)
    count = 4 if per_head else 1
    in_order = [*cut.get("q_attn.weight", []), *cut["c_attn.weight"]]
    assert len(in_order) == 3 * count
    layers = [module.q_attn, module.c_attn] if cross else [module.c_attn]
    biases = torch.cat([layer.bias for layer in layers]).chunk(3 * count)
    sources = [x[0]] * count + [y[0]] * 2 * count
    parts = [source @ w.T + b for source, w, b in zip(sources, in_order, biases, strict=True)]
    heads = [torch.cat(parts[i : i + count], dim=1) for i in (0, count, 2 * count)]
    queries, keys, values = [t.unflatten(1, (4, 4)).transpose(0, 1) for t in heads]
    shares = (queries @ keys.mT / 2).softmax(-1)
    joined = (shares @ values).transpose(0, 1).flatten(1)
    (out,) = cut["c_proj.weight"]
    output = joined @ out.T + module.c_proj.bias
    seen = {"encoder_hidden_states": y} if cross else {}
    torch.testing.assert_close(output, module(x, **seen)[0][0])


# ---------------------------------------------------------------------- Phi-3


def test_gate_and_up_of_phi3() -> None:
    module = filled(of_transformers("phi3", "Phi3MLP")(transformers.Phi3Config(**SIZES)))
    x = drawn(TOKENS, WIDTH)
    gate, up = matrices(module)["gate_up_proj.weight"]
    output = (F.silu(x @ gate.T) * (x @ up.T)) @ module.down_proj.weight.T
    torch.testing.assert_close(output, module(x))


@pytest.mark.parametrize("per_head", [False, True])
def test_attention_of_phi3(per_head: bool) -> None:
    module = filled(of_transformers("phi3", "Phi3Attention")(transformers.Phi3Config(**SIZES), 0))
    x = drawn(1, TOKENS, WIDTH)
    cut = matrices(module, per_head=per_head)["qkv_proj.weight"]
    assert len(cut) == (8 if per_head else 3)
    if per_head:
        queries, keys, values = torch.stack([x[0] @ w.T for w in cut]).split([4, 2, 2])
    else:
        queries, keys, values = [(x[0] @ w.T).unflatten(1, (-1, 4)).transpose(0, 1) for w in cut]
    keys = keys.repeat_interleave(2, 0)
    values = values.repeat_interleave(2, 0)
    shares = (queries @ keys.mT / 2).softmax(-1)
    output = (shares @ values).transpose(0, 1).flatten(1) @ module.o_proj.weight.T
    still = torch.ones(1, TOKENS, 4), torch.zeros(1, TOKENS, 4)  # rotations by no angle
    torch.testing.assert_close(output, module(x, still, None)[0][0])


# ---------------------------------------------------------------------- latent attention

LATENT = {
    "q_lora_rank": 10,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
}


@pytest.mark.parametrize("rank", [10, None])
def test_latent_attention_of_deepseek_v3(rank: int | None) -> None:
    sizes = {**SIZES, "num_key_value_heads": 4, **LATENT, "q_lora_rank": rank}
    config = transformers.DeepseekV3Config(**sizes)
    module = filled(of_transformers("deepseek_v3", "DeepseekV3Attention")(config, 0))
    assert layout_of(module) == {}
    cut = matrices(module, per_head=True)
    keys_and_values = cut["kv_b_proj.weight"]
    queries = cut["q_proj.weight" if rank is None else "q_b_proj.weight"]
    x = drawn(1, TOKENS, WIDTH)
    latent, rotary = module.kv_a_proj_with_mqa(x)[0].split([9, 4], dim=-1)
    latent = module.kv_a_layernorm(latent)
    low = x[0] if rank is None else module.q_a_layernorm(module.q_a_proj(x[0]))
    outputs = []
    for i in range(4):
        key = torch.cat([latent @ keys_and_values[2 * i].T, rotary], dim=1)
        shares = (low @ queries[i].T @ key.T * module.scaling).softmax(-1)
        outputs.append(shares @ (latent @ keys_and_values[2 * i + 1].T))
    output = torch.cat(outputs, dim=1) @ module.o_proj.weight.T
    # Without a rotation, an interleaved order of the rotary dims changes queries and keys alike.
    still = torch.ones(1, TOKENS, 4), torch.zeros(1, TOKENS, 4)
    torch.testing.assert_close(output, module(x, still, None)[0][0])


def test_every_fused_parameter_of_a_small_model_is_found() -> None:
    """The whole models, from small configs."""
    sizes = {**SIZES, "moe_intermediate_size": HIDDEN, "num_experts": EXPERTS}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    assert layout_of(model) == {
        "model.layers.*.mlp.experts.gate_up_proj": "e (gate rows) d -> e gate rows d, gate=2",
        "model.layers.*.mlp.experts.down_proj": "e rows d -> e rows d",
    }
    phi3 = transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES))
    assert layout_of(phi3) == {
        "model.layers.*.self_attn.qkv_proj.weight": [16, 8, 8],
        "model.layers.*.mlp.gate_up_proj.weight": "(gate rows) d -> gate rows d, gate=2",
    }


MODELS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": WIDTH, "n_head": 4, "n_layer": 2},
    "Phi3": {},
    "Qwen3Moe": {"moe_intermediate_size": HIDDEN, "num_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
    "DeepseekV3": {
        "moe_intermediate_size": HIDDEN,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **LATENT,
        "num_key_value_heads": 4,
    },
}


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_small_model_trains_with_muon(name: str, per_head: bool) -> None:
    """No parameter of a branch lacks a layout that it needs, and no layout lacks its parameter."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
    model_class = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, model_class)(config)
    layout = layout_of(model, per_head=per_head)
    muon = Chain(EMA(0.95), Orthogonalize(scale="match_rms_adamw", layout=layout))
    parts = Partition({"matrices": muon, "rest": Adam()}, matrices_and_rest(model))
    opt = Modular(model.named_parameters(), ClipNorm(1.0, dim="global"), parts, LR(1e-2))
    ids = torch.arange(24).view(2, 12) % 7 + 1
    losses = []
    for _ in range(12):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 1.2


# ---------------------------------------------------------------------- Megatron-LM


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """The groups of Megatron-LM for one process."""
    parallel_state = need("megatron.core.parallel_state")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def test_gpt_of_megatron(alone: None) -> None:
    """Its own classes, with two groups of queries and a gated feed-forward layer."""
    specs = need("megatron.core.models.gpt.gpt_layer_specs")
    config = need("megatron.core.transformer").TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=3,
        ffn_hidden_size=8,
        gated_linear_unit=True,
        add_bias_linear=False,
        bias_activation_fusion=False,
        activation_func=F.silu,
        use_cpu_initialization=True,
    )
    model = need("megatron.core.models.gpt").GPTModel(
        config, specs.get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=16
    )
    cut = matrices(model)
    assert len(cut) == 4
    layer = model.decoder.layers[1]
    x = drawn(TOKENS, 1, 12)
    gate, up = cut["decoder.layers.1.mlp.linear_fc1.weight"]
    output = (F.silu(x @ gate.T) * (x @ up.T)) @ layer.mlp.linear_fc2.weight.T
    torch.testing.assert_close(output, layer.mlp(x)[0])
    query, key, value = layer.self_attention.get_query_key_value_tensors(x)
    heads = [x @ w.T for w in cut["decoder.layers.1.self_attention.linear_qkv.weight"]]
    for i, group in enumerate((heads[:4], heads[4:])):
        *queries, group_key, group_value = group
        torch.testing.assert_close(torch.stack(queries, 2), query[:, :, 2 * i : 2 * i + 2])
        torch.testing.assert_close(group_key, key[:, :, i])
        torch.testing.assert_close(group_value, value[:, :, i])
