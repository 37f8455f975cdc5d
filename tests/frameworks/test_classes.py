"""Classes that optimizer_class makes go where frameworks send them: to workers, and into files."""

from __future__ import annotations

import io
import pickle
import pydoc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.frameworks.common import need
from tests.helpers import equal, state_of
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    WeightDecay,
    ZClip,
    attach,
    optimizer_class,
    safe_globals,
)

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


QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}
SINE = np.sin(np.arange(120) / 5).astype(np.float32)


def test_hyperparameters_of_lightning_load_with_weights_only(tmp_path):
    lightning = need("lightning.pytorch")

    class Lit(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, optimizer: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any) -> Any:
            return self.net(batch[0]).square().mean()

        validation_step = training_step

        def configure_optimizers(self) -> Any:
            return self.hparams.optimizer(self.parameters())

    kind, path = clipped(), tmp_path / "lit.ckpt"
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)))
    trainer = lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(model := Lit(kind), batches)
    trainer.save_checkpoint(path)
    with pytest.raises(pickle.UnpicklingError, match="_rebuild_optimizer_class"):
        trainer.validate(model, batches, ckpt_path=path, verbose=False)
    with torch.serialization.safe_globals(safe_globals()):
        trainer.validate(model, batches, ckpt_path=path, verbose=False)
        trainer.fit(Lit(kind), batches, ckpt_path=path)
        again = Lit.load_from_checkpoint(path, weights_only=True)
    assert again.hparams.optimizer is kind
    assert equal(again.net.state_dict(), model.net.state_dict())


@pytest.mark.parametrize("way", ["load", "load_from_checkpoint"])
def test_a_model_of_darts_is_loaded_where_the_globals_are_allowed(tmp_path, way):
    need("darts")
    models, serialization = need("darts.models"), need("darts.utils.serialization")
    series = need("darts").TimeSeries.from_values(SINE)
    names = {"model_name": "sine", "work_dir": str(tmp_path)}
    model = models.NLinearModel(
        8, 4, n_epochs=1, optimizer_cls=clipped(), pl_trainer_kwargs=QUIET, save_checkpoints=True,
        **names,
    )  # fmt: skip
    model.fit(series)
    model.save(str(tmp_path / "model.pt"))

    def load() -> Any:
        if way == "load":
            return models.NLinearModel.load(str(tmp_path / "model.pt"))
        return models.NLinearModel.load_from_checkpoint(**names, best=False)

    with pytest.raises(Exception, match="_rebuild_optimizer_class"):  # one of darts' own
        load()
    with serialization.safe_globals(safe_globals()):
        again = load()
        expected = model.predict(4, series=series).values()
        np.testing.assert_array_equal(again.predict(4, series=series).values(), expected)
        again.fit(series)  # opens the checkpoint once more
    assert again.model.optimizer_cls is model.model.optimizer_cls


def test_a_model_of_pytorch_forecasting_loads_with_weights_only(tmp_path):
    """Its own metrics and encoders have to be allowed as well, whatever the optimizer is."""
    forecasting, lightning = need("pytorch_forecasting"), need("lightning.pytorch")
    pandas = need("pandas")
    rows = pandas.DataFrame({"time": range(len(SINE)), "value": SINE, "series": "sine"})
    lengths = {"max_encoder_length": 16, "min_encoder_length": 16}
    data = forecasting.TimeSeriesDataSet(
        rows, time_idx="time", target="value", group_ids=["series"], max_prediction_length=4,
        min_prediction_length=4, time_varying_unknown_reals=["value"], **lengths,
    )  # fmt: skip
    batches = data.to_dataloader(train=True, batch_size=16, num_workers=0)
    decayed = optimizer_class(ClipNorm(1.0), Adam(), WeightDecay(0.0), LR(1e-3))
    net = forecasting.NBeats.from_dataset(data, optimizer=decayed, widths=[8, 16])
    trainer = lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(net, batches)
    path = Path(tmp_path) / "net.ckpt"
    trainer.save_checkpoint(path)

    needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    theirs = [pydoc.locate(name) for name in needed if not name.startswith("torchzero_clip.")]
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    with torch.serialization.safe_globals([*theirs, *dtypes]):
        with pytest.raises(pickle.UnpicklingError, match="_rebuild_optimizer_class"):
            forecasting.NBeats.load_from_checkpoint(path, weights_only=True)
        with torch.serialization.safe_globals(safe_globals()):
            again = forecasting.NBeats.load_from_checkpoint(path, weights_only=True)
    assert again.hparams.optimizer is net.hparams.optimizer
    assert equal(again.state_dict(), net.state_dict())
