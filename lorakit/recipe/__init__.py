"""Recipes: a YAML file becomes a frozen, typed, validated Recipe. Imports no torch."""

from lorakit.recipe.data import DataSection
from lorakit.recipe.load import load_recipe
from lorakit.recipe.parallel import ParallelSection
from lorakit.recipe.schema import AdapterSection, BaseSection, Recipe, TrainSection

__all__ = ["AdapterSection", "BaseSection", "DataSection", "ParallelSection", "Recipe", "TrainSection", "load_recipe"]
