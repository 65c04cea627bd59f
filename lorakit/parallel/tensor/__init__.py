"""The axis `tensor`: ranks with other parts of each weight, and of its adapter."""
