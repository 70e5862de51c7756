"""Ops that take several fields in one list: their arguments by the names of the fields, as the other ops have them."""

from typing import Any

LISTS: dict[str, tuple[str, ...]] = {
    "x_range": ("x_qmin", "x_qmax"),
    "range": ("qmin", "qmax"),
    "activation": ("low", "high", "slope"),
    "grid": ("qmin", "qmax", "axis", "group", "block_size"),
    "geometry": ("stride", "padding", "dilation", "output_padding", "transposed", "groups"),
}


class Fields:
    """An op that is called with fields by their names."""

    def __init__(self, op: Any) -> None:
        self.op, self._schema = op, op._schema
        self.lists = [a.name for a in op._schema.arguments if a.name in LISTS]
        self.names = [n for a in op._schema.arguments for n in LISTS.get(a.name, (a.name,))]

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the op."""
        packed = {name for each in self.lists for name in LISTS[each]}
        lists = {name: in_one_list(name, given) for name in self.lists}
        return {name: value for name, value in given.items() if name not in packed} | lists

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Call the op."""
        return self.op(*args, **(self.arguments(given) if self.lists else given))


def in_one_list(name: str, given: dict[str, Any]) -> list[Any]:
    """The list of this name, without a look at what is in it."""
    fields = {field: given[field] for field in LISTS[name]}
    if name == "grid":
        axis = fields.pop("axis")
        return [*fields.values(), *([] if axis is None else [axis])]
    if name == "geometry":
        sides = [n for field in LISTS[name][:4] for n in fields[field]]
        return [fields["groups"], int(fields["transposed"]), *sides]
    return [*fields.values()]
