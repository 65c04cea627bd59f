"""Every private name of torch's compiler that a run needs still exists in the installed version."""

import torch._dynamo.config

from lorakit.training import _internals


def test_torchs_compiler_has_what_a_run_reads_and_sets() -> None:
    assert torch._dynamo.config.fail_on_recompile_limit_hit in (False, True)
    assert issubclass(_internals.compiler_errors(), Exception)
    assert _internals.num_compiled_graphs() >= 0
