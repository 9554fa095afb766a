"""Other people's systems at the same work: programs that import nothing of meshforge, started by the benches."""
