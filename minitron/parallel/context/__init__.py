"""Context parallelism: the sequence divided over ranks, inside attention too."""
