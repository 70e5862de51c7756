"""The models of the zoo, their inputs, and which of their submodules are prepared."""

from zoo_models.other_packages import spandrel_recipes, ultralytics_recipes
from zoo_models.recipe import Recipe
from zoo_models.timm_families import timm_recipes
from zoo_models.torchvision_models import torchvision_recipes
from zoo_models.transformers_models import transformers_recipes

__all__ = ["Recipe", "recipes"]

PACKAGES = (torchvision_recipes, timm_recipes, transformers_recipes, ultralytics_recipes, spandrel_recipes)


def recipes() -> dict[str, Recipe]:
    """Return the recipes of all installed packages by name."""
    return {recipe.name: recipe for of_package in PACKAGES for recipe in of_package()}
