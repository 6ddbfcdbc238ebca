"""What the edges of PyTorch share, with Horovod and without: torch and the core, nothing else."""
