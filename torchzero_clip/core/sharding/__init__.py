"""Sharding: the layout of a DTensor's parts, the ranks that hold them, and owners of the whole.

Links see plain tensors: of a sharded parameter the part that is here.
"""

from torchzero_clip.core.sharding.held import (
    collect,
    evenly,
    hold,
    owner_of,
    place_of,
    rank_at,
    spread,
)
from torchzero_clip.core.sharding.layout import (
    Layout,
    aligned_grads,
    full,
    layout_of,
    local,
    part_of,
    refuse_flat,
    whole_of,
)
from torchzero_clip.core.sharding.owners import by_owners, owners_of, route
from torchzero_clip.core.sharding.ranks import all_coordinates, gather, ranks_of
