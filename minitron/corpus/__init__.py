"""Where tokens come from: a story grammar, any text, pre-tokenised web shards."""
