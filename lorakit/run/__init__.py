"""The parts of a training run around the arithmetic: lock, signals, checkpoints, record, metrics, display."""
