"""The machinery. Nothing here names a rule."""

from torchzero_clip.core.bucket import (
    Bucket,
    Group,
    State,
    collect,
    count_step,
    counter,
    keep_number,
    zeros_like_state,
)
from torchzero_clip.core.config import from_config, to_config
from torchzero_clip.core.description import Description, Live
from torchzero_clip.core.norm_rule import NormRule, Scope, UnitState
from torchzero_clip.core.norms import Ord
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.transform import Chain, TensorwiseTransform, Transform, bind, prepare, run
from torchzero_clip.core.units import Units

__all__ = [
    "Bucket",
    "Chain",
    "Description",
    "Group",
    "Live",
    "NormRule",
    "Ord",
    "Scope",
    "State",
    "TensorList",
    "TensorwiseTransform",
    "Transform",
    "UnitState",
    "Units",
    "bind",
    "collect",
    "count_step",
    "counter",
    "from_config",
    "keep_number",
    "prepare",
    "run",
    "to_config",
    "zeros_like_state",
]
