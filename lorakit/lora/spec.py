"""The settings of an adapter, before it is put on a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ALL_LINEAR: Final = "all-linear"
ALL_EXPERTS: Final = "all-experts"
Patterns = str | tuple[str, ...]
"""a regular expression for full module names, or names and dotted suffixes of names"""


@dataclass(frozen=True)
class AdapterSpec:
    """Fields as in the recipe's ``adapter`` section; tokens are ids here."""

    method: str = "lora"
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: Patterns = ALL_LINEAR
    exclude: Patterns | None = None
    layers: tuple[int, ...] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    init: str = "gaussian"
    target_parameters: Patterns = ()
    """3-D parameters of experts: ``all-experts``, or suffixes of their names"""
    bias: str = "none"
    """trainable biases of the base: ``none``, ``lora_only`` or ``all``"""
    modules_to_save: tuple[str, ...] = ()
    """modules that are trained in full, by name or suffix"""
    trainable_tokens: tuple[int, ...] = ()
    """trainable rows of the embedding, by token id"""
    new_tokens: Mapping[str, int] = field(default_factory=dict)
    """text -> id of tokens that the base does not have: trainable rows of the embedding and of the head"""
    tied_head: str = "stop"
    """an adapter on a head or embedding that share a weight: ``stop``, change ``both`` alike, or ``untie`` them"""
