"""Import the heavy dependencies, once, without what some of them print while being imported.

torchao reports CUDA libraries that a CPU build cannot load, torch's pytree a deprecation in torchao, Megatron-FSDP that
Transformer Engine is absent: nothing a user could act on. Imported first by a session and by the fork server.
"""

from __future__ import annotations

import logging
import warnings

_level = logging.root.manager.disable
logging.disable(logging.WARNING)
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nemo_automodel as nemo_automodel
        import transformers as transformers
        from nemo_automodel.components.distributed import model_parallelizer as model_parallelizer
finally:
    logging.disable(_level)
