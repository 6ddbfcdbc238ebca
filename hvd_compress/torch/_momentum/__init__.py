"""Optimizers that exchange momentum: each rank makes its own, and ranks average that compressed."""
