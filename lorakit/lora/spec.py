"""The settings of an adapter, before it is put on a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lorakit.errors import TargetError, translate_error
from lorakit.files.patterns import check_expression
from lorakit.lora.init import INITS
from lorakit.lora.methods import METHODS, PLAIN

ALL_LINEAR: Final = "all-linear"
MLP: Final = "mlp"
ALL_EXPERTS: Final = "all-experts"
BIASES: Final = ("none", "lora_only", "all")
TIED_HEADS: Final = ("stop", "untie")
Patterns = str | tuple[str, ...]  # a regular expression for full module names, or names and dotted suffixes of names


@dataclass(frozen=True)
class AdapterSpec:
    """Fields as in the recipe's ``adapter`` section; tokens are ids. Raises TargetError for an impossible value."""

    method: str = PLAIN
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: Patterns = ALL_LINEAR
    exclude: Patterns | None = None
    layers: tuple[int, ...] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    init: str = "gaussian"
    target_parameters: Patterns = ()  # 3-D parameters of experts: ``all-experts``, or suffixes of their names
    bias: str = "none"  # trainable biases of the base: ``none``, ``lora_only`` or ``all``
    modules_to_save: tuple[str, ...] = ()  # modules that are trained in full, by name or suffix
    trainable_tokens: tuple[int, ...] = ()  # trainable rows of the embedding, by token id
    new_tokens: Mapping[str, int] = field(default_factory=dict)
    """text -> id of tokens that the base does not have: trainable rows of the embedding and of the head"""
    num_values: int = 0  # of a head of the adapter's own, beside the base's; 0: it has none
    tied_head: str = "stop"  # an adapter on a head or embedding that share a weight: ``stop``, or ``untie`` them

    def __post_init__(self) -> None:
        for name, known in (("method", METHODS), ("init", INITS), ("bias", BIASES), ("tied_head", TIED_HEADS)):
            value = getattr(self, name)
            if value not in known:
                raise TargetError(f"{name} is one of {', '.join(known)}; got {value!r}")
        ranks = [self.rank, *self.rank_pattern.values()]
        alphas = [self.alpha, *self.alpha_pattern.values()]
        if any(type(r) is not int or r < 1 for r in ranks) or any(not 1e-9 <= a < 1e9 for a in alphas):
            raise TargetError(f"ranks are whole numbers from 1, alphas from 1e-9 to 1e9; got {ranks}, {alphas}")
        if not 0 <= self.dropout < 1:
            raise TargetError(f"0 <= dropout < 1; got {self.dropout}")
        if not isinstance(self.new_tokens, Mapping):
            raise TargetError(f"new_tokens: text -> id in your tokenizer, which has them; got {self.new_tokens!r}")
        patterns = (pattern for pattern in (self.targets, self.exclude) if isinstance(pattern, str))
        for text in [*patterns, *self.rank_pattern, *self.alpha_pattern]:
            with translate_error(ValueError, TargetError, f"{text!r}"):
                check_expression(text)
