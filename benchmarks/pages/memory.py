"""Memory of a training step with quantizers, as a multiple of the float model's: ours in each mode, and other tools.

python -m benchmarks.pages.memory                       prints the tables and writes benchmarks/results/memory.json
python -m benchmarks.pages.memory --compile --peers     with compiled models, and the tools that are installed
python -m benchmarks.pages.memory --quick --networks resnet18 --only ours

Kept: the bytes that autograd's nodes keep for backward, by `saved_tensors_hooks`, each storage once; parameters, buffers and
the input batch are not counted. Held: by how much the memory of the process has grown after forward and loss. Peak: by how much
it has grown at the highest point of the step, above what it has between steps. Held and peak are the process's resident memory,
with an allocator that returns what is freed, so that scratch memory of kernels counts as well; on a GPU they are those of
torch's allocator. Each subject is measured in a process of its own.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.console import Console
from tqdm import tqdm

from benchmarks.report import show
from benchmarks.training import options
from benchmarks.training.resident import return_memory
from benchmarks.training.subjects import FLOAT, kind_of
from benchmarks.training.tables import memory_tables
from benchmarks.training.trainer import Memory, Settings
from benchmarks.training.worker import SubjectError, Worker


@dataclass(frozen=True)
class Row:
    """A subject's memory: bytes, and the same as multiples of the float model's; None for the reason in `failure`."""

    network: str
    subject: str
    kind: str
    kept_bytes: int | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None
    kept: float | None = None
    held: float | None = None
    peak: float | None = None
    failure: str = ""


def memory_of(settings: Settings) -> Memory | str:
    """Return the memory of a subject, or why there is none."""
    worker = options.started(settings, return_memory)
    if not isinstance(worker, Worker):
        return worker
    try:
        return worker.ask("memory")
    except SubjectError as error:
        return str(error)
    finally:
        worker.end()


def rows_of(network: str, found: Mapping[str, Memory | str]) -> list[Row]:
    """Return the row of each subject."""
    float_model = found[FLOAT]
    if not isinstance(float_model, Memory):
        raise RuntimeError(f"memory: the float model of {network} does not train: {float_model}.")
    rows = []
    for name, memory in found.items():
        if isinstance(memory, str):
            rows.append(Row(network, name, kind_of(name), failure=memory))
            continue
        ours, theirs = ((of.kept, of.held, of.peak) for of in (memory, float_model))
        ratios = (own / other for own, other in zip(ours, theirs, strict=True))
        rows.append(Row(network, name, kind_of(name), *ours, *ratios))
    return rows


def main() -> None:
    """Measure, print, and write what the arguments ask for."""
    args = options.parser_of(__doc__, "memory.json").parse_args()
    for network in args.networks:
        chosen = options.settings_of(args, network)
        found = {s.subject: memory_of(s) for s in tqdm(chosen, desc=network, leave=False)}
        rows = [asdict(row) for row in rows_of(network, found)]
        results = options.add_to_file(args, network, rows=rows)
    for title, names, cells in memory_tables(results):
        show(Console(width=180), title, names, cells)


if __name__ == "__main__":
    main()
