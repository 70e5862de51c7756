"""How the traced forward is called: torch.fx reads the arguments from its code, which a decorated forward does not have."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from qtoolkit.model_inputs import bind, split

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Call:
    """A call of a model's forward by named arguments, without `*args` and `**kwargs`.

    Attributes:
        signature: The named parameters; each becomes an input of the graph.
        passed: The names of the arguments that the call passes, each with whether it is passed by keyword. The others are left
            at their defaults, as a decorator may tell them from arguments that are passed.
    """

    signature: inspect.Signature
    passed: Mapping[str, bool]

    @classmethod
    def find(
        cls, model: nn.Module, example_inputs: Any, fixed: Mapping[str, Any], chosen: Mapping[str, Any]
    ) -> "Call | None":
        """Return the call for a model; None if `*args` or `**kwargs` of its forward have values, or may have some.

        Args:
            model: The model.
            example_inputs: As for `qtoolkit.model_inputs.split`; None if there are none.
            fixed: The arguments that are fixed at tracing.
            chosen: Those of them that the user has fixed.
        """
        parameters = inspect.signature(model.forward).parameters
        given = {} if example_inputs is None else bind(model, example_inputs)
        variadic = [name for name, parameter in parameters.items() if parameter.kind in VARIADIC]
        if variadic and (example_inputs is None or any(name in given for name in variadic)):
            return None
        named = {name: parameter for name, parameter in parameters.items() if name not in variadic}
        by_name = split(example_inputs)[1]
        passed: dict[str, bool] = {}
        for place, (name, parameter) in enumerate(named.items()):
            if name in given or name in chosen or name not in fixed:
                after_gap = place > len(passed) or any(passed.values())
                passed[name] = after_gap or name in by_name or parameter.kind is inspect.Parameter.KEYWORD_ONLY
        return cls(inspect.Signature(list(named.values())), passed)

    def of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a forward with the model and the values of the named parameters, in their order."""

        def call(model: nn.Module, *values: Any) -> Any:
            """Call forward with values in the signature's order, each by position or by name as in the example inputs."""
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
