"""A choice of architectures: the default recipe trains them, and transformers and PEFT compute the same with the patch.

`make zoo` tries all that transformers has, and writes docs/bases.md.
"""

from pathlib import Path
from typing import Any

import pytest

from scripts.zoo.trial import COMPARISONS, try_architecture

CHOSEN = {  # architecture -> a part of what its run says
    "deepseek_v3": "targets",  # dense layers and shared experts with the names of experts
    "falcon": "targets    8 of 9",  # linear layers of a class of its own
    "nemotron_h": "packing    row by row in NemotronHMamba2Mixer",  # tensors with other names in the files, and states
    "phimoe": "a PhimoeTopKRouter",  # a router that is no linear layer, and reads its jitter in evaluation
    "gemma3": "outside of the text model",  # a tower
    "mamba2": "packing    row by row in Mamba2Mixer",
    "rembert": "targets",  # a head that takes another width than the hidden states
    "doge": "packing    rows are kept apart by a mask",  # computes with its mask
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHOSEN)
def test_the_default_recipe_trains_an_architecture_exactly(name: str, tokenizer: Any, tmp_path: Path) -> None:
    outcome = try_architecture(name, tokenizer, tmp_path)
    assert (outcome.state, outcome.why) == ("trained", "")
    assert outcome.differences.keys() == COMPARISONS.keys()
    assert any(CHOSEN[name] in line for line in outcome.lines), outcome.lines
    assert bool(outcome.peft) == (name == "deepseek_v3")
    assert ("But PEFT computes something else" in (tmp_path / "run/README.md").read_text()) == bool(outcome.peft)
