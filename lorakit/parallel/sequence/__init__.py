"""The axis `sequence`: ranks with other tokens of the same rows, by DeepSpeed's Ulysses."""

from lorakit.parallel.sequence.axis import REMEDY, UlyssesExchange, check_sequence_fits, kv_repeats

__all__ = ["REMEDY", "UlyssesExchange", "check_sequence_fits", "kv_repeats"]
