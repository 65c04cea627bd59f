"""List the other programs that read a patch and compute the same with it, and the problems of the rest.

From the programs' own sources. vLLM (lora/peft_helper.py, lora/utils.py, config/lora.py) reads one rank and one alpha
for the full adapter. llama.cpp (convert_lora_to_gguf.py, llama-adapter.h) reads each rank from its tensor and one alpha
from the config, and always divides by the rank.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from lorakit.errors import PatchError
from lorakit.lora.methods import METHODS
from lorakit.lora.targets import layer_index
from lorakit.patch.patch import Patch

VLLM_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class Program:
    """A program that reads patches.

    ``problems``: reasons why the program would compute other outputs with this patch; empty if it would not.
    ``call``: how to use the patch with the program.
    """

    name: str
    problems: tuple[str, ...]
    call: str


def compatible_programs(patch: Patch) -> list[Program]:
    """Return PEFT, vLLM and llama.cpp, each with its problems with this patch."""
    largest = max((layer.rank for layer in patch.layers.values()), default=0)
    # PEFT's patches hold no tokens, so its users add them first
    setup = f"{new_token_calls(patch.new_tokens)}; " if patch.new_tokens else ""
    return [
        Program("PEFT", (), f"{setup}PeftModel.from_pretrained(base, PATCH)"),
        Program("vLLM", tuple(_vllm_problems(patch, largest)), f"--enable-lora --max-lora-rank {vllm_rank(largest)}"),
        Program("llama.cpp", tuple(_llama_cpp_problems(patch)), "convert_lora_to_gguf.py PATCH --base BASE"),
    ]


def new_token_calls(tokens: Mapping[str, int]) -> str:
    """Return the calls of transformers that add the new tokens of a patch (text -> id) to a tokenizer and its base."""
    ordered = sorted(tokens, key=lambda name: tokens[name])
    size = f"max({tokens[ordered[-1]] + 1}, base.config.vocab_size)"  # because a base with spare rows keeps them
    return f"tokenizer.add_tokens({ordered}); base.resize_token_embeddings({size})"


def check_compatible(patches: Mapping[str, Patch], program: str, remedy: str) -> None:
    """Raise PatchError, with the remedy, unless a program would compute the same with all of these patches."""
    problems = [
        f"{name}: {'; '.join(one.problems)}"
        for name, patch in patches.items()
        for one in compatible_programs(patch)
        if one.name == program and one.problems
    ]
    if problems:
        listed = "\n".join(problems)
        raise PatchError(f"{program} would compute other answers with these adapters:\n{listed}\n{remedy}")


def vllm_rank(largest: int) -> int | None:
    """Return the smallest ``--max-lora-rank`` that takes adapters of this rank; None if there is none."""
    return next((rank for rank in VLLM_RANKS if rank >= largest), None)


def _not_of_language_model(patch: Patch) -> Iterator[str]:
    """Yield a problem if no layer has a name that layers of a language model have: numbered blocks, embedding, head."""
    if patch.layers and not any(
        layer_index(name) is not None or layer.embedding or name.endswith("lm_head")
        for name, layer in patch.layers.items()
    ):
        yield f"its layers ({', '.join([*patch.layers][:2])}) are not those of a language model"


def _vllm_problems(patch: Patch, largest: int) -> Iterator[str]:
    config = patch.config
    yield from _not_of_language_model(patch)
    yield from (
        f"adapter_config.json has no {key}" for key in ("r", "lora_alpha", "target_modules") if key not in config.raw
    )
    yield from _beyond_low_rank(patch)
    if largest > VLLM_RANKS[-1]:
        yield f"rank {largest}; the largest it takes is {VLLM_RANKS[-1]}"
    if config.modules_to_save:
        yield "modules_to_save"
    elif foreign := [n for n in patch.full_shapes if not n.endswith(("embed_tokens.weight", "lm_head.weight"))]:
        yield f"whole tensors such as {foreign[0]}"
    elif plain := [n for n in patch.full_shapes if n.rpartition(".")[0] not in patch.layers]:
        yield f"whole tensors such as {plain[0]}"
    if any((layer.rank, layer.alpha) != (config.rank, config.alpha) for layer in patch.layers.values()):
        yield "it knows one rank and alpha, and would scale the layers of rank_pattern or alpha_pattern wrongly"


def _llama_cpp_problems(patch: Patch) -> Iterator[str]:
    if not patch.layers:
        yield "no low-rank update"
    yield from _not_of_language_model(patch)
    yield from _beyond_low_rank(patch)
    if any(layer.scale != patch.config.alpha / layer.rank for layer in patch.layers.values()):
        yield "it always scales by the one lora_alpha over the rank, which is not this patch's scale"
    skipped = {f"{module}.weight" for module in patch.layers}
    if foreign := [name for name in patch.full_shapes if name not in skipped and "norm" not in name]:
        yield f"whole tensors such as {foreign[0]}"


def _beyond_low_rank(patch: Patch) -> Iterator[str]:
    """Yield the parts of a patch that vLLM and llama.cpp both do not read, or read in another layout."""
    if any(not METHODS[layer.method].additive for layer in patch.layers.values()):
        yield "magnitudes of DoRA"
    if stacked := [name for name, layer in patch.layers.items() if layer.num_experts]:
        yield f"experts as PEFT lays them out, such as {stacked[0]}"
    if patch.token_rows:
        yield "rows of tokens"
