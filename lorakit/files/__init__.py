"""Files that are complete or absent, safetensors read by ranges, and the files of a base."""
