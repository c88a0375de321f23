"""What PyTorch keeps private or does not name."""
