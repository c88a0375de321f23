"""How the work is cut over ranks, one technique a file."""
