"""The programs that made the built-in base: its corpus, its tokenizer, its training, and its small tasks."""
