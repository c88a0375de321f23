"""Weights that others have trained, and for others to use: the format of Hugging Face."""
