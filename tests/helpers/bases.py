"""Small random bases, as folders, and the tensors in a folder."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)


def make_base(folder: Path, tokenizer: Any, *, seed: int = 0, **settings: Any) -> Path:
    """Write a random Llama with the built-in tokenizer; ``settings`` are keys of its config."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": len(tokenizer), "max_position_embeddings": 256, "initializer_range": 0.1,
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id, **settings,
        }
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_embedding_base(folder: Path, tokenizer: Any, mode: str = "lasttoken", *, normalize: bool = True) -> Path:
    """Write a random Llama that is laid out for sentence-transformers, as Qwen3-Embedding is."""
    make_base(folder, tokenizer)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", **({"Normalize": "2_Normalize"} if normalize else {})}
    modules = [{"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for index, (kind, path) in enumerate(kinds.items())]  # fmt: skip
    flags = {f"pooling_mode_{one}": one == f"{mode}{'_tokens' * (mode == 'mean')}" for one in
             ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")}  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, **flags, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer as BERT's: word pieces between [CLS] and [SEP], without an end token."""
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    letters = "abcdefghijklmnopqrstuvwxyz0123456789?."
    words = [*special.values(), *letters, *(f"##{letter}" for letter in letters)]
    words += ["who", "sold", "somebody", "had", "and", "them", "bought", "lamps", "melons", "boats", "books", "shoes"]
    tokenizer = Tokenizer(WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    ends = [("[CLS]", words.index("[CLS]")), ("[SEP]", words.index("[SEP]"))]
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **special)


def make_encoder(folder: Path, kind: str = "bert", *, with_head: bool = False) -> Path:
    """Write a random encoder of a model type; with_head: with the head that predicts masked tokens."""
    tokenizer = encoder_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    own: dict[str, Any] = {
        "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
        "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    }.get(kind, {})
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    ends = dict.fromkeys(("bos_token_id", "cls_token_id"), 2) | dict.fromkeys(("eos_token_id", "sep_token_id"), 3)
    settings = {"max_position_embeddings": 64, "initializer_range": 0.2, **tokens, **ends, **own}
    config = AutoConfig.for_model(kind, **(settings if "dim" in own else sizes | settings))
    torch.manual_seed(0)
    factory = AutoModelForMaskedLM if with_head else AutoModel
    factory.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
