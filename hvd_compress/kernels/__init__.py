"""Fused loops over flat arrays: no policy, no names, no ranks.

Every encode kernel takes `x` and `gradient`. With error feedback `x` is the residual: the kernel adds the gradient to
it, encodes the sum, and leaves in `x` what was not sent, which is the new residual; the gradient is only read, so that
the step can be taken back. Without error feedback `gradient` is empty, and `x` is what is encoded, and only read.
Encode kernels report a value that is not finite instead of encoding it.
"""
