"""The output folder of a run: lock, signals, record, metrics, display, trackers."""
