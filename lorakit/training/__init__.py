"""A run: the loop, the job it runs, its checkpoints, and what it leaves."""
