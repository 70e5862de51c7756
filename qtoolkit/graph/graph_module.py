"""QuantizedGraphModule: a GraphModule that keeps all names of its model, and whose copies keep its plan and attributes."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import PythonCode

from qtoolkit.errors import warn, with_article
from qtoolkit.foreign import integration_of
from qtoolkit.graph.block_calls import BlockCall
from qtoolkit.graph.blocks import (
    HELD,
    ClassReference,
    find_module,
    name_in_graph,
    object_of_name,
    refuse_change,
    refuse_removal,
    traced_type,
    warn_of_traced_value,
)
from qtoolkit.graph.nodes import QuantizerHolder, is_quantizer, is_weight_quantizer, readers_of
from qtoolkit.graph.output_types import returning
from qtoolkit.graph.placement.sources import link_sources
from qtoolkit.graph.plan import Plan
from qtoolkit.graph.program import compile_forward
from qtoolkit.graph.program.products import is_product_call, link_products
from qtoolkit.integer.kernels import Kernel
from qtoolkit.model_state import keep_trained
from qtoolkit.nn import QuantWeighted
from qtoolkit.nn.batch_norm import is_batch_norm
from qtoolkit.nn.layer_call import COPIED_LATER
from qtoolkit.nn.module import reset_after_loading
from qtoolkit.nn.on_codes import DEFAULT, PLAIN, TrainingArithmetic, TrainsOnCodes
from qtoolkit.nn.product import Product
from qtoolkit.op_kinds.facts import NodeFacts, facts_of, set_facts
from qtoolkit.op_kinds.reached import reached
from qtoolkit.op_kinds.recorded import TrainingMode
from qtoolkit.op_kinds.rules import module_of
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.quantizers.tensor_quantizer import TensorQuantizer
from qtoolkit.shared_modules import names_by_module


class Method:
    """A method bound to a module. Copies and pickles drop the module, and `QuantizedGraphModule` binds them to the new one.

    `function` is the class's function; None in a pickle that was loaded where it cannot be imported: the model then has
    no such attribute. `needed` is whether a pickle cannot be written or loaded without it.
    """

    def __init__(self, function: Any, owner: nn.Module | None = None, needed: bool = True) -> None:
        self.function, self.owner, self.needed = function, owner, needed

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the method."""
        return self.function(self.owner, *args, **kwargs)

    @classmethod
    def by_name(cls, module: str, name: str) -> "Method":
        """Return the method of a function's name, without a function if there is none of that name."""
        return cls(object_of_name(module, name), needed=False)

    def __deepcopy__(self, memo: dict[int, object]) -> "Method":
        return Method(self.function, needed=self.needed)

    def __reduce__(self) -> tuple[object, ...]:
        if self.needed or self.function is None:
            return Method, (self.function, None, self.needed)
        return Method.by_name, (self.function.__module__, self.function.__qualname__)


_CHANGED: ContextVar["dict[QuantizedGraphModule, None] | None"] = ContextVar("changed", default=None)


@contextmanager
def compiled_once() -> Iterator[None]:
    """Compile the graphs that a block makes or changes once each, at its end: the block calls none of these models."""
    if _CHANGED.get() is not None:  # inside of another block
        yield
        return
    changed: dict[QuantizedGraphModule, None] = {}
    token = _CHANGED.set(changed)
    try:
        yield
    finally:
        _CHANGED.reset(token)
    for gm in changed:
        gm.recompile()


