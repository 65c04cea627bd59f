"""Training: the loop, the job it runs, checkpoints, and the end of a run."""
