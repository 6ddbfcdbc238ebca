"""Gradients of PyTorch, combined over all ranks: the optimizer, its steps, its buckets in flight."""
