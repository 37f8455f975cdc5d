"""megatron_entry: a chain in Megatron-LM's registry of optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from torchzero_clip.core import Step, Transform, bind
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.formats import KEPT
from torchzero_clip.core.link import Link
from torchzero_clip.core.names import hint
from torchzero_clip.core.tensor_kinds import is_sharded
from torchzero_clip.core.user_warnings import warn
from torchzero_clip.optimizer.averages import params_of
from torchzero_clip.optimizer.cut_parameters import has_whole_norms, is_entrywise
from torchzero_clip.optimizer.keys import GroupKeys
from torchzero_clip.optimizer_class import ChainOptimizer, optimizer_class

SHAPE = (6, 5)  # of a matrix that stands for all
CONFIG: dict[str, Callable[[Any], Any]] = {  # what a field of its OptimizerConfig is called here
    "lr": lambda config: config.lr,
    "weight_decay": lambda config: config.weight_decay,
    "betas": lambda config: (config.adam_beta1, config.adam_beta2),
    "eps": lambda config: config.adam_eps,
}


class MegatronEntry(NamedTuple):
    """What the registry asks of an optimizer, by the names of its own entries.

    Attributes:
        optimizer_cls: The class of the optimizer.
        init_state_fn: Makes the state of every parameter, as a checkpoint is loaded into it.
        config_to_kwargs: The arguments of the class, from the configuration, the parts of the model
            here and the process groups.
        default_param_overrides: Parameters that go to another optimizer: none.
    """

    optimizer_cls: type[ChainOptimizer]
    init_state_fn: Callable[..., None]
    config_to_kwargs: Callable[..., dict[str, Any]]
    default_param_overrides: dict[Any, dict[str, Any]]


def megatron_entry(
    *transforms: Transform, names: Mapping[str, str] | None = None, **options: Any
) -> MegatronEntry:
    """A chain as an entry of Megatron-LM's registry of optimizers.

    The rate, the decay, betas and eps come from its configuration, where links of the chain own
    them, and its schedules move them. Matrices are whole there; a rule that looks at tensors
    refuses the flat shards of its DistributedOptimizer.

    Args:
        *transforms: The chain, first to last.
        names: What state is called in checkpoints, as {"Adam/exp_avg": "m"}, no two alike. Others
            lose their path where no two end alike: "exp_avg".
        **options: As for `Modular`.

    Example:
        >>> from torchzero_clip import LR, Adam, WeightDecay, ZClip, megatron_entry
        >>> entry = megatron_entry(ZClip(), Adam(), WeightDecay(0.1), LR(1e-3))
        >>> print(entry.optimizer_cls.__name__)
        MegatronChain
    """
    made = optimizer_class(*transforms, name="MegatronChain", **options)
    links = [link for top in bind(Chain(*transforms)) for link in top.walk()]
    _check_names(names or {}, links, options.get("rounding"))
    called = {**_names(links), **(names or {})}
    if len(set(called.values())) < len(called):
        raise ValueError(f"megatron_entry: names must give each state a name of its own: {called}")
    body = {"names": called, "__doc__": made.__doc__}
    meta: Any = type(made)
    kind = meta(made.__name__, (_InMegatron, made), body)
    odd = [key for key, shape in _state(links).items() if shape != SHAPE]
    odd = [key for key in odd if called.get(key) != "step"]
    if odd:
        warn(
            f"megatron_entry: {', '.join(odd)} of a parameter has not its shape, and the format "
            "torch_dist has no place for it: save with --ckpt-format torch, or take rules with "
            "state like parameters, or of all, as dim='global'"
        )
    keys = GroupKeys(bind(Chain(*transforms))).defaults

    def kwargs(config: Any, model_chunks: Any = None, pg_collection: Any = None) -> dict[str, Any]:
        found = {key: read(config) for key, read in CONFIG.items() if key in keys}
        layer_wise = bool(getattr(config, "use_layer_wise_distributed_optimizer", False))
        if layer_wise:
            found["layer_wise"] = True
        if options.get("process_group") is None and pg_collection is not None:
            _refuse_parts(links, layer_wise, _size(getattr(pg_collection, "tp", None)))
            if any(map(_is_joint, links)):
                several = _size(getattr(pg_collection, "mp", None)) > 1
                found["process_group"] = pg_collection.mp if several else None
        return found

    return MegatronEntry(kind, _init_state, kwargs, {})


def _init_state(optimizer: Any, config: Any = None) -> None:
    optimizer.init_state()


def _check_names(names: Mapping[str, str], links: list[Link], rounding: str | None) -> None:
    """Raise an error for a name of state that the chain does not keep of parameters."""
    known = list(_state(links))
    if rounding in KEPT:
        known.append(KEPT[rounding].key)
    for key in names:
        if key not in known:
            raise ValueError(
                f"megatron_entry: names has {key!r}, which is no state that this chain keeps of a "
                f"parameter{hint(key, known) or f'; it keeps {known}'}"
            )


def _is_joint(link: Link) -> bool:
    """Return whether a rule, or a guard, looks at all parameters, or at those of a group."""
    tfm = link.transform
    if not link.transforms:
        return False
    if tfm.place == "first":
        return bool(getattr(tfm, "clips", False))
    return tfm.reach in ("group", "model") and not _only_waits(tfm)


def _only_waits(tfm: Any) -> bool:
    """Return whether a rule neither changes nor measures gradients, as `Accumulate` does."""
    return tfm.leaves == "gradient" and not hasattr(tfm, "scope")


def _refuse_parts(links: list[Link], layer_wise: bool, tensor_parallel: int) -> None:
    """Raise an error for rules that would see parts of what they measure, or parts twice."""
    for link in links:
        joint = _is_joint(link)
        if tensor_parallel > 1 and joint:
            raise ValueError(
                f"megatron_entry: {link.path} looks at all parameters, and under tensor "
                "parallelism Megatron-LM alone knows which parameters are there twice: leave the "
                "rule out; for one norm of all gradients use its clip_grad"
            )
        if tensor_parallel > 1 and not is_entrywise(link):
            raise ValueError(
                f"megatron_entry: {link.path} looks at whole tensors, and under tensor parallelism "
                "a rank has slices of matrices: leave the rule out, or use rules about entries, "
                "such as Adam"
            )
        if layer_wise and (joint or (link.transforms and link.transform.reach == "layer")):
            raise ValueError(
                f"megatron_entry: {link.path} looks at several parameters, and under a layer-wise "
                "optimizer Megatron-LM alone knows which parameters other ranks have: leave the "
                "rule out; for one norm of all gradients use its clip_grad"
            )


def _size(group: Any) -> int:
    return 1 if group is None else int(group.size())


def _state(links: list[Link]) -> dict[str, tuple[int, ...]]:
    """The shapes of the state that a chain keeps for a matrix, by key."""
    like = torch.empty(SHAPE, device="meta")
    made = {key: value for link in links for key, value in link.layout(like).items()}
    return {key: tuple(value.shape) for key, value in made.items()}


def _names(links: list[Link]) -> dict[str, str]:
    """Each key of state without its path, where no other ends like it."""
    keys = list(_state(links))
    ends = Counter([key.rpartition("/")[2] for key in keys])
    return {key: end for key in keys if ends[end := key.rpartition("/")[2]] == 1}


class _InMegatron(ChainOptimizer):
    """A chain whose state has the names that Megatron-LM reads, and which knows flat shards."""

    names: Mapping[str, str]

    def __init__(
        self, params: Any, lr: Any = None, *, layer_wise: bool = False, **values: Any
    ) -> None:
        self._whole: set[torch.Size] = set()  # the shapes of parameters as they were given
        self._layer_wise = layer_wise  # whether a rank may be left with vectors alone
        super().__init__(params, lr, **values)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and remember what its parameters were."""
        super().add_param_group(param_group)
        self._whole |= {p.shape for p in self.param_groups[-1]["params"]}

    def __getstate__(self) -> dict[str, Any]:
        whole = {"_whole": self._whole, "_layer_wise": self._layer_wise}
        return {**super().__getstate__(), **whole}

    def _begin(self, name: str = "a step", loss: Any = None) -> Step:
        self._refuse_flat()
        return super()._begin(name, loss)

    def _refuse_flat(self) -> None:
        """Raise an error if parameters are pieces of others now, and a rule needs more."""
        if not self._has_pieces():
            return
        shards = "Megatron-LM's DistributedOptimizer cuts parameters into flat shards"
        for link in self.keys.links:
            joint = _is_joint(link)
            scope = getattr(link.transform, "scope", None)
            one_norm = joint and scope in ("group", "global") and has_whole_norms(link)
            if not (is_entrywise(link) or one_norm):
                raise ValueError(
                    f"{link.path} looks at whole tensors, and {shards}: take "
                    "use_layer_wise_distributed_optimizer, or rules about entries and one norm of "
                    "all"
                )
            if joint and self.process_group is None and _size_of_world() > 1:
                raise ValueError(
                    f"{link.path} takes one norm of all, and {shards} that lie on several "
                    "processes: give process_group=, those that share the parameters"
                )

    def _has_pieces(self) -> bool:
        """Return whether parameters are flat pieces of those that were given.

        The length of a piece may be the shape of a vector, so vectors alone in place of a model
        with matrices are pieces too. A layer-wise optimizer leaves a rank some parameters, whole.
        """
        params = params_of(self)
        if any(map(is_sharded, params)):
            return False
        if not {p.shape for p in params} <= self._whole:
            return True
        had_matrices = any([len(shape) > 1 for shape in self._whole])
        flat = bool(params) and all([p.dim() < 2 for p in params])
        return flat and had_matrices and not self._layer_wise

    def state_dict(self) -> dict[str, Any]:
        """The state by the names of Megatron-LM."""
        return self._renamed(super().state_dict(), self.names)

    def load_state_dict(self, state_dict: dict[str, Any], **options: Any) -> None:
        """Load what `state_dict` gave, by either names."""
        back = {name: key for key, name in self.names.items()}
        super().load_state_dict(self._renamed(state_dict, back), **options)

    def _renamed(self, given: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        rows = given["state"].items()
        state = {i: {names.get(key, key): x for key, x in row.items()} for i, row in rows}
        return {**given, "state": state}


def _size_of_world() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_world_size()) if there else 1


__all__ = ["MegatronEntry", "megatron_entry"]
