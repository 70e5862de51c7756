"""PartialUpdates: train only a share of each weight's output channels in each step (arXiv 2411.11038)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from qtoolkit.errors import check_known, check_whole, unknown
from qtoolkit.model_state import check_module
from qtoolkit.nn import QuantModule
from qtoolkit.nn.layer_op import LayerOp
from qtoolkit.processes import is_sharded, own_part, whole
from qtoolkit.wrapped import unwrapped

RULES = ("magnitude", "network", "rotation")
OPTIMIZERS = (SGD, Adam, AdamW)
NO_LAYER = "it is not a convolution, linear layer, attention or transposed convolution without groups"


@dataclass(frozen=True, eq=False)
class _Weight:
    """A weight and the layers that share it."""

    layers: tuple[LayerOp, ...]
    share: float

    @property
    def layer(self) -> LayerOp:
        return self.layers[0]

    @property
    def of_each(self) -> int:
        """The number of output channels of each layer in the weight: an attention may have three layers in one."""
        return self.layer.channels() // self.layer.layers

    @property
    def count(self) -> int:
        """The number of chosen channels in each of them."""
        return min(self.of_each, max(1, round(self.share * self.of_each))) if self.share else 0

    def importance(self) -> Tensor:
        """The mean magnitude of each output channel, float64."""
        weight = whole(self.layer.weight.detach())
        return self.layer.sum_per_output(weight.abs()) * self.layer.channels() / weight.numel()

    def in_weight(self, channels: Tensor) -> Tensor:
        """Return the channels of the weight, in order, from the channels of its layers (layers, count)."""
        first = torch.arange(0, self.layer.channels(), self.of_each, device=channels.device)
        return (channels.sort(-1).values + first[:, None]).flatten()

    def choose(self, channels: Tensor) -> None:
        """Set the chosen channels of the weight."""
        for layer in self.layers:
            layer.update_channels(channels)


class _Rows(NamedTuple):
    """The updated channels of a weight, in tensors like it."""

    axis: int
    channels: Tensor

    def select(self, t: Any) -> Tensor:
        """Return these channels of a tensor; of a sharded one the local channels."""
        part = own_part(t).index_select(self.axis, self._own(t))
        if not is_sharded(t):
            return part
        like = torch.empty(t.shape, device="meta").index_select(self.axis, self.channels.to("meta"))
        whole_size = {"shape": like.shape, "stride": like.stride()}
        return cast("Tensor", type(t).from_local(part, t.device_mesh, t.placements, run_check=False, **whole_size))

    def write(self, t: Tensor, part: Tensor) -> None:
        """Write these channels of a tensor."""
        own_part(t).index_copy_(self.axis, self._own(t), own_part(part))

    def _own(self, t: Any) -> Tensor:
        """Return these channels in the local part of a tensor."""
        channels = self.channels
        for dimension, placement in enumerate(t.placements if is_sharded(t) else ()):
            if placement.is_shard(self.axis):  # in parts as of torch.chunk
                size = -(-t.shape[self.axis] // t.device_mesh.size(dimension))
                first = t.device_mesh.get_local_rank(dimension) * size
                channels = channels[(channels >= first) & (channels < first + size)] - first
        return channels


class _Taken(NamedTuple):
    """A weight during an optimizer step: the optimizer has a parameter of the updated channels in its place."""

    params: list[Tensor]  # of the optimizer's group
    place: int
    weight: Tensor
    part: nn.Parameter
    rows: _Rows


class PartialUpdates:
    """Train a share of the output channels of each weight in each step, and all biases, batch norms and activation scales.

    The gradient of a weight takes about as long as forward. In each step it is computed only for the chosen output channels of
    a layer, and only these are updated: the optimizer gets their rows of the weight, of its gradient and of its own state. The
    other channels do not change, do not decay, and keep their state. The channels are chosen again every `every` steps. This is
    the method of EfQAT (arXiv 2411.11038), for fine-tuning trained networks.

    - In layers with groups of several input channels, the gradient of the whole weight is computed: the chosen output channels
      read as much of the input as all of them. A depthwise convolution reads the chosen channels alone.
    - The projections of query, key and value in torch.nn.MultiheadAttention are three layers, also where they share a weight.
    - A learned scale of a weight gets gradients from the chosen channels alone.
    - For a channel that is not chosen, the factor of a linked batch norm is a constant: gamma gets only the gradient of the
      batch norm itself, and no gradient from a frozen batch norm.
    - Adam's `step` counts the steps of the whole weight, so the first updates of a channel that is chosen late are larger.

    Call `step()` after each step of the optimizer, and `finish()` to train whole weights again. In a process group every rank
    must call both. A copy of the model, deep or pickled, has no chosen channels: it trains whole weights, except for weights
    with share 0, which are frozen.

    Args:
        model: A prepared or replaced model, optionally in DistributedDataParallel or fully_shard.
        optimizer: SGD, Adam or AdamW over its parameters. Its `step` must be called without a closure.
        share: The share of updated output channels, from 0 to 1; at least one channel of a layer. 0 trains no weight. A mapping
            gives the shares of modules by name, such as {"layer4": 0.25, "": 0}: the longest name that contains the layer
            counts, "" is the model, and all other layers are trained whole.
        every: The number of steps after which the channels are chosen again.
        by: "magnitude": the channels with the largest mean magnitude in each layer. "network": the channels of the whole
            network with the largest mean magnitude relative to the layer's; a layer may then have any number of them.
            "rotation": the next channels in turn.

    Attributes:
        steps: The number of steps taken.
        skipped: The reason for each weight that is trained whole, by layer name.

    Raises:
        TypeError: The model is not a module, or a value is not a number.
        ValueError: A value is out of range, the optimizer is not supported, a name is not a module, or no layer of the model
            can be trained in part. The optimizer's `step` raises it for a closure.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 8)).train(), backend="tensorrt")
        >>> report = qt.calibrate(prepared, [torch.randn(16, 4)], progress=False)
        >>> optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        >>> updates = qt.tuning.PartialUpdates(prepared, optimizer, share=0.25, every=2)
        >>> before = prepared.get_parameter("0.weight").clone()
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     prepared(torch.randn(16, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     updates.step()
        >>> (prepared.get_parameter("0.weight") != before).any(1).sum()
        tensor(2)
        >>> updates
        PartialUpdates(step 2: 2 of 8 output channels of 1 weight, by magnitude; chosen again at step 4)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        share: float | Mapping[str, float] = 0.25,
        every: int = 100,
        by: str = "magnitude",
    ) -> None:
        name = type(self).__name__
        check_module(model, name)
        check_whole(name, "every", every, 1)
        check_known(f"{name}: by", by, RULES)
        if type(optimizer) not in OPTIMIZERS:
            raise ValueError(
                f"{name}: optimizer must be torch's SGD, Adam or AdamW, which update each element independently, got "
                f"{type(optimizer).__name__}."
            )
        model = unwrapped(model)
        self.model, self.optimizer, self.every, self.by = model, optimizer, every, by
        self.steps = 0
        self.skipped: dict[str, str] = {}
        self._weights = self._find(_shares(model, share))
        self._taken: list[_Taken] = []
        self._hooks = (
            optimizer.register_step_pre_hook(self._take_rows),
            optimizer.register_step_post_hook(self._put_back),
        )
        for weight in self._weights.values():
            if not weight.share:
                weight.layer.weight.requires_grad_(False)
        self._choose()

    def step(self) -> None:
        """Count a step of the optimizer, and choose the channels again if due."""
        self.steps += 1
        if self.steps % self.every == 0:
            self._choose()

    def finish(self) -> None:
        """Train whole weights from now on."""
        for hook in self._hooks:
            hook.remove()
        self._release()  # the last step may have raised an error
        for weight in self._weights.values():
            if not weight.share:
                weight.layer.weight.requires_grad_(True)
            for layer in weight.layers:
                layer.update_channels(None)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps and the chosen channels, by layer name."""
        return {
            "steps": self.steps,
            "channels": {name: _channels(w.layer).clone() for name, w in self._weights.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of `state_dict`.

        Raises:
            ValueError: The state belongs to another model, or to other shares.
        """
        channels = state["channels"]
        if channels.keys() != self._weights.keys():
            (name, *_) = sorted(channels.keys() ^ self._weights.keys())
            raise ValueError(
                f"PartialUpdates: the state belongs to another model: only one of the two has the weight {name!r}."
            )
        for name, weight in self._weights.items():
            count = weight.count * weight.layer.layers
            if self.by != "network" and len(channels[name]) != count:
                raise ValueError(
                    f"PartialUpdates: the state has {len(channels[name])} channels of {name!r}, but share={weight.share} gives "
                    f"{count}; pass the share of the training that is resumed."
                )
        self.steps = int(state["steps"])
        for name, weight in self._weights.items():
            weight.choose(channels[name])

    def __repr__(self) -> str:
        chosen = sum(len(_channels(w.layer)) for w in self._weights.values())
        channels, count = sum(w.layer.channels() for w in self._weights.values()), len(self._weights)
        of = f"{chosen} of {channels} output channels of {count} weight{'s' if count > 1 else ''}, by {self.by}"
        coming = self.steps + self.every - self.steps % self.every
        return f"PartialUpdates(step {self.steps}: {of}; chosen again at step {coming})"

    # ---- the weights

    def _find(self, shares: Mapping[str, float]) -> dict[str, _Weight]:
        """Return the weights to train in part, by the name of their first layer."""
        optimized = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        layers: dict[int, list[tuple[str, LayerOp]]] = {}
        users: dict[int, int] = {}
        for name, module in self.model.named_modules():
            for p in module.parameters(recurse=False):
                users[id(p)] = users.get(id(p), 0) + 1
            if isinstance(module, QuantModule) and any(True for _ in module.parameters(recurse=False)):
                share = _share_of(name, shares)
                named = module.layers_of_weights() if share < 1 else {}
                if share < 1 and not named:
                    self.skipped[name] = NO_LAYER
                for weight, layer in named.items():
                    of = name if weight == "weight" else f"{name}.{weight}"
                    if (reason := _why_whole(layer, optimized)) is not None:
                        self.skipped[of] = reason
                    else:
                        layers.setdefault(id(layer.weight), []).append((of, layer))
        found: dict[str, _Weight] = {}
        for key, of_weight in layers.items():
            names, shared = zip(*of_weight, strict=True)
            if users[key] > len(shared):
                self.skipped.update(dict.fromkeys(names, "another module has the same weight"))
            else:
                found[names[0]] = _Weight(tuple(shared), _share_of(names[0], shares))
        if not found:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
            raise ValueError(
                f"PartialUpdates: no layer can be trained in part{f' ({why})' if why else ''}; pass the result of "
                "qtoolkit.prepare or qtoolkit.quant_modules.replace, and an optimizer of its parameters."
            )
        return found

    @torch.no_grad()
    def _choose(self) -> None:
        """Choose the channels by the rule, from the current weights."""
        weights = list(self._weights.values())
        if self.by == "rotation":
            turn = self.steps // self.every
            for w in weights:
                turned = torch.arange(w.count, device=w.layer.weight.device) + turn * w.count
                w.choose(w.in_weight(turned.remainder(w.of_each).expand(w.layer.layers, -1)))
            return
        importances = [weight.importance() for weight in weights]
        if self.by == "magnitude":
            for weight, importance in zip(weights, importances, strict=True):
                weight.choose(weight.in_weight(importance.view(weight.layer.layers, -1).topk(weight.count).indices))
            return
        device = importances[0].device
        relative = torch.cat([(each / each.mean().clamp_min(1e-300)).to(device) for each in importances])
        best = torch.zeros_like(relative, dtype=torch.bool)
        best[relative.topk(sum(weight.count for weight in weights)).indices] = True
        for weight, chosen in zip(weights, best.split_with_sizes([len(each) for each in importances]), strict=True):
            weight.choose(chosen.nonzero().flatten())

    # ---- the optimizer

    @torch.no_grad()
    def _take_rows(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the optimizer update parameters of the chosen channels in place of the weights."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ValueError(
                "PartialUpdates: optimizer.step must be called without a closure: it would run the model while the optimizer "
                "holds parts of its weights; compute the loss and its gradients before the step."
            )
        self._release()  # a step before has raised an error
        taken = {id(w.layer.weight): _Rows(w.layer.OUTPUT_AXIS, _channels(w.layer)) for w in self._weights.values()}
        for group in optimizer.param_groups:
            params = group["params"]
            for place, p in enumerate(params):
                rows = taken.get(id(p))
                if rows is None or p.grad is None:
                    continue
                part = nn.Parameter(rows.select(p.detach()), requires_grad=True)
                part.grad = rows.select(p.grad)
                state = optimizer.state.get(p, {})
                optimizer.state[part] = {key: rows.select(v) if _is_like(v, p) else v for key, v in state.items()}
                params[place] = part
                self._taken.append(_Taken(params, place, p, part, rows))

    @torch.no_grad()
    def _put_back(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write the optimizer's updates into the weights and their state."""
        for _, _, p, part, rows in self._taken:
            rows.write(p, part)
            for key, value in optimizer.state[part].items():
                of_p = optimizer.state[p]
                if not _is_like(value, part):
                    of_p[key] = value
                    continue
                if key not in of_p:
                    of_p[key] = torch.zeros_like(p, dtype=value.dtype)
                rows.write(of_p[key], value)
        self._release()

    def _release(self) -> None:
        for taken in self._taken:
            taken.params[taken.place] = taken.weight
            self.optimizer.state.pop(taken.part, None)
        self._taken = []


def _shares(model: nn.Module, share: object) -> dict[str, float]:
    """Return the shares of modules by name."""
    shares: dict[str, Any] = dict(share) if isinstance(share, Mapping) else {"": share}
    modules = dict(model.named_modules())
    for name, value in shares.items():
        if name not in modules:
            raise ValueError(f"PartialUpdates: share: {unknown('module', name, modules)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"PartialUpdates: share must be a number from 0 to 1, got {value!r}.")
        if not 0 <= value <= 1:
            raise ValueError(f"PartialUpdates: share must lie in [0, 1], got {value}.")
    return shares


def _share_of(name: str, shares: Mapping[str, float]) -> float:
    """Return the share of a layer: the share of the longest name that contains it."""
    parts = name.split(".") if name else []
    around = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    return next((shares[each] for each in around if each in shares), 1.0)


def _why_whole(layer: LayerOp, optimized: set[int]) -> str | None:
    """Return why the weight of a layer is trained whole; None if it can be trained in part."""
    weight = layer.weight
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed from other parameters"
    if layer.updated_channels is not None:
        return "another PartialUpdates trains it; call finish() of that one first"
    if not weight.requires_grad:
        return "its weight is not trained"
    return None if id(weight) in optimized else "its weight is not in the optimizer"


def _is_like(value: object, p: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape


def _channels(layer: LayerOp) -> Tensor:
    """Return the updated channels of a layer, with the first choice."""
    return cast("Tensor", layer.updated_channels)
