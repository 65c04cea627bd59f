"""Private names of torch's compiler (read in torch 2.13.0). No other file of this folder uses one.

tests/training/test_internals.py checks that all of them still exist.
"""


def fail_on_recompile_limit() -> None:
    """Make torch's compiler raise an error at its limit of recompilations.

    Without `fail_on_recompile_limit_hit`, such layers would run uncompiled, without a word.
    """
    import torch._dynamo.config

    torch._dynamo.config.fail_on_recompile_limit_hit = True


def compiler_errors() -> type[Exception]:
    """Return the class of torch's compiler errors. Without it, a user would get them as tracebacks."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def num_compiled_graphs() -> int:
    """Return the number of graphs compiled in this process. Without it, run.json cannot state how many there are."""
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
