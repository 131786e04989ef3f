"""Where every byte of a training step's peak goes.

`measure` runs one training step (forward, loss, backward, optimizer) of the live policy under the ledger and puts
parameters and optimizer state back, so measuring changes nothing. What counts is tensor storage of the step: parameters,
optimizer state, inputs, and everything the step makes. Not counted: Python, the sampler's KV cache, other sessions.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from toolkit import fsdp
from toolkit.checks import check_whole
from toolkit.collect import grade_together, sample_step
from toolkit.dtensors import local_shard
from toolkit.errors import SpecError
from toolkit.gradients import clip_gradients, set_optimizer
from toolkit.layout import ModelFacts, check_made_up
from toolkit.ledger import Ledger
from toolkit.logprobs import Phase, no_phase
from toolkit.memory_cuda import allocator_beside
from toolkit.memory_report import MemoryReport as MemoryReport
from toolkit.memory_report import report_of
from toolkit.policy import Policy
from toolkit.prompts import Reward, make_batch
from toolkit.spec import GRPOConfig, PolicySpec, dtype_name
from toolkit.step import TrainingBatch, forward_backward, training_batch

_CHECKED = {
    "cpu": "the CPU allocator's own log: within 1 %; where gloo copies what it sends, 2 % on several ranks and 5 % under TP",
    "cuda": "the allocator's own peak, beside it in allocator_peak_bytes",
}


def check_shape(
    spec: PolicySpec, facts: ModelFacts, num_sequences: int | None, sequence_length: int | None
) -> tuple[int, int] | None:
    """The shape that `measure` takes, of what a user gave: both of them, or neither.

    Raises:
        SpecError: half a size, or one that cannot be.
    """
    if (num_sequences is None) != (sequence_length is None):
        raise SpecError(
            f"num_sequences={num_sequences!r}, sequence_length={sequence_length!r}: give both, or neither to measure "
            "the next step's tokens."
        )
    if num_sequences is None or sequence_length is None:
        return None
    shape = check_whole("num_sequences", num_sequences), check_whole("sequence_length", sequence_length, minimum=2)
    check_made_up(spec, sequence_length, facts)
    return shape


def measure(
    policy: Policy,
    config: GRPOConfig,
    problems: list[tuple[str, str]],
    reward: Reward | None,
    *,
    step: int,
    output_dtype: str | None = None,
    shape: tuple[int, int] | None = None,
    snapshot: Path | None = None,
) -> MemoryReport:
    """Measure one training step on this rank (all ranks together).

    Args:
        output_dtype: measure with this one and put the session's back; None takes the session's.
        shape: (sequences on each rank, tokens of each) to measure made-up tokens of that size; None samples a step.
        snapshot: on CUDA, a file for the allocator's own log of the step.
    """
    settings = {} if output_dtype is None else {"output_dtype": dtype_name(output_dtype, "output_dtype")}
    with policy.temporarily(**settings):
        training = made_up(policy, config, *shape) if shape else _sampled(policy, config, problems, reward, step)
        with _put_back(policy):
            train(policy, config, training, step)  # creates optimizer state and FSDP2's lazy parts beforehand
            with allocator_beside(policy.device, snapshot) as allocator:
                ledger = record(policy, config, training, step)
        first = next(training.micro_batches(config.train_micro_batch_size))
        source = policy.device.type
        report = report_of(policy, first, ledger, source=source, checked_against=_CHECKED[source])
        dist.all_gather_object(peaks := [0] * dist.get_world_size(), report.peak_bytes)
        report.per_rank_peak_bytes = peaks
        report.allocator_peak_bytes = allocator.peak_bytes
        return report


def _sampled(
    policy: Policy, config: GRPOConfig, problems: list[tuple[str, str]], reward: Reward | None, step: int
) -> TrainingBatch:
    rollouts = sample_step(policy, config, problems, step)
    return training_batch(policy, config, rollouts, grade_together(policy, rollouts, reward))


def made_up(policy: Policy, config: GRPOConfig, num_sequences: int, sequence_length: int) -> TrainingBatch:
    """Random tokens: their values do not matter to memory. The first token is the prompt."""
    draw = random.Random(0)
    rows = [[draw.randrange(policy.vocab_size) for _ in range(sequence_length)] for _ in range(num_sequences)]
    batch = make_batch(rows, [1] * num_sequences, pad_id=0).to(policy.device)
    total = float(num_sequences * policy.data_size)

    def logprobs_if(wanted: bool) -> torch.Tensor | None:
        return torch.zeros(num_sequences, sequence_length - 1, device=policy.device) if wanted else None

    return TrainingBatch(
        batch,
        advantages_B=torch.ones(num_sequences, device=policy.device),
        previous_BT=logprobs_if(not config.force_on_policy_ratio),
        num_tokens=total * (sequence_length - 1),
        num_sequences=total,
        generation_BT=logprobs_if(config.use_importance_sampling_correction),
        reference_BT=logprobs_if(config.reference_policy_kl_penalty > 0),
    )


def train(policy: Policy, config: GRPOConfig, training: TrainingBatch, step: int, phase: Phase = no_phase) -> None:
    """The update of `step.grpo_step`, phase by phase."""
    set_optimizer(policy, config, step)
    forward_backward(policy, config, training, phase=phase)
    with phase("optimizer"):
        clip_gradients(policy, config.max_grad_norm)
        policy.optimizer.step()
        policy.optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _put_back(policy: Policy) -> Iterator[None]:
    """Restore parameters and optimizer state afterwards, bit for bit; the copies live outside the ledger, on the CPU."""
    params = [(p, local_shard(p.detach()).cpu().clone()) for p in policy.model.parameters()]
    state = {p: {k: local_shard(v).cpu().clone() for k, v in s.items()} for p, s in policy.optimizer.state.items()}
    try:
        yield
    finally:
        policy.optimizer.zero_grad(set_to_none=True)
        fsdp.reshard(policy.model)
        with torch.no_grad():
            for param, value in params:
                local_shard(param.detach()).copy_(value)
            for key, before in state.items():
                for name, value in before.items():
                    local_shard(policy.optimizer.state[key][name]).copy_(value)
        if not state:
            policy.optimizer.state.clear()


def record(policy: Policy, config: GRPOConfig, training: TrainingBatch, step: int, kernels: str | None = None) -> Ledger:
    """Run one training step under a ledger that counts the scratch of these kernels ("cpu", "cuda"; None: the policy's)."""
    vocab_sizes = {policy.vocab_size, policy.vocab_size // policy.tensor_size}
    ledger = Ledger(policy.model, vocab_sizes, kernels or policy.device.type)
    with ledger:
        ledger.label((local_shard(p.detach()) for p in policy.model.parameters()), "parameter")
        ledger.label(policy.model.buffers(), "parameter")
        ledger.label((local_shard(v) for s in policy.optimizer.state.values() for v in s.values()), "optimizer")
        batch = training.batch
        inputs = [batch.ids_BT, batch.mask_BT, batch.positions_BT, batch.token_mask_BT]
        ledger.label([*inputs, training.advantages_B, *training.logprobs], "input")
        ledger.label(policy.reference or [], "parameter")
        train(policy, config, training, step, ledger.phase)
    return ledger
