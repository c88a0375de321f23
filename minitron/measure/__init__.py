"""The instruments: clock (how fast, and how near the limit?)."""
