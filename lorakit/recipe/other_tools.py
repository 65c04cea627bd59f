"""Recognise the configuration of another trainer, and name lorakit's key for each of its keys.

Invariant: docs/coming-from.md has a row for every key here, with the same keys of lorakit.
"""

from collections.abc import Mapping
from typing import Any, Final

MIN_KEYS: Final = 3
"""keys of another tool, at the top of a file, that make it that tool's"""
SHOWN_CHARACTERS: Final = 30
PAGE: Final = "docs/coming-from.md"

TRANSFORMERS: Final = {
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "part of train.batch_size: rows of a device x accumulation x devices",
    "learning_rate": "train.learning_rate",
    "lr_scheduler_type": "train.schedule",
    "warmup_steps": "train.warmup_steps; below 1 train.warmup_ratio",
    "warmup_ratio": "train.warmup_ratio",
    "optim": "train.optimizer",
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    "adam_epsilon": "train.epsilon",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "neftune_noise_alpha": "train.neftune_alpha",
    "label_smoothing_factor": "train.label_smoothing",
    "num_cycles": "train.schedule_cycles",
    "min_lr": "train.min_learning_rate",
    "bf16": "base.dtype: bfloat16",
    "fp16": "base.dtype: float16",
    "gradient_checkpointing": "train.activation_checkpointing: layers",
    "eval_strategy": "train.eval_every_steps",
    "eval_steps": "train.eval_every_steps",
    "save_strategy": "train.save_every_steps",
    "save_steps": "train.save_every_steps",
    "save_total_limit": "train.keep_checkpoints",
    "load_best_model_at_end": "train.select: best",
    "metric_for_best_model": "evaluation.best",
    "report_to": "train.log_to",
    "logging_steps": "nothing to set: every step is logged",
    "seed": "train.seed",
    "torch_compile": "train.compile",
    "deepspeed": "parallel.backend: zero2 or zero3",
    "fsdp": "parallel.backend: fsdp2",
    "push_to_hub": "lorakit push",
    "hub_model_id": "lorakit push",
    "output_dir": "output",
    "resume_from_checkpoint": "nothing to set: the same command resumes",
    "overwrite_output_dir": "--fresh",
}
"""of `TrainingArguments`, which TRL, LLaMA-Factory and unsloth take too"""

PEFT: Final = {
    "r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "use_rslora": "adapter.method: rslora",
    "use_dora": "adapter.method: dora",
    "load_in_8bit": "base.quantize: int8",
    "load_in_4bit": "base.quantize: nf4",
}

SHORT_NAMES: Final = {"lr": "train.learning_rate"}
"""which people write without a look at any documentation"""

