"""How ranks communicate: the mesh of groups, collectives, and agreement on Python values."""
