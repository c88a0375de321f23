"""Before a launch: what the hardware can do, and what a run will cost on it."""
