"""What Keras 2 and Keras 3 share, on either backend: wrapped optimizers, callbacks, loading of models.

Nothing here imports Keras, a framework or Horovod: optimizers and models come from the user, and a `Edge` carries what
has to cross ranks.
"""

from __future__ import annotations
