"""Training: the loop, its session and run, checkpoints, and the end of a run."""
