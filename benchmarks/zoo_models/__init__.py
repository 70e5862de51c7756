"""The zoo as data: which models are built, with which inputs, and which parts of them are prepared."""

from zoo_models.recipe import Recipe
from zoo_models.timm_families import timm_recipes
from zoo_models.torchvision_models import torchvision_recipes

__all__ = ["Recipe", "recipes"]


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, those of the packages that are installed."""
    return {recipe.name: recipe for recipe in (*torchvision_recipes(), *timm_recipes())}
