"""Training steps beside the float model's, and what they keep for backward: `pytest benchmarks/test_steps.py`.

Each model trains in a process of its own, as in benchmarks/pages/train_step.py and memory.py, which write docs/performance.md.
"""

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks import peers
from benchmarks.measure import PAUSE, Case
from benchmarks.pages.train_step import ask, end_all, set_threads, step_of
from benchmarks.rows import Group, Settings
from benchmarks.training import options, subjects, trainer
from benchmarks.training.networks import NETWORKS

ROWS = {
    "float": subjects.FLOAT,
    "ours, float": subjects.CODES,
    "ours, integer": subjects.INTEGER,
    "ours, fixed scales": subjects.FIXED,
}
SHOWN = ("resnet18", "mobilenet_v2", "fsrcnn", "vit")
QUICK = "fsrcnn"


def steps(network: str, settings: Settings, chosen: Sequence[str]) -> Case:
    """Start the processes that train a network, and return their steps."""
    size, count = (NETWORKS[network].size, 8) if settings.full else (NETWORKS[network].quick_size, 4)
    settings_of = partial(
        trainer.Settings, network, backend="tensorrt10", count=count, device=settings.device, size=size
    )
    workers = {subject: options.started(settings_of(subject)) for subject in chosen}
    set_threads(workers, settings.threads)

    return Case(
        "training step",
        network,
        work={name: step_of(workers, name) for name in workers},
        pause=PAUSE,
        kept={name: partial(ask, workers, name, "kept") for name in workers},
        absent=lambda: {name: reason for name, reason in workers.items() if isinstance(reason, str)},
        end=partial(end_all, workers),
    )


GROUPS = {
    f"step: {NETWORKS[network].title}": Group(
        partial(steps, network), ROWS, {name: name for name in peers.MODEL_PEERS}, slow=() if network == QUICK else ROWS
    )
    for network in SHOWN
}


def test_step(group: str, row: str, side_by_side: Callable[[str, str], None]) -> None:
    side_by_side(group, row)
