"""skorch: a grid search over the clipping threshold."""

import numpy as np
import torch
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier

from torchzero_clip import LR, Adam, ClipNorm, optimizer_class

Clipped = optimizer_class(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU())
        self.head = torch.nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.layers(x)).softmax(-1)


rng = np.random.default_rng(0)
data = rng.normal(size=(120, 4)).astype(np.float32)
labels = (data.sum(axis=1) > 0).astype(np.int64)

torch.manual_seed(0)
net = NeuralNetClassifier(Net, optimizer=Clipped, lr=1e-2, max_epochs=5, verbose=0)
search = GridSearchCV(net, {"optimizer__max_norm": [1e-6, 1.0], "lr": [1e-2]}, cv=3)
search.fit(data, labels)
found = search.best_estimator_.optimizer_.param_groups[0]
print(found["max_norm"] in (1e-6, 1.0), found["lr"], search.best_score_ > 0.8)
# → True 0.01 True
