"""The export of a chain as one file of plain torch.

These steps turn a chain into a file:

1. `written_step` runs one step on a stand-in: one parameter that represents all parameters, so that
   every list has one tensor. `operation_recorder`, a function mode of torch, turns each torch call
   of the links into an operation (`operations`) on values (`symbols`). Hyperparameters are numbers
   that record how they are used (`live_numbers`, `written_numbers`). Norm rules receive units that
   write lines of the file (`file_units`, `written_norms`). `file_state` writes how state is
   created. `written_operators` replaces functions of the core that read tensors. `rule_names`
   gives values the names of the variables in the rules.
2. `schedule` drops operations whose result is not read, and gives each operation a phase. An even
   phase runs once for all groups. An odd phase is a loop over the groups.
3. `lines` writes the operations as statements. `expressions` and `wording` write calls and
   operators, `value_names` chooses names, `file_inputs` writes the lists that a loop starts with,
   and `long_lines` keeps lines within 88 columns.
4. `file` writes the class around the statements, together with the functions that they call:
   `helpers` for norms, `copied_functions`, and the user's `functions` that select parameters.
   `averaged` writes the method that returns averaged weights.
"""

from torchzero_clip.source.file import to_source
from torchzero_clip.source.symbols import SourceError

__all__ = ["SourceError", "to_source"]
