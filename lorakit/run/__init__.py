"""The output folder of a run: lock, record, metrics, display, trackers."""
