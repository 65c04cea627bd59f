"""The private names of torch and transformers that base/ reads still exist and mean the same."""

import torch
from transformers.integrations import deepspeed

from lorakit.base._internals import was_written, without_zero3


def test_torch_still_counts_writes_in_place_on_the_meta_device_too() -> None:
    for device in ("cpu", "meta"):
        tensor = torch.empty(4, device=device)
        assert not was_written(tensor)
        assert not was_written(tensor.clone())
        tensor[0] = 1
        assert was_written(tensor), device


def test_transformers_still_keeps_its_deepspeed_config_where_it_was() -> None:
    class Config:
        def is_zero3(self) -> bool:
            return True

    config = Config()
    deepspeed.set_hf_deepspeed_config(config)
    try:
        assert deepspeed.is_deepspeed_zero3_enabled()
        with without_zero3():
            assert not deepspeed.is_deepspeed_zero3_enabled()
        assert deepspeed._hf_deepspeed_config_weak_ref() is config
        assert deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()
