"""Study: record a run, and simulate what other rules would have done to it.

A `Recorder` keeps the metrics of a run in a `table`. `plot` draws a table, and `live_file` shows it
in the lab while the run trains. A `Trace` holds the gradient norms of a run, from a `Recorder` or
from a log file, which `logs` and `json_logs` read. `simulate` applies rules to a trace. The command
`python -m torchzero_clip simulate` and the page of the `lab` use the same functions.
"""

from torchzero_clip.study.recorder import Recorder
from torchzero_clip.study.simulating import Simulation, simulate
from torchzero_clip.study.trace import Trace

__all__ = ["Recorder", "Simulation", "Trace", "simulate"]
