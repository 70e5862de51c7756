"""The models of the zoo, their inputs, and which of their submodules are prepared."""

from benchmarks.pages.zoo_models.monai_models import monai_recipes
from benchmarks.pages.zoo_models.pytorchcv_models import pytorchcv_recipes
from benchmarks.pages.zoo_models.recipe import Recipe
from benchmarks.pages.zoo_models.segmentation_models import segmentation_recipes
from benchmarks.pages.zoo_models.spandrel_models import spandrel_recipes
from benchmarks.pages.zoo_models.timm_families import timm_recipes
from benchmarks.pages.zoo_models.torchaudio_models import torchaudio_recipes
from benchmarks.pages.zoo_models.torchvision_models import torchvision_recipes
from benchmarks.pages.zoo_models.transformers_models import transformers_recipes
from benchmarks.pages.zoo_models.ultralytics_models import ultralytics_recipes
from benchmarks.pages.zoo_models.vit_pytorch_models import vit_pytorch_recipes

__all__ = ["MODULES", "Recipe", "recipes"]

PACKAGES = (
    torchvision_recipes,
    timm_recipes,
    transformers_recipes,
    ultralytics_recipes,
    spandrel_recipes,
    segmentation_recipes,
    monai_recipes,
    torchaudio_recipes,
    vit_pytorch_recipes,
    pytorchcv_recipes,
)
# What they take models from.
MODULES = (
    "torchvision.models",
    "timm",
    "transformers",
    "ultralytics.nn.tasks",
    "spandrel",
    "segmentation_models_pytorch",
    "monai.networks.nets",
    "torchaudio.models",
    "vit_pytorch",
    "pytorchcv.model_provider",
)


def recipes() -> dict[str, Recipe]:
    """Return the recipes of all installed packages by name."""
    return {recipe.name: recipe for of_package in PACKAGES for recipe in of_package()}
