"""Speed on a GPU."""

from gpu_check.device import Device
from gpu_check.models import Sizes
from gpu_check.recorder import Recorder


def check_benchmark(recorder: Recorder, device: Device, sizes: Sizes) -> None:
    """Nothing yet."""
