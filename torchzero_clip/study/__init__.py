"""Study: the history of a run, and what other rules would have done to it.

A `recorder` keeps what the rules measured, in a `table`, and has `plot` draw it or `live_file` show
it in the lab. A `trace` is the norms of a run, from a recorder or out of files, which `logs` and
`json_logs` read. `simulating` asks rules about a trace; so do the command `simulate`, in
`simulate_command`, and the page of the `lab`.
"""

from torchzero_clip.study.recorder import Recorder
from torchzero_clip.study.simulating import Simulation, simulate
from torchzero_clip.study.trace import Trace

__all__ = ["Recorder", "Simulation", "Trace", "simulate"]
