"""onnxruntime on a processor without VNNI, whose sums of uint8 times int8 codes saturate: one that QEMU emulates.

`make emulator` installs QEMU, as CI does. On a processor without VNNI no emulation is needed.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

EMULATOR = shutil.which("qemu-x86_64")
PROCESSOR = "Haswell"  # of 2013: AVX2 without VNNI
# Runs each file that a line names, on the arrays beside it, in the session that users get.
PROGRAM = """
import json, sys
import numpy, onnxruntime
for line in sys.stdin:
    path, arrays, answer = json.loads(line)
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        with numpy.load(arrays) as given:
            inputs = {value.name: given[str(place)] for place, value in enumerate(session.get_inputs())}
        numpy.savez(answer, *session.run(None, inputs))
        print("done", flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace(chr(10), " "), flush=True)
"""


class WithoutVnni:
    """A process in which onnxruntime meets an emulated processor. `close` ends it."""

    def __init__(self) -> None:
        command = [str(EMULATOR), "-cpu", PROCESSOR, sys.executable, "-c", PROGRAM]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def outputs(self, path: str | Path, inputs: Sequence[Any]) -> list[Any]:
        """Return what a file computes there from inputs, tensors or arrays. Raises RuntimeError: onnxruntime cannot run it."""
        with TemporaryDirectory() as folder:
            arrays, answer = f"{folder}/inputs.npz", f"{folder}/outputs.npz"
            np.savez(arrays, **{str(place): np.asarray(x) for place, x in enumerate(inputs)})
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps([str(path), arrays, answer]) + "\n")
            self.process.stdin.flush()
            said = self.process.stdout.readline().strip()
            if said != "done":
                raise RuntimeError(f"onnxruntime on the emulated processor: {said or 'the process has ended'}")
            with np.load(answer) as found:
                return [found[name] for name in found.files]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
