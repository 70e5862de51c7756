"""Files for vendors' own compilers: a float model, and a file with the grids of its tensors. See docs/backend_files.md."""

from qtoolkit.export.backend_files.encoding import Encoding
from qtoolkit.export.backend_files.front import encodings, read_encodings
from qtoolkit.export.backend_files.target import BackendFiles

__all__ = ["BackendFiles", "Encoding", "encodings", "read_encodings"]
