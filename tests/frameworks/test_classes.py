"""Classes that optimizer_class makes go where frameworks send them: to workers, and into files."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tests.frameworks.common import need
from tests.helpers import equal, state_of
from torchzero_clip import LR, Adam, ClipNorm, ZClip, attach, optimizer_class

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


def clipped() -> Any:
    """A class that no module has under its name."""
    return optimizer_class(ClipNorm(1.0, dim="global"), ZClip(max_norm=None), Adam(), LR(1e-3))


def rows() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def net(**kwargs: Any) -> Any:
    sizes = {"module__in_features": 4, "module__out_features": 1}
    regressor = need("skorch").NeuralNetRegressor
    return regressor(torch.nn.Linear, **sizes, verbose=0, max_epochs=3, lr=1e-2, **kwargs)


def test_a_grid_search_of_skorch_sends_the_class_to_its_workers():
    search = need("sklearn.model_selection").GridSearchCV
    kind = optimizer_class(ClipNorm(1.0, dim="global"), Adam(), LR(1e-3))
    limits = [1e-6, 1.0]
    found = search(net(optimizer=kind), {"optimizer__max_norm": limits}, cv=2, n_jobs=2)
    found.fit(*rows())
    assert found.cv_results_["param_optimizer__max_norm"].tolist() == limits
    group = found.best_estimator_.optimizer_.param_groups[0]
    assert group["max_norm"] == found.best_params_["optimizer__max_norm"]
    assert type(found.best_estimator_.optimizer_) is kind


@pytest.mark.parametrize("module", ["pickle", "cloudpickle"])
def test_a_net_of_skorch_survives_pickle_with_the_state_of_its_chain(module):
    fitted = net(optimizer=clipped()).fit(*rows())
    twin = pickle.loads(need(module).dumps(fitted))
    assert equal(state_of(twin.optimizer_), state_of(fitted.optimizer_))
    assert type(twin.optimizer_) is type(fitted.optimizer_)
    assert fitted.optimizer_.param_groups[0]["chain"]["ZClip/count"] > 0


def test_save_params_of_skorch_has_the_state_of_an_attached_rule():
    def start() -> tuple[Any, Any]:
        made = net(optimizer=torch.optim.AdamW).initialize()
        return made, attach(made.optimizer_, ZClip(), in_checkpoint=True)

    first, handle = start()
    first.partial_fit(*rows())
    file = io.BytesIO()
    first.save_params(f_optimizer=file)
    file.seek(0)
    second, other = start()
    second.load_params(f_optimizer=file)
    assert equal(state_of(other), state_of(handle))
    assert other.param_groups[0]["chain"]["ZClip/count"] > 0


def test_an_agent_of_stable_baselines3_is_loaded_with_the_state_of_its_chain(tmp_path):
    ppo = need("stable_baselines3").PPO
    policy = {"optimizer_class": clipped(), "optimizer_kwargs": {"ClipNorm/max_norm": 0.25}}
    sizes = {"n_steps": 64, "max_grad_norm": float("inf"), "seed": 0}
    agent = ppo("MlpPolicy", "CartPole-v1", policy_kwargs=policy, **sizes)
    agent.learn(128)
    agent.save(tmp_path / "agent")
    again = ppo.load(tmp_path / "agent")
    ours, theirs = agent.policy.optimizer, again.policy.optimizer
    assert equal(state_of(theirs), state_of(ours))
    assert theirs.param_groups[0]["ClipNorm/max_norm"] == 0.25
    assert ours.param_groups[0]["chain"]["ZClip/count"] > 0
