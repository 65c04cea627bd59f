"""Read and write adapters of other programs: the same update exactly, or an error that names the obstacle."""
