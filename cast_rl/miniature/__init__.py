"""A world small enough for two CPU cores, in the production classes: scenes, an exact oracle, a tiny generator."""
