"""Opacus: differentially private training, with a chain that receives the noisy gradient."""

import torch
from opacus import PrivacyEngine

from torchzero_clip import LR, Adam, ClipNorm, Modular

torch.manual_seed(0)
rows = torch.utils.data.TensorDataset(torch.randn(128, 4), torch.randn(128, 1))
loader = torch.utils.data.DataLoader(rows, batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

opt = Modular(model.parameters(), ClipNorm(1.0, dim="global"), Adam(), LR(1e-2))
private = {
    "noise_multiplier": 1.0,
    "max_grad_norm": 1.0,
}  # of every example: not ours to switch off
engine = PrivacyEngine()
model, opt, loader = engine.make_private(module=model, optimizer=opt, data_loader=loader, **private)

for x, y in loader:
    opt.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    opt.step()
print(engine.get_epsilon(delta=1e-5) > 0, *opt.original_optimizer.metrics())
# → True ClipNorm/norm ClipNorm/limit ClipNorm/factor ClipNorm/clipped
