"""The models of the zoo, their inputs, and which of their submodules are prepared."""

from zoo_models.recipe import Recipe
from zoo_models.timm_families import timm_recipes
from zoo_models.torchvision_models import torchvision_recipes

__all__ = ["Recipe", "recipes"]


def recipes() -> dict[str, Recipe]:
    """Return the recipes of all installed packages by name."""
    return {recipe.name: recipe for recipe in (*torchvision_recipes(), *timm_recipes())}
