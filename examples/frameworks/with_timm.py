"""timm: a chain in the registry, with layer decay, a schedule, Lookahead, and a resumed run."""

import timm
import torch
from timm.optim import Lookahead, OptimInfo, create_optimizer_v2
from timm.optim._optim_factory import default_registry
from timm.scheduler import create_scheduler_v2

from torchzero_clip import AGC, LR, Adam, WeightDecay, optimizer_class

Clipped = optimizer_class(AGC(0.01), Adam(), WeightDecay(0.0), LR(1e-3))
default_registry.register(OptimInfo("agc_adamw", Clipped))

torch.manual_seed(0)
images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])


def start():
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2, **sizes)
    opt = create_optimizer_v2(model, "agc_adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    opt = Lookahead(opt, k=2)
    schedule, _ = create_scheduler_v2(opt, "cosine", num_epochs=6, warmup_epochs=2)
    return model, opt, schedule


def train(model, opt, schedule, epochs):
    for epoch in epochs:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        opt.step()
        schedule.step(epoch + 1)


run, resumed = start(), start()
train(*run, range(3))
torch.save([part.state_dict() for part in run], "half.pt")
held = torch.load("half.pt", weights_only=True)
for part, state in zip(resumed, held, strict=True):
    part.load_state_dict(state)
train(*run, range(3, 6))
train(*resumed, range(3, 6))
print(all(map(torch.equal, run[0].parameters(), resumed[0].parameters())))
# → True
