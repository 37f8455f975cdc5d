"""A chain as a class: its arguments are the live values, and it survives every way of copying."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.helpers import equal, network, state_of
from tests.processes.launch import FORKS, python
from torchzero_clip import (
    LR,
    Adam,
    ClipNorm,
    ClipNormGrowth,
    Modular,
    Partition,
    Scale,
    WeightDecay,
    ZClip,
    attach,
    named,
    optimizer_class,
    safe_globals,
)
from torchzero_clip.core import Description
from torchzero_clip.published import NAMES

Clipped = optimizer_class(ClipNorm(1.0, dim="global"), ZClip(), Adam(), LR(1e-3), name="Clipped")


def label_of(name: str, param: torch.Tensor) -> str:
    return "a"


class Halved(Scale):
    """A rule of this module, which the library does not know."""


class Inherits(Clipped):  # type: ignore[valid-type,misc]
    """A class of this module that a made one is the base of."""


def train(opt: Any, params: list[Parameter], steps: int = 3, seed: int = 0) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = 3 * torch.randn(p.shape, generator=rng)
        opt.step()
    return [p.detach().clone() for p in params]


def params() -> list[Parameter]:
    return list(network().parameters())


# ---------------------------------------------------------------------- its arguments


def test_its_arguments_are_the_live_values_and_the_chain_has_their_defaults():
    opt = Clipped(params(), lr=3e-4, betas=(0.8, 0.9))
    (group,) = opt.param_groups
    assert (group["lr"], group["betas"], group["ClipNorm/max_norm"]) == (3e-4, (0.8, 0.9), 1.0)
    assert opt.defaults["lr"] == 3e-4
    assert isinstance(opt, Modular)
    assert type(opt).__name__ == "Clipped"


def test_it_trains_as_the_chain_with_these_values_does():
    ours, theirs = params(), params()
    made = Clipped(ours, lr=1e-2, z_thresh=3.0)
    by_hand = Modular(theirs, ClipNorm(1.0, dim="global"), ZClip(z_thresh=3.0), Adam(), LR(1e-2))
    assert equal(train(made, ours), train(by_hand, theirs))


def test_groups_come_first_and_later_groups_have_the_arguments_too():
    a, b, c = params()[:3]
    opt = Clipped([{"params": [a], "lr": 0.1}, {"params": [b]}], lr=0.2)
    opt.add_param_group({"params": [c]})
    assert [group["lr"] for group in opt.param_groups] == [0.1, 0.2, 0.2]
    twin = copy.deepcopy(opt)
    twin.add_param_group({"params": params()})
    assert twin.param_groups[-1]["lr"] == 0.2


def test_a_value_of_one_of_two_links_has_its_link_in_front():
    opt = Clipped(params(), **{"ClipNorm/max_norm": 0.5, "ZClip/max_norm": 2.0})
    assert opt.param_groups[0]["ClipNorm/max_norm"] == 0.5
    one = optimizer_class(ClipNorm(1.0), LR(0.1))(params(), **{"ClipNorm/max_norm": 0.5})
    assert one.param_groups[0]["max_norm"] == 0.5


def test_options_of_modular_are_arguments_with_defaults_of_their_own():
    kind = optimizer_class(Adam(), LR(0.1), rounding="kahan", fused=False)
    assert (kind(params()).rounding, kind(params()).fused) == ("kahan", False)
    assert kind(params(), rounding="nearest", fused=True).rounding == "nearest"


def test_its_signature_shows_names_and_defaults():
    shown = inspect.signature(optimizer_class(ClipNorm(0.5), Adam(), LR(1e-3), compile=True))
    assert str(shown) == (
        "(params, lr=0.001, *, max_norm=0.5, betas=(0.9, 0.999), eps=1e-08, fused=True, "
        "compile=True, rounding=None, state_dtype='float32', process_group=None, "
        "grad='grad')"
    )
    assert "ClipNorm/max_norm" not in str(inspect.signature(Clipped))


def test_lr_may_come_second_as_in_every_optimizer_of_torch():
    assert Clipped(params(), 0.25).param_groups[0]["lr"] == 0.25
    assert Clipped(params(), None).param_groups[0]["lr"] == 1e-3
    without = optimizer_class(ClipNorm(1.0))
    assert "lr" not in inspect.signature(without).parameters
    with pytest.raises(ValueError, match=r"no transform uses it: add LR\(...\)"):
        without(params(), 0.25)


def test_what_is_off_asks_for_nothing():
    """Frameworks pass weight_decay=0, foreach=None, amsgrad=False whatever the class is."""
    opt = Clipped(params(), lr=0.1, weight_decay=0.0, foreach=None, amsgrad=False)
    assert not {"weight_decay", "foreach", "amsgrad"} & opt.param_groups[0].keys()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"weight_decay": 0.1}, "no transform uses it: add WeightDecay"),
        ({"z_tresh": 3.0}, "did you mean 'z_thresh'"),
        ({"max_norm": 3.0}, "'max_norm' of a parameter group is ambiguous"),
        (
            {"foreach": True},
            r"Clipped: there is no argument 'foreach', got True; the arguments are \[",
        ),
        ({"lr": -1.0}, "LR: lr must be a finite number of at least 0, got -1.0"),
    ],
)
def test_arguments_that_make_no_sense_are_sentences(given, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        Clipped(params(), **given)


def test_what_makes_no_class_is_a_sentence():
    with pytest.raises(ValueError, match="requires at least one transform"):
        optimizer_class()
    with pytest.raises(
        TypeError,
        match=r"there is no argument 'lr'; .* Pass hyperparameters to the transforms",
    ):
        optimizer_class(Adam(), lr=1e-3)
    with pytest.raises(TypeError, match="a chain must contain only transforms"):
        optimizer_class(Adam)
    with pytest.raises(TypeError, match="already contains transforms"):
        attach(Clipped(params()), ClipNorm(1.0))


# ---------------------------------------------------------------------- Modular with arguments


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lr": 1e-3}, r"there is no argument 'lr': add LR\(lr=0.001\) to the transforms"),
        ({"lr": 1e-3}, r"passes lr=, use optimizer_class\(...\)"),
        ({"weight_decay": 0.1}, r"add WeightDecay\(weight_decay=0.1\) to the"),
        ({"max_norm": 1.0}, r"add ClipNorm\(max_norm=1.0\) to the"),
        ({"betas": (0.8, 0.9)}, r"add Adam\(betas=\(0.8, 0.9\)\) to the"),
        ({"maximize": True}, r"add Scale\(-1\) to the transforms"),
        ({"compiled": True}, "did you mean 'compile'"),
        (
            {"foo": 1},
            r"there is no argument 'foo'; the arguments are \['params', 'fused', 'compile'",
        ),
    ],
)
@pytest.mark.parametrize("chain", [[], [Adam(), LR(0.1)]], ids=["alone", "beside a chain"])
def test_modular_says_what_to_write_for_an_argument_that_it_lacks(given, sentence, chain):
    with pytest.raises(TypeError, match=f"Modular: .*{sentence}"):
        Modular(params(), *chain, **given)


# ---------------------------------------------------------------------- copies


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_the_class_survives_pickle_and_a_process_has_it_once(protocol):
    for kind in (Clipped, Inherits):
        assert pickle.loads(pickle.dumps(kind, protocol)) is kind
        assert copy.deepcopy(kind) is copy.copy(kind) is kind


@pytest.mark.parametrize("kind", [Clipped, Inherits])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_an_optimizer_goes_on_as_the_original(way, kind):
    mine = params()
    opt = kind(mine, lr=1e-2, rounding="kahan")
    train(opt, mine)
    twins, twin = way((mine, opt))
    assert type(twin) is kind
    assert (twin.defaults["lr"], twin.rounding) == (1e-2, "kahan")
    assert equal(train(opt, mine, seed=1), train(twin, twins, seed=1))
    assert equal(state_of(opt), state_of(twin))


def lr_of(kind: Any) -> Any:
    opt = kind([Parameter(torch.ones(2))], lr=0.25)
    return kind, opt.param_groups[0]["lr"]


def test_the_class_goes_to_another_process_and_comes_back_as_itself():
    with FORKS.Pool(1) as pool:
        assert pool.apply(lr_of, (Clipped,)) == (Clipped, 0.25)


def test_a_process_that_never_made_the_class_reads_it_and_its_optimizers(tmp_path):
    nested = optimizer_class(
        Partition({"a": Scale(2.0), "b": ClipNormGrowth()}, labels=len), WeightDecay(0.1), LR(0.1)
    )
    kind = optimizer_class(ClipNorm(1.0), Adam(), LR(1e-3), name="Mine")
    path = tmp_path / "class.pkl"
    path.write_bytes(pickle.dumps((kind, kind(params(), lr=0.5), nested)))
    code = (
        f"import pickle; kind, opt, nested = pickle.load(open({str(path)!r}, 'rb'))\n"
        f"again, *_ = pickle.load(open({str(path)!r}, 'rb'))\n"
        "print(kind.__name__, type(opt) is kind is again, opt.param_groups[0]['lr'])\n"
        "print(nested.own_chain)"
    )
    done = python("-c", code)
    assert done.stdout.splitlines() == ["Mine True 0.5", str(nested.own_chain)]


def test_state_dicts_are_those_of_the_chain():
    mine, theirs = params(), params()
    opt = Clipped(mine, lr=1e-2)
    train(opt, mine)
    plain = Modular(theirs, ClipNorm(1.0, dim="global"), ZClip(), Adam(), LR(1e-2))
    plain.load_state_dict(opt.state_dict())
    other = Clipped(params(), lr=1e-2)
    other.load_state_dict(plain.state_dict())
    assert equal(state_of(other)["param_groups"], state_of(opt)["param_groups"])


# ---------------------------------------------------------------------- loads with weights_only


def saved(value: Any) -> io.BytesIO:
    torch.save({"hyper_parameters": {"optimizer": value}}, file := io.BytesIO())
    file.seek(0)
    return file


def loaded(file: io.BytesIO) -> Any:
    return torch.load(file, weights_only=True)["hyper_parameters"]["optimizer"]


def test_a_class_in_hyperparameters_is_refused_until_its_globals_are_allowed():
    with pytest.raises(pickle.UnpicklingError, match="_rebuild_optimizer_class"):
        loaded(saved(Clipped))
    with torch.serialization.safe_globals(safe_globals()):
        assert loaded(saved(Clipped)) is Clipped


@pytest.mark.parametrize("method", NAMES)
def test_the_class_of_every_named_method_loads_with_weights_only(method):
    links = named(method)
    kind = optimizer_class(*links)
    with torch.serialization.safe_globals(safe_globals()):
        assert loaded(saved(kind)) is kind
        assert loaded(saved(links)) == links


def test_a_process_that_never_made_the_class_loads_it_with_weights_only(tmp_path):
    kind = optimizer_class(
        Partition({"a": Scale(2.0), "b": ClipNormGrowth()}, labels={"*": "a"}), Adam(), LR(0.1)
    )
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(saved(kind).getvalue())
    code = (
        "import torch; from torchzero_clip import safe_globals\n"
        "torch.serialization.add_safe_globals(safe_globals())\n"
        f"checkpoint = torch.load({str(path)!r}, weights_only=True)\n"
        "print(checkpoint['hyper_parameters']['optimizer'].own_chain)"
    )
    assert python("-c", code).stdout.strip() == str(kind.own_chain)


def test_rules_and_functions_of_the_user_stay_refused_until_they_are_added():
    with torch.serialization.safe_globals(safe_globals()):
        with pytest.raises(pickle.UnpicklingError, match="Halved"):
            loaded(saved(optimizer_class(Halved(0.5), LR(0.1))))
        with pytest.raises(pickle.UnpicklingError, match=r"label_of\b"):
            loaded(saved(optimizer_class(Partition({"a": Adam()}, labels=label_of), LR(0.1))))
    kind = optimizer_class(Halved(0.5), LR(0.1))
    with torch.serialization.safe_globals([*safe_globals(), Halved]):
        assert loaded(saved(kind)) is kind


def test_what_is_allowed_is_rules_of_the_library_and_one_function():
    function, *rules = safe_globals()
    assert inspect.isfunction(function)
    assert all(issubclass(rule, Description) for rule in rules)
    assert {rule.__module__.partition(".")[0] for rule in rules} == {"torchzero_clip"}
