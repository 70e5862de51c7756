"""Learning the rounding of a unit's weights, and the scales of its activations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from qtoolkit.model_inputs import clone_tensors, tensors_of, with_tensors
from qtoolkit.model_state import removing
from qtoolkit.quantizers.spec_ops import fake_quant, typed_scale
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.tuning.rounding.grids import CodeGrid, SoftRounding
from qtoolkit.tuning.runs.cache import BatchCache

# AdaRound, section 4: the regularizer is off in the first fifth, then its exponent falls from 20 to 2.
WARM_UP, FIRST_BETA, LAST_BETA = 0.2, 20.0, 2.0


# For a batch: a unit's inputs, its inputs in the float model (none without drop), its float output, and the importance of the
# elements of the output's tensors, or None.
Sample = tuple[list[object], list[object], object, list[Tensor] | None]


@dataclass(frozen=True)
class Options:
    """The options of `qtoolkit.tuning.reconstruct` for learning."""

    steps: int
    learning_rate: float
    scale_learning_rate: float
    rounding_weight: float
    learn_scales: bool
    drop: float
    seed: int


def learn(
    module: fx.GraphModule,
    grids: Mapping[str, CodeGrid],
    activations: Mapping[str, TensorQuantizer],
    cache: BatchCache[Sample],
    options: Options,
    place: int,
    error: float,
    stepped: Callable[[], object],
) -> dict[str, Tensor]:
    """Learn the rounding of each weight in a unit and, if enabled, store learned scales of its activations.

    `place` and the seed determine the random numbers. The loss is divided by `error`, the error of rounding to nearest.
    `stepped` is called after each step.
    """
    roundings = {name: SoftRounding(grid) for name, grid in grids.items()}
    learnable = {n: q for n, q in activations.items() if q.capability.plain and not q.spec.pow2_scale}
    scales = {name: _LearnedScale(q) for name, q in learnable.items()} if options.learn_scales else {}
    random = torch.Generator(cache.device).manual_seed(options.seed * 100_003 + place)
    order = torch.Generator().manual_seed(options.seed * 100_003 + place)
    variables = [rounding.variable for rounding in roundings.values()]
    ratios = [scale.ratio for scale in scales.values()]
    optimizer = torch.optim.Adam([{"params": variables}, {"params": ratios}], options.learning_rate)
    answers = [(grids[name].quantizer, _soft(rounding)) for name, rounding in roundings.items()]
    answers += [(q, _activation(scales.get(name), options.drop, random)) for name, q in activations.items()]
    with removing([quantizer.register_forward_hook(answer) for quantizer, answer in answers]):
        for step in range(options.steps):
            inputs, in_float, expected, importance = cache[int(torch.randint(len(cache), (1,), generator=order))]
            if options.drop:
                inputs = _mixed(inputs, in_float, options.drop, random)
            apart = distances(module(*clone_tensors(inputs)), expected, importance)
            loss = torch.stack([each.mean() for each in apart]).mean() / max(error, 1e-30)
            beta = _beta(step / options.steps)
            if beta is not None:
                undecided = torch.stack([rounding.undecided(beta) for rounding in roundings.values()])
                loss = loss + options.rounding_weight * undecided.sum() / sum(map(Tensor.numel, variables))
            # Not with backward(): the gradients of the model's own parameters must not change.
            gradients = torch.autograd.grad(loss, [*variables, *ratios], allow_unused=True)
            for parameter, gradient in zip((*variables, *ratios), gradients, strict=True):
                parameter.grad = gradient
            cosine = 0.5 * (1 + math.cos(math.pi * (step / options.steps)))
            optimizer.param_groups[1]["lr"] = options.scale_learning_rate * cosine
            optimizer.step()
            stepped()
    with torch.no_grad():
        for scale in scales.values():
            scale.store()
        return {name: rounding.codes() for name, rounding in roundings.items()}


def _beta(progress: float) -> float | None:
    if progress < WARM_UP:
        return None
    return LAST_BETA + (FIRST_BETA - LAST_BETA) * (1 - (progress - WARM_UP) / (1 - WARM_UP))


def distances(
    output: object, expected: object, importance: Sequence[Tensor] | None, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the squared differences of the elements of each tensor, times their importance."""
    pairs = list(zip(tensors_of(output), tensors_of(expected), strict=True))
    squares = [(a.to(dtype) - b.to(dtype)).square() for a, b in pairs]
    return squares if importance is None else [s * w for s, w in zip(squares, importance, strict=True)]


def _mixed(inputs: list[object], in_float: list[object], drop: float, random: torch.Generator) -> list[object]:
    """Return the inputs with a share of their elements taken from the float model."""
    pairs = zip(tensors_of(inputs), tensors_of(in_float), strict=True)
    mixed: list[object] = with_tensors(inputs, iter([_dropped(x, y, drop, random) for x, y in pairs]))
    return mixed


def _dropped(quantized: Tensor, in_float: Tensor, drop: float, random: torch.Generator) -> Tensor:
    if not quantized.is_floating_point():
        return quantized
    chance = torch.rand(quantized.shape, generator=random, device=quantized.device)
    return torch.where(chance < drop, in_float, quantized)


Hook = Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]  # what a quantizer of (x,) returns instead of y


def _soft(rounding: SoftRounding) -> Hook:
    return lambda module, args, y: rounding().to(args[0].dtype)


def _activation(scale: "_LearnedScale | None", drop: float, random: torch.Generator) -> Hook:
    """Return a hook for an activation quantizer: its learned scale, if it has one, with a share kept in float."""

    def answer(module: nn.Module, args: tuple[Tensor], y: Tensor) -> Tensor:
        y = y if scale is None else scale(args[0])
        return _dropped(y, args[0], drop, random) if drop else y

    return answer


class _LearnedScale:
    """The scale of an activation during learning, as a ratio to its start."""

    def __init__(self, quantizer: TensorQuantizer) -> None:
        self.quantizer = quantizer
        self.start, self.zero_point = quantizer.scale, quantizer.zero_point
        self.ratio = nn.Parameter(torch.ones_like(self.start))

    def __call__(self, x: Tensor) -> Tensor:
        quantizer, spec = self.quantizer, self.quantizer.spec
        scale = typed_scale(spec, self.start * self.ratio.abs())
        return fake_quant(spec, x, scale, self.zero_point, quantizer.group, spec.block_size, 1.0)

    def store(self) -> None:
        """Store the learned scale in the quantizer; training does not change it."""
        self.quantizer.write_grid(self.start * self.ratio.detach().abs(), self.zero_point)
        self.quantizer.following = False
