"""The export of a chain as one file that imports only torch.

These steps turn a chain into a file:

1. `written_step` runs one step on a stand-in: one parameter that represents all parameters, so that
   every list has one tensor. `operation_recorder`, a function mode of torch, turns each torch call
   of the links into an operation (`operations`) on values (`symbols`). Hyperparameters are numbers
   that record how the links use them (`live_numbers`, `written_numbers`). The units of norm rules
   write lines of the file (`file_units`, `written_norms`). `file_state` writes the lines that
   create state. `written_operators` replaces functions of the core that read tensors. `rule_names`
   gives each value the name of its variable in the rule.
2. `schedule` drops operations whose result no other operation reads, and gives each operation a
   phase. An even phase runs once for all groups. An odd phase is a loop over the groups.
3. `lines` writes the operations as statements. `expressions` and `wording` write calls and
   operators, `value_names` chooses names, `file_inputs` writes the lists that a loop starts with,
   and `long_lines` keeps lines within 88 columns.
4. `file` writes the class around the statements, together with the functions that the statements
   call: `helpers` for norms, `copied_functions`, and the user's `functions` that select parameters.
   `averaged` writes the method that returns averaged weights.
"""

from torchzero_clip.source.file import to_source
from torchzero_clip.source.symbols import SourceError

__all__ = ["SourceError", "to_source"]