class QuantizedGraphModule(fx.GraphModule, TrainsOnCodes):
    """The type of models that `qtoolkit.prepare` and `qtoolkit.convert` return.

    torch's GraphModule drops everything that its graph does not use. This one keeps all parameters, buffers and submodules of
    the traced model, under their names, and the attributes in `kept`.

    Attributes:
        kept: Values of the attributes that copies keep, by dotted name.
        aliases: All names of each shared submodule, by each of its names.
        calls: The calls of the model and its blocks, as tracing saw them; none until prepare is done: the nodes run alone.
        products: The products of two activations, by the names of their nodes.
        model_class: The class of models that it is an instance of.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softmax(1)), backend="tensorrt")
        >>> isinstance(prepared, qt.graph.QuantizedGraphModule), list(prepared.state_dict())[:2]
        (True, ['0.weight', '0.bias'])
    """

    _plan: Plan | None = None
    kept: dict[str, object]
    aliases: dict[str, tuple[str, ...]]
    calls: tuple[BlockCall, ...]
    products: Mapping[str, Product]
    _arithmetic: TrainingArithmetic = DEFAULT
    # What torch.fx makes of the graph. Each instance has a class of its own.
    _traced_forward: ClassVar[Callable[..., object]]
    model_class: ClassVar[type[nn.Module]] = nn.Module

    @classmethod
    def of(
        cls,
        root: nn.Module,
        graph: fx.Graph,
        name: str,
        plan: Plan | None = None,
        kept: Mapping[str, object] | None = None,
        calls: tuple[BlockCall, ...] = (),
        arithmetic: TrainingArithmetic = DEFAULT,
    ) -> Self:
        """Return one for a module and a graph that uses its submodules, parameters and buffers.

        Raises ValueError: the module has a submodule, parameter or buffer of the name of an attribute of this class.
        """
        _check_names(root)
        result = cls(root, graph, name)
        _take_over(result, root)
        result._plan, result.kept, result.aliases = plan, {}, _aliases(result)
        result._arithmetic = arithmetic
        result.divide(calls)
        for attribute, value in (kept or {}).items():
            result.keep(attribute, value)
        result.register_load_state_dict_post_hook(update_ranges)  # type: ignore[no-untyped-call]
        return result

    def recompile(self) -> PythonCode | None:  # type: ignore[override]  # None in a block of `compiled_once`
        """Compile the graph, and the parts of it that the blocks run."""
        if self._waits():
            return None
        code = super().recompile()
        del type(self).__call__  # torch.fx's prints a traceback of its own for each error, caught or not
        type(self)._traced_forward = type(self).forward
        # `vars`: torch's constructor calls this before the fields are set, and Module.__getattr__ would raise.
        self.divide(vars(self).get("calls", ()))
        return code

    def _waits(self) -> bool:
        """Return whether a block of `compiled_once` compiles this graph at its end."""
        changed = _CHANGED.get()
        if changed is not None:
            changed[self] = None
        return changed is not None

    def divide(self, calls: tuple[BlockCall, ...]) -> None:
        """Compile the graph; let the blocks of these calls run their parts of it, where it allows that."""
        self.calls = calls
        self.products = {node.name: Product(len(node.args)) for node in self.graph.nodes if is_product_call(node)}
        self.link_sources()
        if self._waits():
            return
        forward = compile_forward(self, calls, self.ops_in_training(), type(self)._traced_forward)
        types = () if self._plan is None else self._plan.tracing.output_types
        type(self).forward = returning(forward, types)

    def link_sources(self) -> None:
        """Tell each layer the quantizer of its input, as the graph now is, and each product its operands' quantizers."""
        if self._plan is not None:
            link_sources(self.graph, self._plan.backend)
            link_products(self.graph, self._plan.backend, self._arithmetic, self.products)

    def ops_in_training(self) -> Mapping[str, Product] | None:
        """Return the products that the forward computes in its own way; None where it has only the ops of the graph."""
        return None if self._arithmetic == PLAIN else self.products

    @property
    def plan(self) -> Plan:
        """The decisions of prepare.

        Raises:
            RuntimeError: The model was traced, and not prepared.
        """
        if self._plan is None:
            raise RuntimeError("plan: the model was traced and not prepared; call qtoolkit.prepare on the float model.")
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def training_arithmetic(self) -> TrainingArithmetic:
        """How the ops between the layers compute in training, and which tensors they keep for backward."""
        return self._arithmetic

    @training_arithmetic.setter
    def training_arithmetic(self, arithmetic: TrainingArithmetic) -> None:
        if arithmetic != self._arithmetic:
            self._arithmetic = arithmetic
            self.divide(self.calls)

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> None:
        """Replace a submodule under each of its names, so that it stays shared."""
        self.get_submodule(target.rpartition(".")[0])  # raises AttributeError
        for holder, name in self._places_of(target):
            nn.Module.set_submodule(holder, name, module, strict)

    def delete_submodule(self, target: str) -> bool:
        """Delete a submodule under each of its names."""
        deleted = [holder._modules.pop(name, None) for holder, name in self._places_of(target)]
        return bool(deleted) and None not in deleted

    def _places_of(self, target: str) -> Iterator[tuple[nn.Module, str]]:
        """Yield the holders of a submodule, inside wrappers of blocks, with its name there; a shared one has several."""
        name = name_in_graph(self, target)
        for each in self.aliases.get(name, (name,)):
            path, _, last = each.rpartition(".")
            if (holder := find_module(self, path)) is not None:
                yield holder, last

    def __setattr__(self, name: str, value: Any) -> None:
        if self._plan is not None:
            warn_of_traced_value(self, self._plan.tracing.values, name, value, "the prepared model")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        refuse_removal(self if "_plan" in vars(self) else None, name, self.model_class.__name__)
        super().__delattr__(name)

    def keep(self, name: str, value: object) -> None:
        """Set an attribute, by dotted name, that copies and pickles keep."""
        self.kept[name] = value
        self.set_kept()

    def set_kept(self) -> None:
        """Set the kept attributes on the current submodules, except for layers and weights, which are kept by their names."""
        for name, value in self.kept.items():
            owner_name, _, attribute = name.rpartition(".")
            owner = self.get_submodule(owner_name)
            if attribute in {*owner._modules, *owner._parameters, *owner._buffers}:
                continue
            if not isinstance(value, Method):
                setattr(owner, attribute, value)
            elif value.function is not None:
                setattr(owner, attribute, Method(value.function, owner, value.needed))

    def train(self, mode: bool = True) -> Self:
        """Set the mode, and link layers to the batch norms that replaced the linked ones.

        torch.nn.SyncBatchNorm.convert_sync_batchnorm creates new ones. In eval mode each range that follows a weight is the
        weight's present range: QuantModule sets its own, and this method the ranges of functions' weights.
        """
        for node, follower in self.linked_batch_norms():
            name = str(follower.target)
            layer, bn = self.get_submodule(str(node.target)), self.get_submodule(name)
            if isinstance(layer, QuantWeighted) and layer.batch_norm is not bn and is_batch_norm(bn):
                self.set_submodule(name, layer.replace_batch_norm(bn, name))
        if mode and not self.training and self._plan is not None and not self._plan.tracing.training:
            self._warn_of_branches(self._plan.tracing.branches)
        super().train(mode)
        self.link_sources()  # modules may have been replaced
        if not mode:
            self.follow_weights()
        return self

    def _warn_of_branches(self, names: Sequence[str]) -> None:
        if names:
            warn(
                f"train: Python branches on self.training in {', '.join(names)}; the model was prepared in eval mode, and its "
                f"graph computes that branch in training mode too. Prepare it in training mode, or name the submodule in "
                f"`untraced`.",
            )

    def follow_weights(self) -> None:
        """Set each range that follows the weight of a function, such as F.conv2d, to the weight's present range."""
        for quantizer, weight in self._weights_of_functions(lambda quantizer: quantizer.follows):
            if not weight.is_meta:
                quantizer.follow(weight)

    def set_weight_rates(self, chosen: Collection[Quantizer]) -> None:
        """Train the chosen quantizers' scales of weights of functions at the rates of the weights as they are."""
        for quantizer, weight in self._weights_of_functions(lambda quantizer: quantizer in chosen):
            quantizer.set_weight_rate(weight, weight)

    def _weights_of_functions(self, chosen: Callable[[TensorQuantizer], bool]) -> list[tuple[TensorQuantizer, Tensor]]:
        """Return the chosen quantizers of weights that a pass inserted, each with its weight, computed.

        Before the calibration, quantizers of weights that are computed after a quantizer without a range are left out.
        """
        nodes = [node for node in self.graph.nodes if is_weight_quantizer(node)]
        pairs = [(module_of(node), node.all_input_nodes[0]) for node in nodes]
        found = [(quantizer, node) for quantizer, node in pairs if isinstance(quantizer, TensorQuantizer)]
        found = [(quantizer, node) for quantizer, node in found if chosen(quantizer) and _has_ranges(node)]
        values = self.values_of([node for _, node in found])
        return [(quantizer, values[node]) for quantizer, node in found]

    def values_of(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
        """Compute nodes that depend on parameters alone."""
        interpreter = fx.Interpreter(self, garbage_collect_values=False)
        needed = set(reached(nodes, lambda node: node.all_input_nodes))
        with torch.no_grad():
            for node in self.graph.nodes:
                if node in needed:
                    interpreter.env[node] = interpreter.run_node(node)
        return {node: interpreter.env[node] for node in nodes}

    def linked_batch_norms(self) -> list[tuple[fx.Node, fx.Node]]:
        """Return the node of each QAT layer with a linked batch norm, with the node of that batch norm."""
        calls = [(node, self.get_submodule(str(node.target))) for node in self.graph.nodes if node.op == "call_module"]
        linked = (node for node, m in calls if isinstance(m, QuantWeighted) and m.batch_norm is not None)
        return [(node, readers_of(node)[0]) for node in linked]

    def __deepcopy__(self, memo: dict[int, object]) -> "QuantizedGraphModule":
        sources: list[Callable[[], None]] = []
        memo[COPIED_LATER] = sources
        result = super().__deepcopy__(memo)
        while sources:
            sources.pop()()
        memo.pop(COPIED_LATER, None)  # a model in it may have taken it
        if not isinstance(result, QuantizedGraphModule):
            raise TypeError(f"copying gave {with_article(type(result))}.")
        _take_over(result, _bare({name: copy.deepcopy(vars(self)[name], memo) for name in HELD}))
        result._plan, result.aliases, result._arithmetic = self._plan, self.aliases, self._arithmetic
        result.kept = copy.deepcopy(self.kept, memo)
        result.set_kept()
        result.divide(self.calls)
        keep_trained(result)
        return result

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, arguments = super().__reduce__()
        # torch.fx traces the graph again when it is unpickled, without the meta of its nodes.
        facts = {node.name: facts_of(node) for node in self.graph.nodes if facts_of(node) != NodeFacts()}
        kind = ClassReference(self.model_class)
        own = type(self).__name__, self._plan, self.kept, facts, self.calls, kind, self._arithmetic
        return restore_graph_module, (rebuild, arguments, *own)


def _has_ranges(node: fx.Node) -> bool:
    """Return whether each quantizer from which a node is computed has a range."""
    sources = filter(is_quantizer, reached([node], lambda source: source.all_input_nodes))
    quantizers = map(module_of, sources)
    return all(quantizer.ready for quantizer in quantizers if isinstance(quantizer, TensorQuantizer))


def plan_in(model: object) -> Plan | None:
    """Return the plan of a model with a graph; None for a model that was traced and not prepared, and for all others."""
    return model._plan if isinstance(model, QuantizedGraphModule) else None


class QuantizedSequential(QuantizedGraphModule, nn.Sequential):
    """The QuantizedGraphModule of a Sequential: its layers can be read by index, `len` and iteration."""

    model_class = nn.Sequential
    append = extend = insert = pop = __delitem__ = __iadd__ = __imul__ = refuse_change

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers())

    def __len__(self) -> int:
        return len(self._layers())

    def __getitem__(self, index: Any) -> Any:
        return self._layers()[index]

    def _layers(self) -> nn.Sequential:
        """Return the layers, without what prepare has added: bare modules that hold quantizers, and a mode."""
        added = (nn.Module, QuantizerHolder, TrainingMode, type(None))
        layers = {name: child for name, child in self._modules.items() if type(child) not in added}
        result: nn.Sequential = traced_type(nn.Sequential)()  # type: ignore[assignment]
        result._modules.update(layers)
        return result


