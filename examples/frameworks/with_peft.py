"""peft: LoRA+, which gives B a higher learning rate than A, with a chain as the optimizer."""

import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from transformers import GPT2Config, GPT2LMHeadModel

from torchzero_clip import LR, Adam, ClipNorm, WeightDecay, optimizer_class

Clipped = optimizer_class(ClipNorm(1.0, dim="global"), Adam(), WeightDecay(0.0), LR(1e-4))

torch.manual_seed(0)
sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 64}
gpt = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
model = get_peft_model(gpt, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))

ratio = {"lr": 1e-3, "loraplus_lr_ratio": 16, "loraplus_weight_decay": 0.01}
opt = create_loraplus_optimizer(model, Clipped, **ratio, max_norm=0.5)
tokens = torch.randint(64, (8, 16))
for _ in range(3):
    opt.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    opt.step()
print([(group["lr"], group["max_norm"]) for group in opt.param_groups if group["params"]])
# → [(0.001, 0.5), (0.016, 0.5)]
