"""Kinds of GPUs by name: memory and rates, from the vendors' data sheets, in decimal gigabytes and without sparsity.

Sources: NVIDIA's data sheets of the data centre and workstation cards; for GeForce cards the whitepapers of Turing,
Ampere GA102, Ada and RTX Blackwell (FP16 tensor rate with FP32 accumulation, which is twice the FP32 rate); AMD's data
sheets of the Instinct cards. A card that only an optional bridge links to its neighbours counts PCIe.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Final

GB: Final = 1_000_000_000
BRANDS: Final = re.compile("(nvidia|amd|geforce|tesla|quadro|radeon|instinct|rtx)+")
FORMS: Final = r"sxm\d?|hbm\de?|pcie|oam|generation|blackwell|(maxq)?workstationedition|serveredition"
"""words that drivers append and that change neither memory nor rates"""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, with its rates for dense arithmetic."""

    name: str
    memory_bytes: int
    flops: float
    """Operations per second in 16 bits."""
    memory_rate: float
    """Bytes per second of its own memory."""
    link_rate: float
    """Bytes per second to its neighbours in one machine, in one direction."""
    other_names: tuple[str, ...] = ()
    """Other names that drivers and people use."""
    has_bfloat16: bool = True
    """Whether it computes in bfloat16; where not, `base.dtype: auto` is float32."""
    rates_of: str = ""
    """The GPU whose rates are assumed, if its own are unknown."""


def _gpu(
    name: str, gigabytes: float, teraflops: float, memory: float, link: float, *other_names: str, bfloat16: bool = True
) -> Gpu:
    return Gpu(name, round(gigabytes * GB), teraflops * 1e12, memory * GB, link * GB, other_names, bfloat16)


GPUS: Final = (
    #    name              GB    TFLOP/s  GB/s   GB/s to neighbours
    _gpu("GB200",          186,  2500,    8000,  900),
    _gpu("B200",           180,  2250,    8000,  900),
    _gpu("GH200",          96,   990,     4000,  450, "GH200 480GB"),  # the driver's name has the CPU's memory
    _gpu("GH200-144",      144,  990,     4900,  450, "GH200 144G HBM3e"),
    _gpu("H200",           141,  989,     4800,  450),
    _gpu("H200 NVL",       141,  835,     4800,  64),
    _gpu("H100",           80,   989,     3350,  450),
    _gpu("H100 NVL",       94,   835,     3900,  64),
    _gpu("H100 PCIe",      80,   756,     2000,  64),
    _gpu("A100-80",        80,   312,     2039,  300, "A100", "A100-SXM4-80GB", "A100 80GB PCIe"),
    _gpu("A100-40",        40,   312,     1555,  300, "A100-SXM4-40GB", "A100-PCIE-40GB"),
    _gpu("A40",            48,   150,     696,   32),
    _gpu("A30",            24,   165,     933,   32),
    _gpu("A10",            24,   125,     600,   32),
    _gpu("A10G",           24,   70,      600,   32),
    _gpu("L40S",           48,   362,     864,   32),
    _gpu("L40",            48,   181,     864,   32),
    _gpu("L4",             24,   121,     300,   32),
    _gpu("V100-32",        32,   125,     900,   150, "V100-SXM2-32GB", "V100-PCIE-32GB", bfloat16=False),
    _gpu("V100-16",        16,   125,     900,   150, "V100", "V100-SXM2-16GB", "V100-PCIE-16GB", bfloat16=False),
    _gpu("T4",             16,   65,      320,   16, bfloat16=False),
    _gpu("RTX PRO 6000",   96,   503,     1792,  64, "RTX PRO 6000 Blackwell"),
    _gpu("RTX 6000 Ada",   48,   364,     960,   32),
    _gpu("RTX 5000 Ada",   32,   261,     576,   32),
    _gpu("RTX A6000",      48,   155,     768,   32),
    _gpu("RTX A5000",      24,   111,     768,   32),
    _gpu("RTX 5090",       32,   209,     1792,  64),
    _gpu("RTX 5080",       16,   113,     960,   64),
    _gpu("RTX 5070 Ti",    16,   88,      896,   64),
    _gpu("RTX 5070",       12,   62,      672,   64),
    _gpu("RTX 4090",       24,   165,     1008,  32),
    _gpu("RTX 4080 SUPER", 16,   104,     736,   32),
    _gpu("RTX 4080",       16,   97,      717,   32),
    _gpu("RTX 4070 Ti",    12,   80,      504,   32),
    _gpu("RTX 4070",       12,   58,      504,   32),
    _gpu("RTX 4060 Ti-16", 16,   44,      288,   16),
    _gpu("RTX 4060 Ti-8",  8,    44,      288,   16, "RTX 4060 Ti"),
    _gpu("RTX 4060",       8,    30,      272,   16),
    _gpu("RTX 3090 Ti",    24,   80,      1008,  32),
    _gpu("RTX 3090",       24,   71,      936,   32),
    _gpu("RTX 3080 Ti",    12,   68,      912,   32),
    _gpu("RTX 3080",       10,   60,      760,   32),
    _gpu("RTX 3070",       8,    41,      448,   32),
    _gpu("RTX 3060",       12,   25,      360,   32),
    _gpu("RTX 2080 Ti",    11,   54,      616,   16, bfloat16=False),
    _gpu("MI325X",         256,  1307,    6000,  448),
    _gpu("MI300X",         192,  1307,    5300,  448),
    _gpu("MI250X",         64,   191,     1638,  50),  # each of its two dies is a device
    _gpu("MI210",          64,   181,     1638,  32),
)  # fmt: skip
ORDINARY: Final = next(gpu for gpu in GPUS if gpu.name == "RTX 4090")  # rates for a card that is not in the table


def named_gpu(name: str) -> Gpu | None:
    """Return the GPU with a name such as `h200` or `NVIDIA H200`; None for an unknown one.

    Case, spaces and brands do not matter. The rest of the name must match to the end, because a 4090 for laptops is
    another GPU than a 4090; a number of gigabytes in the name must be the GPU's.
    """
    given = _key(name)
    known = [(_key(other), gpu) for gpu in GPUS for other in (gpu.name, *gpu.other_names)]
    matches = [(len(key), gpu) for key, gpu in known if _is_form_of(given, key, gpu)]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def nearest_names(name: str, count: int = 4) -> list[str]:
    """Return the known names that are most like a name."""
    names = {_key(gpu.name): gpu.name for gpu in GPUS}
    return [names[key] for key in difflib.get_close_matches(_key(name), names, n=count, cutoff=0.4)]


def _is_form_of(given: str, key: str, gpu: Gpu) -> bool:
    size = f"{gpu.memory_bytes // GB}gb"
    return re.fullmatch(f"{re.escape(key)}(gb)?({size}|{FORMS})*", given) is not None


def _key(name: str) -> str:
    """Return letters and digits in lower case, without brands at the beginning."""
    text = "".join(letter for letter in name.lower() if letter.isalnum())
    brands = BRANDS.match(text)
    return text[brands.end() :] if brands else text
