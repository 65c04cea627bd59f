"""Kinds of GPUs by name, with their memory from the vendors' data sheets, in decimal gigabytes."""

import difflib
import re
from dataclasses import dataclass
from typing import Final

GB: Final = 1_000_000_000
BRANDS: Final = re.compile("(nvidia|amd|geforce|tesla|quadro|radeon|instinct|rtx)+")
FORMS: Final = r"sxm\d?|hbm\de?|pcie|oam|generation|blackwell|(maxq)?workstationedition|serveredition"
"""words that drivers append and that do not change the memory"""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_bytes: int
    has_bfloat16: bool = True
    """Whether it computes in bfloat16; where not, `base.dtype: auto` is float32."""


NAMES_BY_GIGABYTES: Final = {
    256: ["MI325X"],
    192: ["MI300X"],
    186: ["GB200"],
    180: ["B200"],
    144: ["GH200-144"],
    141: ["H200", "H200 NVL"],
    96: ["GH200", "RTX PRO 6000"],
    94: ["H100 NVL"],
    80: ["H100", "H100 PCIe", "A100-80"],
    64: ["MI250X", "MI210"],  # each of the two dies of an MI250X is a device
    48: ["A40", "L40S", "L40", "RTX 6000 Ada", "RTX A6000"],
    40: ["A100-40"],
    32: ["V100-32", "RTX 5000 Ada", "RTX 5090"],
    24: ["A30", "A10", "A10G", "L4", "RTX A5000", "RTX 4090", "RTX 3090 Ti", "RTX 3090"],
    16: ["V100-16", "T4", "RTX 5080", "RTX 5070 Ti", "RTX 4080 SUPER", "RTX 4080", "RTX 4060 Ti-16"],
    12: ["RTX 5070", "RTX 4070 Ti", "RTX 4070", "RTX 3080 Ti", "RTX 3060"],
    11: ["RTX 2080 Ti"],
    10: ["RTX 3080"],
    8: ["RTX 4060 Ti-8", "RTX 4060", "RTX 3070"],
}  # fmt: skip
WITHOUT_BFLOAT16: Final = ("V100-32", "V100-16", "T4", "RTX 2080 Ti")
GPUS: Final = {
    name: Gpu(name, gigabytes * GB, name not in WITHOUT_BFLOAT16)
    for gigabytes, names in NAMES_BY_GIGABYTES.items()
    for name in names
}
OTHER_NAMES: Final = {
    "GH200 480GB": "GH200",  # the driver's name has the CPU's memory
    "GH200 144G HBM3e": "GH200-144",
    "A100": "A100-80", "A100-SXM4-80GB": "A100-80", "A100 80GB PCIe": "A100-80",
    "A100-SXM4-40GB": "A100-40", "A100-PCIE-40GB": "A100-40",
    "V100-SXM2-32GB": "V100-32", "V100-PCIE-32GB": "V100-32",
    "V100": "V100-16", "V100-SXM2-16GB": "V100-16", "V100-PCIE-16GB": "V100-16",
    "RTX PRO 6000 Blackwell": "RTX PRO 6000",
    "RTX 4060 Ti": "RTX 4060 Ti-8",
}  # fmt: skip
"""name that drivers or people use -> name in GPUS"""


def named_gpu(name: str) -> Gpu | None:
    """Return the GPU with a name such as `h200` or `NVIDIA H200`; None for an unknown one.

    Case, spaces and brands do not matter. The rest of the name must match to the end, because a 4090 for laptops is
    another GPU than a 4090; a number of gigabytes in the name must be the GPU's.
    """
    given = _key(name)
    known = [(_key(other), GPUS[target]) for other, target in {**{name: name for name in GPUS}, **OTHER_NAMES}.items()]
    matches = [(len(key), gpu) for key, gpu in known if _is_form_of(given, key, gpu)]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def nearest_names(name: str, count: int = 4) -> list[str]:
    """Return the known names that are most like a name."""
    names = {_key(known): known for known in GPUS}
    return [names[key] for key in difflib.get_close_matches(_key(name), names, n=count, cutoff=0.4)]


def _is_form_of(given: str, key: str, gpu: Gpu) -> bool:
    size = f"{gpu.memory_bytes // GB}gb"
    return re.fullmatch(f"{re.escape(key)}(gb)?({size}|{FORMS})*", given) is not None


def _key(name: str) -> str:
    """Return letters and digits in lower case, without brands at the beginning."""
    text = "".join(letter for letter in name.lower() if letter.isalnum())
    brands = BRANDS.match(text)
    return text[brands.end() :] if brands else text
