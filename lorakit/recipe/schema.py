"""The sections and keys of a recipe: frozen, typed, strict. Imports no torch.

An unknown key, a string for a number or a NaN is an error, never a guess. The sentence under each field is its
description in the JSON schema, so editors show it.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, Field

from lorakit.backends import BACKENDS, Backend, backends_with
from lorakit.errors import RunError, did_you_mean
from lorakit.files.text import full_dtype_name
from lorakit.recipe.data import DataSection
from lorakit.recipe.objective import ObjectiveSection
from lorakit.recipe.parallel import ParallelSection
from lorakit.recipe.section import Count, Expression, Name, Pattern, Section, Token

UNREAD_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "beta1": ("adafactor",), "beta2": ("sgd", "muon", "adafactor"), "epsilon": ("lion", "sgd", "muon", "adafactor"),
}  # fmt: skip
"""key -> optimizers that do not read it"""
DEFAULTS: Final[Mapping[str, Mapping[str, float]]] = {"lion": {"beta2": 0.99}, "muon": {"beta1": 0.95}}
"""optimizer -> its own defaults, from the papers; of all others they are those of the schema"""
FULL_TENSORS: Final = ("adafactor", "muon", "adamw8bit", "paged_adamw", "paged_adamw8bit")
"""optimizers whose state or updates are of full rows, matrices, blocks or pages, and not of parts of a tensor"""
SCHEDULE_KEYS: Final = {
    "schedule_power": ("polynomial",), "schedule_cycles": ("cosine",), "decay_ratio": ("wsd",),
    "min_learning_rate": ("cosine", "linear", "polynomial", "wsd"),
}  # fmt: skip
"""key -> schedules that read it"""
MeasureName = Literal["exact_match", "prefix", "numeric", "json_fields", "rouge_1", "rouge_2", "rouge_l", "bleu"]


class BaseSection(Section):
    model: Name
    """The frozen model: a folder, a `.gguf` file, a hub id, or `builtin:tiny`."""
    revision: Name | None = None
    """Branch, tag or commit, for a hub id only."""
    tokenizer: Name | None = None
    """Folder of the tokenizer, if it is not the base's own."""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"], AfterValidator(full_dtype_name)
    ] = "auto"
    """Storage and compute type of the base. `auto`: the fastest type that this machine computes correctly, by a
    measurement. `float16` trains with loss scaling. `fp32`, `bf16` and `fp16` are the same types."""
    quantize: Literal["none", "nf4", "fp4", "int8", "fp8"] = "none"
    """Quantise the frozen linear layers while they are read: with bitsandbytes to 4 bits in blocks of 64 values (`nf4`,
    `fp4`), or to 8 bits with a scale for each row, as integers with bitsandbytes (`int8`) or floats (`fp8`). They
    compute in `dtype`. The output head and all other modules stay in `dtype`. A base with quantised files
    (bitsandbytes, FP8, compressed-tensors, GPTQ, AWQ) is read as it is, without this key."""
    double_quantize: bool = True
    """With nf4 and fp4: quantise the scales of the blocks too, to 8 bits."""
    skip_modules: tuple[Pattern, ...] = ()
    """Modules that stay in `dtype`, by name or suffix."""

    def problems(self) -> Iterator[str]:
        if self.skip_modules and self.quantize == "none":
            yield "`skip_modules` goes with `quantize`"


