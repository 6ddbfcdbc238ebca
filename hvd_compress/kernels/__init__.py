"""Fused loops over flat arrays: no policy, no names, no ranks.

Every encode kernel takes `x`, the gradient, and `r`, the residual. With error feedback `r` has the size of `x`; the
kernel adds it to `x`, encodes the sum, and leaves in `x` what was not sent: `x` becomes the new residual and `r` is
never written, so that a step can still be taken back. Without error feedback `r` is empty and `x` is only read.
Encode kernels report a value that is not finite instead of encoding it.
"""
