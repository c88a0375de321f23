"""Data parallelism: plain, and with the training state divided (ZeRO, FSDP)."""