class AdapterSection(Section):
    method: Literal["lora", "rslora", "lora_fa", "dora", "rsdora"] = "lora"
    """How the adapter changes a layer. `lora` scales by alpha/r, `rslora` by alpha/sqrt(r). `lora_fa` freezes A. `dora`
    trains the norm of each row of W apart from its direction; `rsdora` does so with alpha/sqrt(r)."""
    rank: Count = 8
    """r, the inner width of A (r, in) and B (out, r)."""
    alpha: float = Field(16.0, ge=1e-9, lt=1e9)
    """Numerator of the scale of B A."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the adapter's inputs set to zero in training."""
    targets: Expression | tuple[Pattern, ...] = "all-linear"
    """Layers that get an adapter: `all-linear`, `mlp`, a list of name suffixes, or one regular expression for full
    module names. Linear, Conv1D and Embedding layers can be named. `all-linear` is every linear layer of the text model
    but the output head, without those that cannot be adapted exactly, which a run names; `mlp` is those of them in
    MLPs."""
    target_parameters: Literal["all-experts"] | tuple[Pattern, ...] = ()
    """Experts stored as 3-D parameters that get an adapter: `all-experts`, or suffixes such as `experts.down_proj`."""
    exclude: Expression | tuple[Pattern, ...] | None = None
    """Modules that get no adapter: a list of suffixes, or one regular expression."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Adapt only the layers with these indices (with `all-linear`, `mlp` or a list of suffixes)."""
    rank_pattern: dict[Expression, Count] = Field({}, max_length=10_000)
    """Rank by module name or regular expression; the first match wins."""
    alpha_pattern: dict[Expression, Annotated[float, Field(ge=1e-9, lt=1e9)]] = Field({}, max_length=10_000)
    """Alpha by module name or regular expression; the first match wins."""
    init: Literal["gaussian", "kaiming", "pissa", "olora"] = "gaussian"
    """Initial A and B. `gaussian`: A normal with standard deviation 1/r, B zero. `kaiming`: A Kaiming uniform, B zero.
    `pissa`: A and B from the largest singular vectors of W. `olora`: A and B from the QR decomposition of W. The last
    two are saved as a plain patch of rank 2 r."""
    start_from: Name | None = None
    """Patch of lorakit or PEFT whose values the adapter starts with: a folder, or a hub id `ORG/NAME[@REVISION]`.
    Method, rank, alpha and targets are the patch's: leave them out, or give the same."""
    bias: Literal["none", "lora_only", "all"] = "none"
    """Trainable biases of the base: none, those of adapted layers, or all."""
    modules_to_save: tuple[Pattern, ...] = ()
    """Modules that are trained in full and saved with the patch, by name or suffix."""
    trainable_tokens: tuple[Pattern | Annotated[int, Field(ge=0)], ...] = ()
    """Tokens whose rows of the embedding (and of a tied head) are trained, as text or as ids."""
    new_tokens: tuple[Token, ...] = ()
    """Texts that become tokens, such as `<|tool|>`: each is one id, with a trainable row of its own in the embedding
    and in the output head. The rows start as the mean of all others; the patch holds them and the tokens."""
    tied_head: Literal["stop", "untie"] = "stop"
    """For an adapter on an embedding that shares its weight with the output head. `stop`: an error. `untie`:
    the head gets a weight of its own."""

    def problems(self) -> Iterator[str]:
        if (self.targets == () and not self.target_parameters) or self.exclude == ():
            yield "the list is empty: name at least one"
        if self.layers is not None and isinstance(self.targets, str) and self.targets not in ("all-linear", "mlp"):
            yield "`layers` goes with `all-linear`, `mlp` or a list; put the indices into the regular expression"


