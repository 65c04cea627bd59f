"""The axis `pipeline`: ranks with other layers, which send hidden states forward and their gradients back."""
