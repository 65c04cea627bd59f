"""Programs that make what the project ships: the built-in base, tables and pictures of the documents."""
