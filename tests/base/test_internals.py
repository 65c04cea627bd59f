"""The private names of torch and transformers that base/ reads still exist and mean the same."""

import pytest
import torch
from transformers import AutoTokenizer
from transformers.integrations import deepspeed

from lorakit.base._internals import was_written, without_zero3
from lorakit.base.find import find_base
from lorakit.base.transformers_io import load_tokenizer


def test_torch_still_counts_writes_in_place_on_the_meta_device_too() -> None:
    for device in ("cpu", "meta"):
        tensor = torch.empty(4, device=device)
        assert not was_written(tensor)
        assert not was_written(tensor.clone())
        tensor[0] = 1
        assert was_written(tensor), device


def test_a_tokenizer_does_not_warn_of_texts_that_lorakit_checks(caplog: pytest.LogCaptureFixture) -> None:
    folder = find_base("builtin:tiny")
    text = "word " * 3000
    loud = AutoTokenizer.from_pretrained(folder)
    assert load_tokenizer(folder)(text)["input_ids"] == loud(text)["input_ids"]
    assert caplog.text.count("Token indices sequence length") == 1  # the loud one's


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
