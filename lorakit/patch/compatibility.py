"""List the other programs that read a patch and compute the same with it, and the problems of the rest.

From the programs' own sources. PEFT 0.21 (transformers_weight_conversion.py) takes targets with the names that experts
had before transformers 5 for experts, also those of dense layers and shared experts. vLLM 0.33 (peft_helper.py,
lora_model.py, model_manager.py in lora/) reads ranks and alphas of PEFT's patterns, as 0.32 does; older ones know one
rank and one alpha. llama.cpp (convert_lora_to_gguf.py, llama-adapter.h) reads each rank from its tensor and one alpha
from the config, and always divides by the rank.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from lorakit.errors import PatchError
from lorakit.lora.methods import METHODS
from lorakit.lora.targets import layer_index
from lorakit.ops._internals import conversion_pattern, renamed_tensors
from lorakit.patch.own_head import own_head
from lorakit.patch.patch import Patch

PEFT_EXPERTS: Final = {
    "mixtral": ("gate", "w1", "w2", "w3"),
    "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj"),
}
"""transformers' pattern of an architecture -> targets that PEFT takes for experts"""
GGUF_FORMS: Final[Mapping[str, str]] = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
"""model_type of config.json, which is the architecture in a GGUF too -> its class"""
VLLM_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
VLLM_VERSION: Final = "0.32"  # first one that reads PEFT's patterns of rank and alpha
VLLM_HEADS: Final = {"score", "classifier"}
"""modules that vLLM takes in full, one of them, for a base that it serves as a classifier"""


@dataclass(frozen=True)
class Program:
    """A program that reads patches."""

    name: str
    problems: tuple[str, ...]  # reasons why it would compute other outputs with this patch
    call: str  # how to use the patch with it


def compatible_programs(patch: Patch) -> list[Program]:
    """Return PEFT, vLLM and llama.cpp, each with its problems with this patch."""
    names = [f"it looks for no tensor of the name {patch.misnamed}"] if patch.misnamed else []
    # numbered blocks, embedding and head are the layers of language models, which alone vLLM and llama.cpp serve
    is_usual = any(layer_index(name) is not None or name.endswith("lm_head") for name in patch.layers)
    is_usual |= any(layer.embedding for layer in patch.layers.values()) or not patch.layers
    layers = ", ".join([*patch.layers][:2])
    others = names + ([] if is_usual else [f"its layers ({layers}) are not those of a language model"])
    # PEFT's patches hold no tokens, so its users add them first
    setup = f"{new_token_calls(patch.new_tokens)}; " if patch.new_tokens else ""
    head = own_head(patch)
    base = "base" if head is None else f"AutoModelForSequenceClassification with num_labels={head.num_values}"
    flags = f"--enable-lora --max-lora-rank {vllm_rank([patch])} ({VLLM_VERSION} or newer)"
    return [
        Program("PEFT", (*names, *peft_problems(patch)), f"{setup}PeftModel.from_pretrained({base}, PATCH)"),
        Program("vLLM", (*others, *_vllm_problems(patch)), flags),
        Program("llama.cpp", (*others, *_llama_cpp_problems(patch)), "lorakit export BASE --adapter a=PATCH --gguf"),
    ]


def new_token_calls(tokens: Mapping[str, int]) -> str:
    """Return the calls of transformers that add ``Patch.new_tokens`` to a tokenizer and its base."""
    size = f"max({max(tokens.values()) + 1}, base.config.vocab_size)"  # because a base with spare rows keeps them
    return f"tokenizer.add_tokens({[*tokens]}); base.resize_token_embeddings({size})"


def check_compatible(patches: Mapping[str, Patch], program: str, remedy: str) -> None:
    """Raise PatchError, with the remedy, unless a program would compute the same with all of these patches."""
    listed = "\n".join(
        f"{name}: {'; '.join(one.problems)}"
        for name, patch in patches.items()
        for one in compatible_programs(patch)
        if one.name == program and one.problems
    )
    if listed:
        raise PatchError(f"{program} would compute other answers with these adapters:\n{listed}\n{remedy}")


