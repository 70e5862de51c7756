"""Names of shared modules, and their replacement under all names."""

from torch import nn

from qtoolkit.shared_modules import first_names, modules_by_name, names_by_module, replace_everywhere


class Shared(nn.Module):
    """A layer with two names, in a block with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.again, self.layer = self.block, self.block[0]


NAMES = ["block.0", "again.0", "layer"]


def test_all_names_in_order() -> None:
    model = Shared()
    assert names_by_module(model)[model.layer] == NAMES
    assert names_by_module(model)[model.block] == ["block", "again"]
    assert names_by_module(model)[model] == [""]
    assert list(modules_by_name(model)) == ["", "block", "block.0", "block.1", "again", "again.0", "again.1", "layer"]
    assert {modules_by_name(model)[name] for name in NAMES} == {model.layer}


def test_first_names_are_the_first_of_all_names() -> None:
    model = Shared()
    assert first_names(model) == {module: names[0] for module, names in names_by_module(model).items()}
    assert list(first_names(model).values()) == ["", "block", "block.0", "block.1"]


def test_a_shared_module_stays_shared_when_it_is_replaced() -> None:
    model, new = Shared(), nn.Linear(2, 2)
    old = model.layer
    replace_everywhere(model, old, new)
    assert model.layer is model.block[0] is model.again[0] is new
    assert old not in names_by_module(model)
