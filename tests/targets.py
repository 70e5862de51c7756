"""Deployment targets with other rules than their tables have, for tests of something else."""

from dataclasses import replace

import qtoolkit as qt


def with_deconvolutions(name: str) -> qt.Backend:
    """Return a backend; onnxruntime's with quantized transposed convolutions, which its table leaves in float."""
    backend = qt.backends[name]
    return replace(backend, roles={**backend.roles, "conv_transpose": "compute"}) if name == "onnxruntime" else backend
