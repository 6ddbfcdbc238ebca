"""Optimizers of PyTorch that average parameters, or update on one rank."""