def type_for(model_class: type[nn.Module]) -> type[QuantizedGraphModule]:
    """Return the type of prepared models of a class: an instance of it where other packages ask for it."""
    if issubclass(model_class, nn.Sequential):
        return QuantizedSequential
    integration = integration_of(model_class)
    if integration is None:
        return QuantizedGraphModule
    kind: type[QuantizedGraphModule] = integration.graph_module_type(model_class)
    return kind


def update_ranges(gm: QuantizedGraphModule, keys: object) -> None:
    """Set the ranges of weights that a state dict without them, or out of date, was loaded into: a hook."""
    reset_after_loading(gm, keys)
    if not gm.training:
        gm.follow_weights()
    for module in gm.modules():
        if isinstance(module, Kernel):
            module.refresh()


def restore_graph_module(
    rebuild: Callable[..., fx.GraphModule],
    arguments: tuple[dict[str, object], ...],  # of which the first has the attributes
    name: str,
    plan: Plan | None,
    kept: Mapping[str, object],
    facts: Mapping[str, NodeFacts],
    calls: tuple[BlockCall, ...],
    kind: ClassReference,
    arithmetic: TrainingArithmetic = DEFAULT,
) -> QuantizedGraphModule:
    """Return a pickled QuantizedGraphModule, by the function of torch.fx that rebuilds a GraphModule from its attributes."""
    gm = rebuild(*arguments)
    for node in gm.graph.nodes:
        set_facts(node, **vars(facts.get(node.name, NodeFacts())))
    return type_for(kind.kind or nn.Module).of(_bare(arguments[0]), gm.graph, name, plan, kept, calls, arithmetic)


