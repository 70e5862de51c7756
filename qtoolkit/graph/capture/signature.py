"""How the traced forward is called: torch.fx reads the arguments of the function, which a decorated forward does not have."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import FunctionType

from torch import nn

from qtoolkit.errors import check_known, shown
from qtoolkit.graph.capture.shapes import is_plain
from qtoolkit.model_inputs import bind, split

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Types of values that torch.fx fixes. Other defaults, such as a list or a tensor, are fixed by a call without the arguments.
FIXED_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class ForwardCall:
    """A call of a model's forward by named arguments, without `*args` and `**kwargs`."""

    signature: inspect.Signature  # the named parameters; each becomes an input of the graph
    # the names of the arguments that the call passes, each with whether it is passed by keyword. The others are left at their
    # defaults, as a decorator may tell them from arguments that are passed
    passed: Mapping[str, bool]

    @classmethod
    def find(
        cls,
        parameters: Mapping[str, inspect.Parameter],
        given: Mapping[str, object] | None,
        fixed: Collection[str],
        by_name: Collection[str],
    ) -> "ForwardCall | None":
        """Return the call of a forward; None if its `*args` or `**kwargs` have values, or may have some.

        `given` has the example value of each argument, or is None; the arguments `fixed` are left at their defaults unless they
        are given; the example inputs pass those `by_name` by keyword.
        """
        variadic = [name for name, parameter in parameters.items() if parameter.kind in VARIADIC]
        if variadic and (given is None or any(name in given for name in variadic)):
            return None
        named = {name: parameter for name, parameter in parameters.items() if name not in variadic}
        passed: dict[str, bool] = {}
        for place, (name, parameter) in enumerate(named.items()):
            if name in (given or {}) or name not in fixed:
                after_gap = place > len(passed) or any(passed.values())
                passed[name] = after_gap or name in by_name or parameter.kind is inspect.Parameter.KEYWORD_ONLY
        return cls(inspect.Signature(list(named.values())), passed)

    def of(self, forward: Callable[..., object]) -> Callable[..., object]:
        """Return a function that calls a forward with the model and the values of the named parameters, in their order."""

        def call(model: nn.Module, *values: object) -> object:
            arguments = dict(zip(self.signature.parameters, values, strict=True))
            by_place = [arguments[name] for name, by_keyword in self.passed.items() if not by_keyword]
            by_name = {name: arguments[name] for name, by_keyword in self.passed.items() if by_keyword}
            return forward(model, *by_place, **by_name)

        names = ("self", *self.signature.parameters)
        # Never called: torch.fx reads its code and its signature. From Python 3.12 on, code must have the variables it uses.
        code = (lambda: None).__code__.replace(co_argcount=len(names), co_varnames=names, co_nlocals=len(names))
        described = FunctionType(code, {})
        described.__signature__ = self.signature  # type: ignore[attr-defined]
        described.__annotations__ = inspect.unwrap(forward).__annotations__
        call.__wrapped__ = described  # type: ignore[attr-defined]
        return call


@dataclass(frozen=True)
class Arguments:
    """The arguments of a forward that is traced."""

    given: dict[str, object] | None  # the example value of each argument; None without example inputs
    # the values of those that are fixed: the user's choices, and arguments whose example value or default is a flag, a string
    # or None; a default that is a number is fixed too
    fixed: dict[str, object]
    # the defaults of other types, which a call without these arguments fixes: lists and the like; None for tensors and objects
    left_out: dict[str, object]
    call: ForwardCall | None  # how forward is called; None if its `*args` or `**kwargs` have values, or may have some

    @classmethod
    def of(cls, model: nn.Module, chosen: Mapping[str, object] | None, example_inputs: object) -> "Arguments":
        """Return the arguments of a model's forward; `chosen` are the values that the user has fixed.

        Raises ValueError: a key of `chosen` is not an argument of forward; TypeError: the example inputs do not match it.
        """
        parameters = dict(inspect.signature(model.forward).parameters)
        if not isinstance(chosen, Mapping | None):
            raise TypeError(f"prepare: concrete_args must be a dict of arguments of forward, got {shown(chosen)}.")
        chosen = chosen or {}
        for name in chosen:
            check_known("argument of forward in prepare's concrete_args", name, parameters)
        given = None if example_inputs is None else bind(model, example_inputs)
        values = {name: p.default for name, p in parameters.items()} | (given or {})
        fixed = {name: value for name, value in values.items() if _is_fixed(value, name in (given or {}))}
        # No code of a graph has a tensor or an object for a default.
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        defaults = {name: value if is_constant(value) else None for name, value in defaults.items()}
        parameters = {n: p.replace(default=defaults[n]) if n in defaults else p for n, p in parameters.items()}
        left_out = {n: value for n, value in defaults.items() if n not in {**fixed, **chosen, **(given or {})}}
        unpassed = (fixed | left_out).keys() - chosen.keys()
        call = ForwardCall.find(parameters, given, unpassed, split(example_inputs)[1])
        return cls(given, {**fixed, **chosen}, left_out if call else {}, call)


def is_constant(value: object) -> bool:
    """Return whether a value is a number, string, dtype, device or None, or a container of those."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else None
    return is_plain(value) if parts is None else all(map(is_constant, parts))


def _is_fixed(value: object, given: bool) -> bool:
    # A number that the user passes stays an input. Flags, strings and None select a branch of the forward.
    return isinstance(value, bool | str | type(None)) if given else isinstance(value, FIXED_TYPES)
