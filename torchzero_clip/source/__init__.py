"""Source: a chain as one file of plain torch.

The way of a chain to a file, and who does what on it:

1. `trace` runs one step on one parameter that stands for all, each list with one tensor, while
   `recorder`, a mode of torch, turns whatever the links ask of torch into `operations` on `values`.
   Live values are `live` `numbers` that remember what was done with them, and units are
   `SourceUnits`, whose verbs (`units`) and norms (`measured`) have lines of their own. `state` says
   how what is kept begins; `operators` are what functions of the core that look at tensors become,
   and `naming` has copies of rules that tell what they call their values.
2. `schedule` drops what nobody reads and gives each operation its phase: for all groups together,
   or in one of the loops over them.
3. `lines` makes statements of the operations: `expressions` of Python, each call as `wording` has
   it, with `names` from the rules and the `inputs` of each loop, on a `page` that is 88 wide.
4. `file` puts the class around them, with the functions that it calls: `helpers` for norms,
   `fixed` ones, and the `functions` of the user that choose parameters.
"""

from torchzero_clip.source.file import to_source
from torchzero_clip.source.symbols import SourceError

__all__ = ["SourceError", "to_source"]