def vllm_rank(patches: Iterable[Patch]) -> int | None:
    """Return the smallest ``--max-lora-rank`` that takes all of these patches; None if there is none."""
    largest = max(max(patch.config.rank, *patch.config.rank_pattern.values(), 0) for patch in patches)
    return next((rank for rank in VLLM_RANKS if rank >= largest), None)


def peft_problems(patch: Patch) -> Iterator[str]:
    """Yield why PEFT would compute something else with a patch."""
    config = (patch.metadata.get("base") or {}).get("config_values") or {}
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    if not any("expert" in key for part in parts for key in part):  # because transformers' tables take seconds to read
        return
    kinds = [str(part.get("model_type")) for part in parts]
    dense = sorted(name for name, layer in patch.layers.items() if not layer.num_experts)  # in memory as in a file
    # it asks the model's own config: of a class with vision the outer one, of its text model's class the inner one
    is_outer = any(".language_model." in f".{name}" for name in dense)
    kind = kinds[0] if is_outer else kinds[-1]
    names = PEFT_EXPERTS.get(conversion_pattern(kind) or "", ())
    if taken := [name for name in dense if name.rpartition(".")[2] in names]:
        yield f"it takes {len(taken)} layers for experts, whose names these had, and leaves them out: {taken[0]} first"
    renamed = renamed_tensors((kind,), tuple(f"{name}.weight" for name in dense), kinds[-1] if is_outer else "")
    if changed := next(((old, new) for new, old in renamed.items() if old != new), None):
        yield "it looks for {} under the name {}, and leaves it out".format(*changed)


def _vllm_problems(patch: Patch) -> Iterator[str]:
    raw = patch.config.raw
    yield from (f"adapter_config.json has no {key}" for key in ("r", "lora_alpha", "target_modules") if key not in raw)
    options = "--enable-mixed-moe-lora-format and is_3d_lora_weight"
    yield from _beyond_low_rank(patch, f" (vLLM 0.33 takes those of some bases, with {options})")
    if vllm_rank([patch]) is None:
        yield f"a rank above {VLLM_RANKS[-1]}, the largest that it takes"
    modules = {name: name.rpartition(".")[0] for name in patch.full_shapes}
    heads = VLLM_HEADS & set(modules.values())
    # PEFT saves a copy of these tensors beside an update of theirs
    copies = [f"{module}.weight" for module in patch.layers if module.endswith(("embed_tokens", "lm_head"))]
    if len(heads) > 1 or not VLLM_HEADS.issuperset(patch.config.modules_to_save):
        yield "modules_to_save other than one head of a classifier (score, classifier)"
    elif foreign := [name for name, module in modules.items() if module not in heads and name not in copies]:
        yield f"whole tensors such as {foreign[0]}"


def _llama_cpp_problems(patch: Patch) -> Iterator[str]:
    yield from _beyond_low_rank(patch)
    kind = ((patch.metadata.get("base") or {}).get("config_values") or {}).get("model_type")
    if kind not in (None, *GGUF_FORMS):
        yield f"its base is a {kind}; lorakit writes GGUF files of {', '.join(GGUF_FORMS)}"
    if any(layer.scale != patch.config.alpha / layer.rank for layer in patch.layers.values()):
        yield "it always scales by the one lora_alpha over the rank, which is not this patch's scale"
    skipped = {f"{module}.weight" for module in patch.layers}
    if foreign := [name for name in patch.full_shapes if name not in skipped]:
        yield f"whole tensors such as {foreign[0]}"


def _beyond_low_rank(patch: Patch, of_experts: str = "") -> Iterator[str]:
    """Yield the parts of a patch that vLLM and llama.cpp both do not read, or read in another layout."""
    if not patch.layers:
        yield "no low-rank update"
    if any(not METHODS[layer.method].additive for layer in patch.layers.values()):
        yield "magnitudes of DoRA"
    if stacked := [name for name, layer in patch.layers.items() if layer.num_experts]:
        yield f"experts as PEFT lays them out, such as {stacked[0]}{of_experts}"
    if patch.token_rows:
        yield "rows of tokens"
