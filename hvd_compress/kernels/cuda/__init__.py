"""Encode and decode tables of payloads on a GPU: the loops of `hvd_compress.kernels`, in Triton."""
