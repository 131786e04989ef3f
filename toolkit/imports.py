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
        # The classes themselves: both packages import lazily, so the names alone would import nothing.
        from nemo_automodel import NeMoAutoModelForCausalLM as NeMoAutoModelForCausalLM
        from nemo_automodel.components.distributed.model_parallelizer import (
            get_model_parallelizer as get_model_parallelizer,
        )
        from transformers import AutoModelForCausalLM as AutoModelForCausalLM
        from transformers import TopKLogitsWarper as TopKLogitsWarper
finally:
    logging.disable(_level)
