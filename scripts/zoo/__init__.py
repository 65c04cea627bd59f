"""Try the default recipe on a shrunk model of every causal language model that transformers has."""
