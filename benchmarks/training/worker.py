"""A subject in a process of its own: tools that patch torch, hang or crash do not reach the others."""

import multiprocessing
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.measure import keep_memory

REASON_LENGTH = 200
PATIENCE = 900.0  # seconds until a process that does not answer is ended: compiling takes minutes

PATIENCE_AT_END = 10.0


class SubjectError(RuntimeError):
    """A subject could not be built, or did not train."""


@dataclass(frozen=True)
class Failure:
    """The answer of a process that stops."""

    reason: str


class Worker:
    """A process that builds a subject and then does what it is asked; `allocator` is called in it before.

    Attributes:
        name: The name of the subject.
        difference: See `training.trainer.Trainer`.

    Raises:
        SubjectError: The subject cannot be built or trained; says why.
    """

    def __init__(self, settings: Any, patience: float = PATIENCE, allocator: Callable[[], None] = keep_memory) -> None:
        self.name, self.patience = settings.subject, patience
        context = multiprocessing.get_context("forkserver")  # which imports torch once, and starts no threads
        context.set_forkserver_preload(["benchmarks.training.trainer", "torchvision", "timm"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, settings, allocator), daemon=True)
        self._process.start()
        theirs.close()
        self.difference: float = self._answer()

    def ask(self, request: str, *args: Any) -> Any:
        """Return the answer to a request of `training.trainer.REQUESTS`."""
        self._connection.send((request, args))
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self._connection.poll(self.patience):
                raise SubjectError(f"no answer within {self.patience:.0f} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise SubjectError(f"its process ended with exit code {self._process.exitcode}") from None
        if isinstance(answer, Failure):
            raise SubjectError(answer.reason)
        return answer

    def end(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(PATIENCE_AT_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def serve(connection: Connection, settings: Any, allocator: Callable[[], None]) -> None:
    """Build the subject, and answer requests until the other end closes."""
    _be_silent()
    allocator()
    try:
        from benchmarks.training.trainer import REQUESTS, Trainer

        trainer = Trainer(settings)
        connection.send(trainer.difference)
        while True:
            request, args = connection.recv()
            connection.send(REQUESTS[request](trainer, *args))
    except EOFError:
        return
    except Exception as error:  # a tool may raise anything; the table shows the error
        connection.send(Failure(_reason(error)))


def _be_silent() -> None:
    """Tools print to both streams, from C++ too."""
    warnings.simplefilter("ignore")
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(sink, stream)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:REASON_LENGTH]