class TrainSection(Section):
    epochs: float | None = Field(None, gt=0, le=1_000_000)
    """Passes over the rows (default 1, unless `steps` is given)."""
    steps: Count | None = None
    """Optimizer updates, instead of `epochs`."""
    batch_size: Count = 16
    """Rows per optimizer update, over all processes."""
    micro_batch_size: Count | None = None
    """Rows per forward pass of one process (default 8, or `batch_size` if that is less)."""
    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate (default with an objective that reads pairs: 1e-5)."""
    schedule: Literal["cosine", "linear", "polynomial", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up. All but `constant` fall to `min_learning_rate`; `wsd` is constant until its decay,
    which is linear."""
    min_learning_rate: float = Field(0.0, ge=0)
    """Learning rate at the end of the schedule."""
    schedule_power: float = Field(2.0, gt=0)
    """polynomial: power of the remaining share of steps; 1 is `linear`."""
    schedule_cycles: Count = 1
    """cosine: times that it falls from `learning_rate` to its end, with a warm restart before each but the first."""
    decay_ratio: float = Field(0.2, gt=0, le=1)
    """wsd: share of the steps after warm-up, the last ones, in which the learning rate falls."""
    warmup_steps: int | None = Field(None, ge=0)
    """Optimizer updates over which the learning rate rises from zero (default 10, or a tenth of all steps if that is
    less)."""
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    """The same as a share of all steps, instead of `warmup_steps`."""
    optimizer: Literal[
        "adamw", "adafactor", "lion", "muon", "sgd", "adamw8bit", "paged_adamw", "paged_adamw8bit"
    ] = "adamw"  # fmt: skip
    """`adamw` goes with every backend. `sgd` goes with single, ddp and fsdp2, the others with single and ddp. `muon` is
    for A and B alone. `8bit` has moments in 8 bits, `paged` pages them from GPU to host memory when needed; these and
    `lion` use bitsandbytes."""
    loraplus_lr_ratio: float | None = Field(None, gt=0)
    """LoRA+: learning rate of B divided by `learning_rate`."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean of gradients; the momentum of sgd and muon (default there 0.95). adafactor has none."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's decay of the mean of squared gradients, and lion's of the mean of gradients (default there 0.99)."""
    epsilon: float = Field(1e-8, gt=0)
    """Number that AdamW adds to the denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay; sgd adds it to the gradient."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this norm; null turns clipping off."""
    neftune_alpha: float | None = Field(None, gt=0)
    """NEFTune: in training, add uniform noise to the embeddings of a row, of at most alpha / sqrt(tokens x width)."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of each label that is spread over all tokens of the vocabulary, in training. The held-out loss has none."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of every random stream: initial A, order of rows, dropout, noise."""
    activation_checkpointing: Literal["none", "layers", "auto"] = "none"
    """`layers` saves only layer inputs in forward and recomputes the other activations in backward. `auto` does so if
    the run would not fit otherwise (`lorakit plan`)."""
    activation_offload: bool = False
    """Move saved layer inputs to host memory until backward (with `activation_checkpointing: layers`)."""
    save_every_steps: Count = 50
    """Optimizer updates between checkpoints."""
    save_every_seconds: float | None = Field(None, gt=0)
    """A checkpoint is also due once this many seconds have passed since the last one. Null: never for that reason."""
    keep_checkpoints: Count = 2
    """Number of checkpoints that stay on disk while the run trains, besides the best one. At its end the last stays."""
    eval_every_steps: Count = 50
    """Optimizer updates between evaluations, if `data.eval` is given."""
    eval_generate: Count | None = None
    """Answer held-out rows at every n-th evaluation, and measure the answers (section `evaluation`). Null: never."""
    early_stopping_evals: Count | None = None
    """Stop after this many consecutive evaluations without a better loss."""
    select: Literal["last", "best"] = "last"
    """Step that becomes the patch: the last, or the one with the best eval loss. The other one is in `best/` or
    `last/`."""
    log_to: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Experiment trackers, besides `metrics.jsonl`."""

    def problems(self) -> Iterator[str]:
        yield from self._update_problems()
        if self.activation_offload and self.activation_checkpointing != "layers":
            yield "activation_offload keeps layer inputs: set `activation_checkpointing: layers` with it"
        if self.epochs is not None and self.steps is not None:
            yield "give `epochs` or `steps`, not both"
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            yield f"micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}"
        if self.steps is not None and self.warmup_steps is not None and self.warmup_steps >= self.steps:
            yield endless_warmup(self.warmup_steps, self.steps)

    def _update_problems(self) -> Iterator[str]:
        """Yield what contradicts, also a key that optimizer or schedule does not read, unless it has its default."""
        defaults = {key: field.default for key, field in type(self).model_fields.items()}
        for key, optimizers in UNREAD_KEYS.items():
            if getattr(self, key) != defaults[key] and self.optimizer in optimizers:
                yield f"{key}: {self.optimizer} does not read it; leave it out"
        for key, schedules in SCHEDULE_KEYS.items():
            if getattr(self, key) != defaults[key] and self.schedule not in schedules:
                yield f"{key}: goes with schedule {' or '.join(schedules)}, got {self.schedule}"
        if self.min_learning_rate >= self.learning_rate:
            yield f"min_learning_rate: {self.min_learning_rate:g} is not below learning_rate {self.learning_rate:g}"
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            yield "give `warmup_steps` or `warmup_ratio`, not both"


class EvaluationSection(Section):
    measures: tuple[MeasureName, ...] = ("exact_match",)
    """Measures of the generated answers, each from 0 to 1, with `train.eval_generate`. `exact_match`, `prefix` (the
    answer begins with the expected one), `numeric` (the last numbers are equal), `json_fields` (share of equal fields);
    `rouge_1`, `rouge_2`, `rouge_l` and `bleu` need `pip install 'lorakit[eval]'`."""
    max_new_tokens: Count = 128
    """Longest answer in tokens. A longer answer is cut, and no exact match."""
    num_rows: Count | None = 200
    """Held-out rows to answer, the first ones, of several sources equally many; null is all."""
    best: Literal["loss"] | MeasureName | Name = "loss"
    """What makes a step the best one, for `train.select` and `train.early_stopping_evals`: the held-out loss, one of
    `measures`, or a measure of your own (`--metric`), as of the evaluations that generate."""
    lower_is_better: bool | None = None
    """For a measure of your own in `best`, and required there: true if smaller values are better, else false."""

    def problems(self) -> Iterator[str]:
        if not self.measures or len(set(self.measures)) < len(self.measures):
            yield "measures: name at least one, each once"
        if self.own_best is not None:
            if self.lower_is_better is None:
                known = ("loss", *get_args(MeasureName))
                own = f"{did_you_mean(self.best, known)} Of a measure of your own say lower_is_better: true or false"
                yield f"best: {self.best!r} is none of {', '.join(known)}.{own}"
        elif self.lower_is_better is not None:
            yield f"lower_is_better: goes with a measure of your own, got best: {self.best}"
        elif self.best not in ("loss", *self.measures):
            yield f"best: {self.best} is not measured; add it to `measures`"

    @property
    def own_best(self) -> str | None:
        """The measure in `best` if it is a function of the caller's, else None."""
        return None if self.best in ("loss", *get_args(MeasureName)) else self.best


