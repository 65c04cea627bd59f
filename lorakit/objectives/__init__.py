"""What a run minimises: the loss of a micro-batch, as the engines call it."""
