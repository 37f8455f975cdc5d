"""Tools that record a run, and simulate what other rules would have done to the run.

A `Recorder` keeps the metrics of a run in a `table`. The module `plot` draws a table, and
`live_file` shows a table in the lab while the run trains. A `Trace` has the gradient norms of a
run, from a `Recorder` or from a log file. The modules `logs` and `json_logs` read log files.
`simulate` applies rules to a trace. The command `python -m torchzero_clip simulate` and the lab, a
page in a browser, use the same functions.
"""

from torchzero_clip.study.recorder import Recorder
from torchzero_clip.study.simulating import Simulation, simulate
from torchzero_clip.study.trace import Trace

__all__ = ["Recorder", "Simulation", "Trace", "simulate"]