class Recipe(Section):
    """One training run."""

    base: BaseSection
    """The frozen model, and how it is stored in memory."""
    adapter: AdapterSection = AdapterSection()
    """The adapter: its method, its size, and the layers that get one."""
    data: DataSection
    """Training rows and held-out rows, and which tokens of them are labels."""
    train: TrainSection = TrainSection()
    """Length of the run, rows of a step, optimizer and learning rate; when to save and to evaluate."""
    parallel: ParallelSection = ParallelSection()
    """Processes and machines, and what is split among them."""
    objective: ObjectiveSection = ObjectiveSection()
    """What a run minimises."""
    evaluation: EvaluationSection = EvaluationSection()
    """Answers to held-out rows, and their measures."""
    output: Name
    """Folder of the run, to which the patch is written."""

    @property
    def auto_keys(self) -> tuple[str, ...]:
        """Keys with the value `auto`, which `lorakit train` replaces by the plan's choice before processes start."""
        is_auto = {
            "parallel.backend": self.parallel.is_auto,
            "train.activation_checkpointing": self.train.activation_checkpointing == "auto",
        }
        return tuple(key for key, value in is_auto.items() if value)

    def problems(self) -> Iterator[str]:
        return itertools.chain(self._eval_problems(), self._tensor_problems(), self._pair_problems())

    def _pair_problems(self) -> Iterator[str]:
        if self.train.label_smoothing and self.objective.name != "sft":
            yield f"train.label_smoothing: {self.train.label_smoothing:g}: goes with objective sft alone"
        if self.objective.name == "embed" and self.adapter.new_tokens:
            yield "adapter.new_tokens: not with objective embed, whose patches other programs put on the base as it is"
        if self.parallel.pipeline > 1 and (self.objective.has_head or self.objective.name == "embed"):
            yield f"parallel.pipeline: {self.parallel.pipeline}: not with objective {self.objective.name}"
        if not (self.objective.reads_pairs or self.objective.has_head or self.objective.name in ("kto", "embed")):
            return
        others = {
            "data.loss_on: all": self.data.loss_on == "all",
            f"data.on_long_rows: {self.data.on_long_rows}": self.data.on_long_rows in ("split", "fill"),
            "train.eval_generate": self.train.eval_generate is not None,
        }
        for key, is_set in others.items():
            if is_set:
                reads = {"embed": "texts"}.get(self.objective.name, "labels")
                reads = "pairs of answers" if self.objective.reads_pairs else reads
                yield f"{key}: goes with objective sft, got {self.objective.name}, which reads {reads}"

    def _eval_problems(self) -> Iterator[str]:
        """Yield what keys about held-out rows lack, and why answers cannot be generated."""
        for key in () if self.data.has_eval else ("select", "early_stopping_evals", "eval_generate"):
            if getattr(self.train, key) != TrainSection.model_fields[key].default:
                yield f"train.{key} needs held-out rows: set data.eval"
        if self.train.eval_generate is None:
            if self.evaluation != EvaluationSection():
                yield "evaluation: nothing is generated; set train.eval_generate, or leave the section out"
            return
        backend = self.parallel.backend
        reason = None
        if self.parallel.offloads.streams:
            reason = "offload: stream reads the base for every token"
        elif self.parallel.offloads.parameters != "none" or not (backend == "auto" or BACKENDS[backend].generates):
            reason = f"backend {backend} shards or moves what every token needs"
        elif self.parallel.pipeline > 1:
            reason = "no process has all layers with pipeline"
        if reason is not None:
            others = backends_with(lambda other: other.generates)
            yield f"train.eval_generate: {reason}; it goes with backend {others}; `lorakit score` measures checkpoints"

    def _tensor_problems(self) -> Iterator[str]:
        """Yield why tokens cannot be shared, or why the optimizer does not get the tensors that it needs."""
        if self.parallel.sequence > 1 and not self.data.packing:
            yield f"parallel.sequence: {self.parallel.sequence} goes with data.packing: true"
        optimizer = self.train.optimizer

        def updates(backend: Backend) -> bool:
            return backend.optimizers is None or optimizer in backend.optimizers

        if not self.parallel.is_auto and not updates(self.parallel.facts):
            possible = f"{backends_with(updates)}, got {self.parallel.backend}"
            yield f"train.optimizer: {optimizer} goes with backend {possible}; adamw goes with every backend"
        if self.parallel.tensor > 1 and optimizer in FULL_TENSORS:
            why = f"does not go with train.optimizer: {optimizer}, which updates full tensors"
            yield f"parallel.tensor: {self.parallel.tensor} {why}; choose adamw, lion or sgd, or fsdp2 without tensor"


