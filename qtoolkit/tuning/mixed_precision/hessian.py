"""The trace of the Hessian of a loss in each layer's weight, by Hutchinson's estimator."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qtoolkit.batches import no_batch
from qtoolkit.errors import check_flags, check_whole
from qtoolkit.model_state import attribute_kept, check_module, evaluating
from qtoolkit.progress import note, progress_bar

Loss = Callable[[nn.Module, Any], Tensor]  # Any: the user's function names the type of its batches


@dataclass(frozen=True)
class Trace:
    """An estimate of the trace of a block of the Hessian.

    Attributes:
        value: The mean over probes and batches.
        error: The standard error of the mean; NaN for a single sample.
    """

    value: float
    error: float

    @property
    def at_least(self) -> float:
        """The value, but at least its standard error: an estimate near or below zero does not prove that the trace is zero."""
        return max(self.value, 0.0 if math.isnan(self.error) else self.error)


def hessian_traces(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[object],
    weights: Mapping[str, Tensor],
    probes: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Trace]:
    """Estimate the trace of the Hessian of a loss for each of some weights of a float model, block by block.

    The estimate is the mean of v^T H v over vectors v of random signs (M. F. Hutchinson, 1990), as in HAWQ-V2 (arXiv
    1911.03852). One probe covers all weights, and costs two backward passes. The model runs in eval mode; its gradients are not
    changed.

    Args:
        model: The float model.
        loss: loss(model, batch) returns a scalar, the mean over the batch.
        batches: The batches.
        weights: The weights by name; the names are arbitrary.
        probes: Probes of each batch.
        seed: Seed of the signs.
        progress: Show a progress bar.

    Returns:
        The trace for each name. It is nonnegative at a minimum of the loss; elsewhere it can be negative.

    Raises:
        TypeError: The loss is not a scalar tensor.
        ValueError: There is no batch or no probe, or the loss is not finite.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> traces = qt.tuning.mixed_precision.hessian_traces(
        ...     model, lambda m, x: 0.5 * m(x).square().mean(), [torch.tensor([[3.0, 4.0]])], {"w": model.weight}, probes=256
        ... )
        >>> abs(traces["w"].value - 25) < 5 * traces["w"].error  # 3^2 + 4^2
        True
    """
    check_flags("hessian_traces", progress=progress)
    check_module(model, "hessian_traces")
    check_whole("hessian_traces", "probes", probes, 1)
    tensors = list(weights.values())
    device = tensors[0].device if tensors else torch.device("cpu")
    signs = torch.Generator(device).manual_seed(seed)
    samples: list[Tensor] = []
    count = len(batches) * probes if isinstance(batches, Sized) else None
    with (
        progress_bar("hessian", "probes", progress, total=count) as bar,
        evaluating(model),
        sdpa_kernel(SDPBackend.MATH),  # the fused kernels of attention have no second derivative
        differentiable(tensors),
        torch.enable_grad(),
    ):
        for batch in batches:
            gradients = torch.autograd.grad(
                scalar_loss("hessian_traces", loss, model, batch), tensors, create_graph=True, materialize_grads=True
            )
            for _ in range(probes):
                samples.append(_probe(gradients, tensors, signs))
                note(bar, _total(samples))
                bar.update()
    if not samples:
        raise no_batch("hessian_traces")
    return dict(zip(weights, _traces(samples), strict=True))


def _traces(samples: Sequence[Tensor]) -> list[Trace]:
    """Return the mean of each block's samples, and its standard error."""
    stacked = torch.stack(list(samples)).double()
    errors = stacked.std(0) / len(samples) ** 0.5 if len(samples) > 1 else torch.full_like(stacked[0], torch.nan)
    return [Trace(*pair) for pair in zip(stacked.mean(0).tolist(), errors.tolist(), strict=True)]


def _total(samples: Sequence[Tensor]) -> str:
    """Return the current estimate of the total trace, and its standard error."""
    totals = torch.stack([sample.sum() for sample in samples])
    error = f" ± {float(totals.std()) / len(samples) ** 0.5:.1g}" if len(samples) > 1 else ""
    return f"trace {float(totals.mean()):.4g}{error}"


def _probe(gradients: tuple[Tensor, ...], tensors: list[Tensor], signs: torch.Generator) -> Tensor:
    """Return v^T H v of each block, for random signs v."""
    vectors = [
        torch.randint(0, 2, t.shape, generator=signs, device=t.device, dtype=torch.int8).to(t.dtype) * 2 - 1
        for t in tensors
    ]
    pairs = [(g, v) for g, v in zip(gradients, vectors, strict=True) if g.requires_grad]
    if not pairs:  # a loss that is linear in all weights
        return torch.zeros(len(tensors))
    outputs, along = zip(*pairs, strict=True)
    products = torch.autograd.grad(outputs, tensors, along, retain_graph=True, materialize_grads=True)
    return torch.stack([(v * p).sum() for v, p in zip(vectors, products, strict=True)]).detach().cpu()


def scalar_loss(what: str, loss: Loss, model: nn.Module, batch: object) -> Tensor:
    """Return the loss of a batch; TypeError if it is not a scalar tensor, ValueError if it is not finite."""
    value = loss(model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{what}: loss(model, batch) must return a scalar tensor, got {found}.")
    if not bool(torch.isfinite(value)):
        raise ValueError(f"{what}: the loss of a batch is {value.item()}; it must be finite.")
    return value


@contextmanager
def differentiable(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let tensors require gradients within a `with` block."""
    frozen = [tensor for tensor in tensors if not tensor.requires_grad]
    with attribute_kept(frozen, "requires_grad"):
        for tensor in frozen:
            tensor.requires_grad_()
        yield
