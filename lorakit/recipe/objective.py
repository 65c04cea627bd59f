"""The recipe's `objective` section: what a run minimises, and the numbers of each objective."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from lorakit.recipe.section import Name, Section

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "sft": {},
    "dft": {},
    "focal": {"gamma": 2.0},
    "dpo": {"beta": 0.1, "sft_weight": 0.0},
    "ipo": {"beta": 0.1, "sft_weight": 0.0},
    "robust_dpo": {"beta": 0.1, "label_smoothing": 0.1, "sft_weight": 0.0},
    "hinge": {"beta": 0.1, "sft_weight": 0.0},
    "sigmoid_norm": {"beta": 0.1, "sft_weight": 0.0},
    "cpo": {"beta": 0.1, "sft_weight": 1.0},
    "simpo": {"beta": 2.0, "gamma": 1.0, "sft_weight": 0.0},
    "orpo": {"beta": 0.1, "sft_weight": 1.0},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "reward": {"center_rewards_coefficient": 0.0},
    "classify": {"problem_type": "single_label_classification"},
    "embed": {"temperature": 0.05, "negatives": 0, "matryoshka_dims": ()},
    "distill": {"beta": 0.0, "sft_weight": 0.0, "top_k": 64},
}
"""objective -> its settings with their defaults"""
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
MAX_SEVERAL: Final = 31  # labels where a row may have several of them: bits of a whole number
MAX_NEGATIVES: Final = 100
HEAD_OBJECTIVES: Final = ("reward", "classify")  # of a head of the adapter's own, at the last token of each row
PREFERENCES: Final = ("dpo", "ipo", "robust_dpo", "hinge", "sigmoid_norm", "cpo", "simpo", "orpo", "kto")
PAIRS: Final = ({*PREFERENCES} - {"kto"}) | {"reward"}  # objectives that read pairs of answers
OTHER_KEYS: Final = {"labels": "classify", "teacher": "distill", "teacher_base": "distill", "pooling": "embed"}
"""key beside SETTINGS -> its objective"""
PREFERENCE_LEARNING_RATE: Final = 1e-5  # of PREFERENCES, which unlearn everything at the rates of `sft`


class ObjectiveSection(Section):
    name: Literal[
        "sft", "dft", "focal", "dpo", "ipo", "robust_dpo", "hinge", "sigmoid_norm", "cpo", "simpo", "orpo", "kto",
        "reward", "classify", "embed", "distill",
    ] = "sft"  # fmt: skip
    """What is minimised. `sft`: the mean cross-entropy of the label tokens. `dft`: each times its token's probability.
    `focal`: each times (1 - probability)^gamma. `classify`: the mean cross-entropy of each row's `label`, by a new head
    at its last token, or as `problem_type` says. `embed`: -log of the share of a row's `positive` among all texts of
    the step, by the cosine of their embeddings and its `anchor`'s (InfoNCE). `distill`: the mean divergence from a
    teacher's probabilities at the label tokens. `kto` reads rows with an answer and a `label`, true if it is desirable.
    The others read pairs, rows with a `chosen` and a `rejected` answer. `kto`, `dpo`, `ipo`, `robust_dpo`, `hinge` and
    `sigmoid_norm` compare with the model at the run's start, `cpo`, `simpo` and `orpo` with nothing.
    `reward`: -log sigmoid of the difference of both answers' rewards, by a new head at their last tokens."""
    labels: tuple[Name | int, ...] | None = Field(None, min_length=2, max_length=10_000)
    """classify: the labels that rows have, each once: texts or numbers, and `["true", "false"]` of truth values."""
    problem_type: ProblemType | None = None
    """classify: what a row's `label` is, in transformers' words: one of `labels`; a list of them, for which it is the
    mean binary cross-entropy of each; or a number, without `labels`, for which it is the mean squared error (default
    single_label_classification)."""
    pooling: Literal["lasttoken", "mean", "cls"] | None = None
    """embed: an embedding is the last hidden state of a text's last token, the mean of all its tokens', or that of its
    first token, of encoders (default lasttoken). sentence-transformers' words."""
    temperature: float | None = Field(None, gt=0, le=100)
    """embed: what cosines are divided by (default 0.05, which is sentence-transformers' scale of 20)."""
    negatives: int | None = Field(None, ge=0, le=MAX_NEGATIVES)
    """embed: how many `negative` texts each row has, beside the other rows' texts (default 0)."""
    matryoshka_dims: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """embed: numbers of leading values that shall be embeddings too. Their losses are added to the full one's."""
    teacher: Name | None = None
    """distill: the adapter that teaches, a folder or a hub id. Its base is this recipe's, unless `teacher_base` is.
    Without either, rows bring `teacher_logprobs`: for each label token its likeliest tokens' ids and log p."""
    teacher_base: Name | None = None
    """distill: the base that teaches, or that the teacher adapts: a model with the same tokens as this recipe's."""
    top_k: int | None = Field(None, ge=1, le=1024)
    """distill: the teacher's likeliest tokens at each label that are told apart; others count as one (default 64)."""
    beta: float | None = Field(None, ge=0)
    """Weight of the difference of a pair, above 0 (default 0.1; simpo 2). distill: from 0 to 1. 0 is KL(teacher ||
    student), 1 is KL(student || teacher), and between them is the generalised Jensen-Shannon divergence (default 0)."""
    gamma: float | None = Field(None, ge=0)
    """simpo: margin by which the chosen answer shall be better (default 1). focal: the exponent (default 2)."""
    label_smoothing: float | None = Field(None, ge=0, lt=0.5)
    """robust_dpo: share of pairs whose answers are taken to be the wrong way round (default 0.1)."""
    desirable_weight: float | None = Field(None, ge=0)
    """kto: weight of each desirable answer's loss (default 1)."""
    undesirable_weight: float | None = Field(None, ge=0)
    """kto: weight of each undesirable answer's loss (default 1)."""
    sft_weight: float | None = Field(None, ge=0)
    """Weight of the mean cross-entropy of the chosen answers' tokens, or of a distilled row's labels, which is added
    (default 0; cpo and orpo 1)."""
    center_rewards_coefficient: float | None = Field(None, ge=0)
    """reward: weight of the mean square of the sum of both rewards, which keeps them near 0 (default 0)."""

    @model_serializer(mode="wrap")
    def _given_values(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out keys that are not given, so that runs of older versions go on."""
        return {key: value for key, value in handler(self).items() if value is not None}

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of this objective, with their defaults where the recipe leaves them out."""
        given = {key: getattr(self, key) for key in SETTINGS[self.name]}
        return {key: value if given[key] is None else given[key] for key, value in SETTINGS[self.name].items()}

    @property
    def is_taught_by_rows(self) -> bool:
        """True if rows bring what their teacher says."""
        return self.name == "distill" and self.teacher is None and self.teacher_base is None

    @property
    def reads_pairs(self) -> bool:
        """True if rows have a chosen and a rejected answer."""
        return self.name in PAIRS

    @property
    def group_size(self) -> int:
        """Rows of tokens that a row becomes, and that stay together."""
        return 2 + self.settings["negatives"] if self.name == "embed" else 2 if self.reads_pairs else 1

    @property
    def has_head(self) -> bool:
        """True if the adapter gets a head of its own, whose value at a row's last token is what the loss reads."""
        return self.name in HEAD_OBJECTIVES

    @property
    def num_values(self) -> int:
        """Values of the adapter's own head; 0 without one."""
        return len(self.labels or ("value",)) if self.has_head else 0

    @property
    def row_settings(self) -> dict[str, Any]:
        """What is read of a row: those of `RowSettings` (data/row_settings.py) that the objective decides."""
        labels = tuple(map(str, self.labels or ("value",))) if self.has_head else None
        settings: dict[str, Any] = {"pairs": self.reads_pairs, "labels": labels, "verdicts": self.name == "kto"}
        settings["problem_type"] = self.settings.get("problem_type")
        if self.name == "embed":
            settings |= {"texts": self.group_size, "pooling": self.pooling or "lasttoken", "labels": ("embedding",)}
        return settings

    def problems(self) -> Iterator[str]:
        is_regression = self.problem_type == "regression"
        if self.name == "classify" and (self.labels is None) != is_regression:
            yield "labels: name the labels that the rows have, such as labels: [question, order]; none of regression"
        if self.problem_type == "multi_label_classification" and len(self.labels or ()) > MAX_SEVERAL:
            yield f"labels: up to {MAX_SEVERAL} of which a row has several, got {len(self.labels or ())}"
        if self.labels is not None and len(set(map(str, self.labels))) < len(self.labels):
            yield "labels: one is named twice"
        if self.beta is not None and (self.beta > 1 if self.name == "distill" else self.beta == 0):
            yield f"beta: is above 0, and of distill from 0 to 1, got {self.beta:g}"
        for key, value in self:
            names = [OTHER_KEYS[key]] if key in OTHER_KEYS else [name for name, keys in SETTINGS.items() if key in keys]
            if value is not None and key != "name" and self.name not in names:
                yield f"{key}: goes with {', '.join(names)}, got objective {self.name}"
