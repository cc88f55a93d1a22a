"""Utilisation: how much of the time a rank's device is at work.

On CPUs the processor time of this process over wall time: 1 is one core all the time, and gloo's
threads may take it above. On NVIDIA GPUs the share of time in which a kernel ran, as NVML has it
over its own sampling period (nvmlDeviceGetUtilizationRates), read by a thread and averaged."""

import threading
import time

import torch


class Utilisation:
    """Of a device from now on: `used = Utilisation(device)`, and later `used.end()`."""

    SAMPLE_SECONDS = 0.2  # chosen: NVML's own periods are 1/6 s to 1 s by its documentation

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ended = threading.Event()
        self._samples: list[float] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._wall, self._processor = time.monotonic(), time.process_time()
        if device.type == "cuda":
            self._thread.start()

    def end(self) -> float | None:
        """The share since the start; None where nobody tells."""
        if self.device.type == "cuda":
            self._ended.set()
            self._thread.join()
            return sum(self._samples) / len(self._samples) if self._samples else None
        seconds = time.monotonic() - self._wall
        return (time.process_time() - self._processor) / seconds if seconds > 0 else None

    def _sample(self) -> None:
        """Reads NVML until the end; nothing where it or the device is not to be had."""
        import pynvml

        try:
            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            while not self._ended.wait(self.SAMPLE_SECONDS):
                self._samples.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        except pynvml.NVMLError:
            return
