"""The axis `tensor`: ranks with other parts of each weight, and of its adapter."""

from lorakit.parallel.tensor.cut import IN_PARTS, TensorShards, cut_on_meta
from lorakit.parallel.tensor.plan import checked_plan, cut_dims

__all__ = ["IN_PARTS", "TensorShards", "checked_plan", "cut_dims", "cut_on_meta"]