def _bare(state: Mapping[str, object]) -> nn.Module:
    """Return a plain module with the attributes of a GraphModule: torch's copies drop the second name of a shared module."""
    module = nn.Module()
    vars(module).update(state)
    return module


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    several = (names for names in names_by_module(model).values() if len(names) > 1)
    shared = (tuple(name_in_graph(model, name) for name in names) for names in several)
    return {name: names for names in shared for name in names}


def names_of_own() -> set[str]:
    """Return the names of the attributes that a prepared model uses itself."""
    return {*dir(QuantizedGraphModule), *QuantizedGraphModule.__annotations__, "graph", "meta", "training"}


def _check_names(root: nn.Module) -> None:
    """Raise ValueError for a model whose parts have names that a prepared model uses itself."""
    own = names_of_own()
    for name in (*root._modules, *root._parameters, *root._buffers):
        if name in own and not isinstance(root, QuantizedGraphModule):
            raise ValueError(
                f"prepare: the model must not have a submodule, parameter or buffer named {name!r}, since prepared models have "
                f"an attribute of that name; rename it in the model, for example to '{name}_', and in the state dicts it loads."
            )


def _take_over(target: nn.Module, source: nn.Module) -> None:
    """Give a module the submodules of another one, add the parameters and buffers that it does not have, and set its mode."""
    target.training = source.training
    for name, parameter in source.named_parameters(recurse=False, remove_duplicate=False):
        if name not in target._parameters:
            target.register_parameter(name, parameter)
    known = dict(source.named_buffers(recurse=False, remove_duplicate=False))
    for name, buffer in {**dict(target.named_buffers(recurse=False)), **known}.items():
        # A constant of the graph is a buffer too, so that it moves with the module; no checkpoint has it.
        kept = name in known and name not in source._non_persistent_buffers_set
        target.register_buffer(name, buffer, persistent=kept)
    target._modules.clear()
    target._modules.update(source._modules)
