"""Memory in use now, and at most since a start: of the process, or of the GPU."""

import ctypes
import gc
import re
from pathlib import Path

import torch

from benchmarks.measure import M_MMAP_THRESHOLD, M_TOP_PAD, M_TRIM_THRESHOLD, set_allocator

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CLEAR_PEAK = "5"  # man proc_pid_clear_refs: resets VmHWM to what the process has now


def return_memory() -> None:
    """Give every block of 64 KiB and more back to the system when it is freed: the process then has what the tensors take."""
    set_allocator({M_MMAP_THRESHOLD: 1 << 16, M_TRIM_THRESHOLD: 1 << 16, M_TOP_PAD: 0})


class Resident:
    """The memory of the process, by Linux: what oneDNN and others allocate on their own is counted too."""

    @staticmethod
    def of(device: str) -> "Resident":
        """Return the counter of a device."""
        return Resident() if device == "cpu" else OnGpu()

    def start(self) -> int:
        """Return the bytes in use, and count the peak from here on."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        CLEAR.write_text(CLEAR_PEAK)
        return self.now()

    def now(self) -> int:
        """Return the bytes in use."""
        return self._read("VmRSS")

    def peak(self) -> int:
        """Return the most bytes that were in use since `start`."""
        return self._read("VmHWM")

    def _read(self, field: str) -> int:
        (kilobytes,) = re.findall(rf"^{field}:\s+(\d+) kB", STATUS.read_text(), flags=re.MULTILINE)
        return 1024 * int(kilobytes)


class OnGpu(Resident):
    """The memory of tensors on the GPU."""

    def start(self) -> int:
        """Return the bytes in use, and count the peak from here on."""
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        return self.now()

    def now(self) -> int:
        """Return the bytes in use."""
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Return the most bytes that were in use since `start`."""
        return torch.cuda.max_memory_allocated()
