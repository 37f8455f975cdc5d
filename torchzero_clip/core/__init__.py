"""The base classes of rules, and the objects that a step passes to the rules."""

from torchzero_clip.core.annotation import Live
from torchzero_clip.core.bucket import Bucket, count_step, in_buckets, keep_number
from torchzero_clip.core.chain import Chain, bind, prepare, run, send, transformed
from torchzero_clip.core.config import from_config
from torchzero_clip.core.decision import Decision, UnitState
from torchzero_clip.core.description import Description
from torchzero_clip.core.engine import FusedKernel, Group, State
from torchzero_clip.core.matrices import Matrices
from torchzero_clip.core.norm_rule import NormRule, Scope
from torchzero_clip.core.norms import Ord
from torchzero_clip.core.scalars import Numbers
from torchzero_clip.core.state import counter, zeros_like_state
from torchzero_clip.core.step import Step
from torchzero_clip.core.tensorlist import TensorList
from torchzero_clip.core.transform import Reach, TensorwiseTransform, Transform
from torchzero_clip.core.units import Units

__all__ = [
    "Bucket",
    "Chain",
    "Decision",
    "Description",
    "FusedKernel",
    "Group",
    "Live",
    "Matrices",
    "NormRule",
    "Numbers",
    "Ord",
    "Reach",
    "Scope",
    "State",
    "Step",
    "TensorList",
    "TensorwiseTransform",
    "Transform",
    "UnitState",
    "Units",
    "bind",
    "count_step",
    "counter",
    "from_config",
    "in_buckets",
    "keep_number",
    "prepare",
    "run",
    "send",
    "transformed",
    "zeros_like_state",
]
