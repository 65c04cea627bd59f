"""A line of packed rows, and small models of the kinds of attention that meet it."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.models import ARCHITECTURES, SMALL, build

LENGTHS = (7, 1, 12, 3)
MORE: dict[str, dict[str, Any]] = {
    "gemma2": SMALL | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "attn_logit_softcapping": 5.0},
    "gpt_oss": SMALL | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "llama4_text": SMALL | {"head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48, "pad_token_id": None},
}  # fmt: skip


def model_of(architecture: str) -> Any:
    if architecture in ARCHITECTURES:
        return build(architecture)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **MORE[architecture])).eval()


def packed_line() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