def endless_warmup(warmup_steps: int, steps: int) -> str:
    """Return the error message for a warm-up as long as the full run."""
    return f"warmup_steps: {warmup_steps} of {steps} steps, so the learning rate would never be reached; lower it"


def batch_sizes(recipe: Recipe) -> tuple[int, int]:
    """Return the rows of tokens of a step over all processes, and those of a micro-batch: one for each text."""
    train = recipe.train
    micro_batch_size = train.micro_batch_size or min(8, train.batch_size)
    per_row = recipe.objective.group_size
    return train.batch_size * per_row, micro_batch_size * per_row


def schema_text() -> str:
    """Return the JSON schema of recipes for editors: keys, values and descriptions."""
    return json.dumps(Recipe.model_json_schema(), indent=1, sort_keys=True) + "\n"


def count_steps(recipe: Recipe, num_rows: int) -> int:
    """Return the number of optimizer updates of the full run. num_rows: of tokens, two for each pair."""
    batch_size, _ = batch_sizes(recipe)
    per_epoch = math.ceil(num_rows / batch_size)
    return recipe.train.steps or math.ceil((recipe.train.epochs or 1.0) * per_epoch)


def count_warmup_steps(recipe: Recipe, total_steps: int) -> int:
    """Return the updates over which the rate rises. Raises RunError: it would rise to the run's end."""
    requested, ratio = recipe.train.warmup_steps, recipe.train.warmup_ratio
    if ratio is not None:
        requested = math.ceil(total_steps * ratio)  # as transformers rounds it
    if requested is not None and requested >= total_steps:
        if ratio is not None:
            raise RunError(f"train.warmup_ratio: {ratio:g} of {total_steps} steps is all of them; lower it")
        raise RunError(f"train.{endless_warmup(requested, total_steps)}")
    return min(10, total_steps // 10) if requested is None else requested


def default_values() -> dict[str, Any]:
    """Return a recipe of nothing but the keys that have a default, as JSON has them."""
    recipe = Recipe(base=BaseSection(model="-"), data=DataSection(train="-"), output="-")
    return recipe.model_dump(mode="json", exclude={"base": {"model"}, "data": {"train"}, "output": True})
