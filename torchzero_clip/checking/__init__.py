"""Checks of the library on the user's own device: `python -m torchzero_clip check-device`.

`check_device` runs a few steps of many chains, on a GPU or on the CPU. It compares the weights with
float64, counts the lines that synchronize with the GPU, replays CUDA graphs, and measures the time
of a step next to torch. The result is a `DeviceReport`.
"""

from torchzero_clip.checking.device_checks import check_device
from torchzero_clip.checking.device_report import CheckResult, DeviceReport

__all__ = ["CheckResult", "DeviceReport", "check_device"]
