"""What the memory ledger adds to the time of a training step, as a ratio from one run.

    python tests/benchmarks/ledger.py

The ledger costs some 35 to 75 microseconds an operation whatever its size, so the ratio falls as tensors grow. This model
has 84 million parameters and trains on 2048 tokens, the micro-batch of NeMo-RL's smallest recipe. Steps with and without
take turns, and the least CPU time of each is compared, so that other work on the machine disturbs both alike and little.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import toolkit as tk
from toolkit.policy import Policy
from toolkit.spec import GRPOConfig

ROUNDS = 3


def times(policy: Policy) -> tuple[list[float], list[float], int]:
    """CPU seconds of steps without and with the ledger, and the operations' events it logged."""
    from toolkit.memory import made_up, record, train

    config = GRPOConfig()
    training = made_up(policy, config, 4, 512)
    train(policy, config, training, 0)
    without, under, events = [], [], 0
    for _ in range(ROUNDS):
        start = time.process_time()
        train(policy, config, training, 0)
        without.append(time.process_time() - start)
        start = time.process_time()
        events = len(record(policy, config, training, 0).events)
        under.append(time.process_time() - start)
    return without, under, events


def main() -> None:
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 6, "vocab_size": 32768}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(tk.tiny_policy()).save_pretrained(folder)
        with tk.launch(model=folder) as session:
            ((without, under, events),) = session.run(times)
    print(
        f"step {min(without):.2f} CPU s, under the ledger {min(under):.2f} CPU s ({events} events): "
        f"ratio {min(under) / min(without):.3f}, least of {ROUNDS} each"
    )


if __name__ == "__main__":
    main()
