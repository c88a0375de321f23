"""Where tokens come from: a story grammar, any text, pre-tokenized web shards."""