TOOLS: Final[Mapping[str, Mapping[str, str]]] = {
    "axolotl": {
        "base_model": "base.model",
        "adapter": "base.quantize: nf4 for qlora, none for lora",
        "lora_r": "adapter.rank",
        "lora_target_linear": "adapter.targets: all-linear",
        "lora_target_modules": "adapter.targets",
        "lora_modules_to_save": "adapter.modules_to_save",
        "lora_model_dir": "adapter.start_from",
        "peft_use_dora": "adapter.method: dora",
        "peft_use_rslora": "adapter.method: rslora",
        "datasets": "data.train",
        "test_datasets": "data.eval",
        "val_set_size": "data.eval",
        "dataset_prepared_path": "nothing to set: tokenised rows are in the user's cache",
        "chat_template": "data.chat_template",
        "sequence_len": "data.max_tokens",
        "sample_packing": "data.packing",
        "eval_sample_packing": "data.packing",
        "pad_to_sequence_len": "nothing to set: packed rows have no padding",
        "train_on_inputs": "data.loss_on: all",
        "special_tokens": "nothing to set: the end token is that of the chat template; new ones are adapter.new_tokens",
        "tokens": "adapter.new_tokens",
        "micro_batch_size": "train.micro_batch_size, in rows and not in lines",
        "num_epochs": "train.epochs",
        "optimizer": "train.optimizer",
        "lr_scheduler": "train.schedule",
        "tf32": "nothing to set",
        "flash_attention": "nothing to set",
        "context_parallel_size": "parallel.sequence",
        "tensor_parallel_size": "parallel.tensor",
        "evals_per_epoch": "train.eval_every_steps",
        "saves_per_epoch": "train.save_every_steps",
        "early_stopping_patience": "train.early_stopping_evals",
        "wandb_project": "train.log_to: [wandb]",
        "wandb_entity": "train.log_to: [wandb]",
    },
    "LLaMA-Factory": {
        "model_name_or_path": "base.model",
        "trust_remote_code": "nothing to set: no code of a base is run",
        "stage": "objective.name: sft",
        "do_train": "lorakit train",
        "finetuning_type": "adapter.method: lora",
        "lora_rank": "adapter.rank",
        "lora_target": "adapter.targets",
        "additional_target": "adapter.modules_to_save",
        "pissa_init": "adapter.init: pissa",
        "adapter_name_or_path": "adapter.start_from",
        "quantization_bit": "base.quantize: nf4 for 4, int8 for 8",
        "dataset": "data.train: the files themselves",
        "dataset_dir": "data.train: the files themselves",
        "eval_dataset": "data.eval",
        "val_size": "data.eval",
        "max_samples": "limit of a source in data.train",
        "template": "data.chat_template",
        "cutoff_len": "data.max_tokens",
        "packing": "data.packing",
        "neat_packing": "data.packing",
        "train_on_prompt": "data.loss_on: all",
        "preprocessing_num_workers": "nothing to set: all cores tokenise",
        "overwrite_cache": "nothing to set: the cache knows its rows",
        "plot_loss": "nothing to set: loss.png is always written",
        "predict_with_generate": "train.eval_generate",
    },
    "TRL": {
        "model_name_or_path": "base.model",
        "dataset_name": "data.train",
        "max_length": "data.max_tokens",
        "packing": "data.packing",
        "assistant_only_loss": "data.loss_on: answer",
        "completion_only_loss": "data.loss_on: answer",
        "chat_template_path": "data.chat_template",
        "activation_offloading": "train.activation_offload",
        "use_peft": "nothing to set: an adapter is all that is trained",
        "lora_r": "adapter.rank",
        "lora_target_modules": "adapter.targets",
    },
    "unsloth": {
        "model_name": "base.model",
        "max_seq_length": "data.max_tokens",
        "use_gradient_checkpointing": "train.activation_checkpointing: layers",
        "random_state": "train.seed",
        "bias": "adapter.bias",
    },
}


def known_elsewhere(key: str) -> str | None:
    """Return lorakit's keys for another trainer's key, as a text; None for a key that no trainer here has."""
    tables = (*TOOLS.values(), TRANSFORMERS, PEFT, SHORT_NAMES)
    return next((table[key] for table in tables if key in table), None)


def explain_foreign(values: Mapping[Any, Any], sections: Mapping[str, Any]) -> str | None:
    """Return whose configuration a file is, and its keys with lorakit's; None for a recipe.

    values: the content of the file. sections: lorakit's own keys at the top of a recipe.
    """
    ours = [key for key in values if key in sections and isinstance(values[key], Mapping)]
    tables = {tool: {**TRANSFORMERS, **PEFT, **own} for tool, own in TOOLS.items()}
    known = {tool: [key for key in values if key in table] for tool, table in tables.items()}
    own = {tool: [key for key in known[tool] if key in TOOLS[tool]] for tool in TOOLS}
    tool = max(TOOLS, key=lambda name: (len(own[name]), len(known[name])))
    if ours or len(known[tool]) < MIN_KEYS:
        return None
    name = tool if own[tool] else "transformers' Trainer"
    written = {key: f"{key}: {_short(value)}" for key, value in values.items()}
    width = max(map(len, written.values()))
    lines = [f"  {written[key]:<{width}}  {tables[tool].get(key, f'- (see {PAGE})')}" for key in values]
    return (
        f"this is a configuration of {name}, not a recipe. Its keys, and lorakit's:\n"
        + "\n".join(lines)
        + f"\n{PAGE} has such a file beside its recipe; `lorakit init` writes one for your base and rows"
        + (f", and `lorakit init --from coming-from/{tool.lower()}` copies that of the page" if own[tool] else "")
    )


def _short(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "..."
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
