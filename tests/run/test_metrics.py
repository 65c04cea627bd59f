"""metrics.jsonl loses no line but a damaged one, whatever happens to the others."""

from pathlib import Path

import pytest

from lorakit.run.metrics import Metrics, read_metrics


def write(path: Path, num_steps: int) -> list[bytes]:
    metrics = Metrics(path, 0)
    for step in range(1, num_steps + 1):
        metrics.write({"step": step, "loss": 1.0 / step})
    metrics.close()
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("damaged", range(4))
@pytest.mark.parametrize("damage", [b"\xff" * 9 + b"\n", b"{}\n", b"\n", b'{"step": "1"}\n', b'{"step": 1'])
def test_a_damaged_line_alone_is_lost(damaged: int, damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = write(path, 4)
    if not damage.endswith(b"\n") and damaged < 3:
        damage += b"\n"
    path.write_bytes(b"".join([*lines[:damaged], damage, *lines[damaged + 1 :]]))
    left = [step for step in (1, 2, 3, 4) if step != damaged + 1]
    assert [line["step"] for line in read_metrics(path)] == left

    before = path.read_bytes()
    again = Metrics(path, 3)  # a resumed run goes on after step 3
    kept = path.with_name("metrics.jsonl.damaged")
    assert kept.exists() == damage.endswith(b"\n")  # a last line that a crash has cut is no damage
    assert not kept.exists() or kept.read_bytes() == before
    again.write({"step": 4, "loss": 0.5})
    again.close()
    assert [line["step"] for line in read_metrics(path)] == [*(step for step in left if step < 4), 4]
