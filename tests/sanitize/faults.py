"""Whether the sanitizers find faults: each of faults.cpp ends the process, with a report that names it. See run."""

import os
import subprocess
import sys

import pytest

FOUND = {
    "address": {
        "overrun": "AddressSanitizer: heap-buffer-overflow",
        "use_after_free": "AddressSanitizer: heap-use-after-free",
        "signed_overflow": "runtime error: signed integer overflow",
        "cast_overflow": "runtime error: inf is outside the range of representable values of type 'int'",
    },
    "thread": {"race": "ThreadSanitizer: data race"},
}[os.environ["QTOOLKIT_SANITIZE"]]


def call(fault: str) -> subprocess.CompletedProcess:
    program = f"import torch, qtoolkit; torch.ops.qtoolkit_faults.{fault}(torch.ones(4))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("fault", "report"), FOUND.items())
def test_a_fault_is_found(fault: str, report: str) -> None:
    ran = call(fault)
    assert ran.returncode != 0
    assert report in ran.stderr


def test_what_is_right_is_let_through() -> None:
    """Threads that write beside each other, started and joined by at::parallel_for."""
    ran = call("no_race")
    assert ran.returncode == 0, ran.stderr
    assert "Sanitizer" not in ran.stderr
