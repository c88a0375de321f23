"""The instruments: clock (how fast, and how near the limit?), meter (which bytes are held?)."""
