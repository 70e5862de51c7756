"""Files of vendors' own compilers: a float model, and the grids of its tensors beside it. docs/backend_files.md lists them."""

from qtoolkit.export.backend_files.encoding import Encoding
from qtoolkit.export.backend_files.front import encodings, read_encodings
from qtoolkit.export.backend_files.target import BackendFiles

__all__ = ["BackendFiles", "Encoding", "encodings", "read_encodings"]
