"""A prompt once for all its completions: rows [prompt, completion, completion, ...]; each sees the prompt and itself.

GRPO trains on several completions of every prompt. In rows of their own the prompt is computed once for each; here once for
as many as fit. A completion's positions go on after the prompt, and the mask hides the others from it, so each token is
computed from exactly what it sees in a row of its own.

Shapes: _B sequences, _T tokens of each, _R rows, _M completions of a row, _N tokens of a completion, _K = M*N predictions,
_L = W + M*N tokens of a row (W of the prompt).
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass

import torch

from toolkit.prompts import Batch

#: Tokens of a row at most: attention costs the square of it, and the mask holds that.
LONGEST_ROW = 1024


@dataclass(slots=True)
class SharedRows:
    """A batch laid out so that neighbouring sequences with one prompt share it."""

    ids_RL: torch.Tensor  # int64
    mask_R1LL: torch.Tensor  # bool, [row, head, query, key]: whether a token sees another
    positions_RL: torch.Tensor  # int64
    columns_K: torch.Tensor  # int64, the column whose output predicts each completion token
    targets_RK: torch.Tensor  # int64, the completion tokens
    counted_RK: torch.Tensor  # float32, 1 at those that count
    places_B: torch.Tensor  # int64, where a sequence's completion is: row * M + place in the row
    prompt_width: int  # W
    completion_width: int  # N
    unused_width: int  # columns after the longest completion

    def spread(self, logprobs_RK: torch.Tensor) -> torch.Tensor:
        """Logprobs of the completion tokens, back at their places [B, T-1] of the batch; 0 at prompt tokens."""
        logprobs_BN = logprobs_RK.reshape(-1, self.completion_width)[self.places_B]
        return torch.nn.functional.pad(logprobs_BN, (self.prompt_width - 1, self.unused_width))


def share_prompts(batch: Batch, longest_row: int = LONGEST_ROW) -> SharedRows:
    """Lay a batch out with shared prompts.

    Sequences share a row where they are neighbours and alike up to the first column in which any of them counts.
    """
    device, width = batch.ids_BT.device, batch.ids_BT.shape[1]
    prompt = max(1, int((batch.token_mask_BT.sum(0) > 0).int().argmax()))
    used = max(prompt + 1, int((batch.mask_BT.sum(0) > 0).nonzero().max()) + 1)
    new = used - prompt
    rows, places = _seats(_runs(batch, prompt), most=max(1, (longest_row - prompt) // new))
    per_row = max(places) + 1
    first_R = torch.tensor([b for b, place in enumerate(places) if place == 0], device=device)
    places_B = torch.tensor([row * per_row + place for row, place in zip(rows, places, strict=True)], device=device)

    def completions(values_BT: torch.Tensor) -> torch.Tensor:
        """[B, T] to [R, M*N], 0 where a row has fewer completions than M."""
        laid = values_BT.new_zeros(len(first_R) * per_row, new)
        laid[places_B] = values_BT[:, prompt:used]
        return laid.view(len(first_R), per_row * new)

    def joined(values_BT: torch.Tensor) -> torch.Tensor:
        return torch.cat([values_BT[first_R, :prompt], completions(values_BT)], dim=1)

    before_K = torch.arange(prompt - 1, prompt - 1 + per_row * new, device=device)
    before_K[::new] = prompt - 1  # a completion's first token follows the prompt, not the completion before
    return SharedRows(
        ids_RL=joined(batch.ids_BT),
        mask_R1LL=_visible(joined(batch.mask_BT) > 0, prompt, new),
        positions_RL=joined(batch.positions_BT),
        columns_K=before_K,
        targets_RK=completions(batch.ids_BT),
        counted_RK=completions(batch.token_mask_BT),
        places_B=places_B,
        prompt_width=prompt,
        completion_width=new,
        unused_width=width - used,
    )


def _runs(batch: Batch, prompt: int) -> list[int]:
    """Numbers of neighbouring sequences that have one prompt."""
    ids, mask = batch.ids_BT[:, :prompt], batch.mask_BT[:, :prompt]
    same = ((ids[1:] == ids[:-1]) & (mask[1:] == mask[:-1])).all(-1).tolist()
    starts = [0, *(b + 1 for b, alike in enumerate(same) if not alike), batch.num_sequences]
    return [stop - start for start, stop in itertools.pairwise(starts)]


def _seats(runs: list[int], most: int) -> tuple[list[int], list[int]]:
    """Row and place of each sequence; rows hold at most `most`, and no more than the usual run has."""
    usual = min(most, statistics.mode(runs))
    rows, places, row = [], [], 0
    for run in runs:
        pieces = math.ceil(run / usual)
        for index in range(run):
            rows.append(row + index % pieces)
            places.append(index // pieces)
        row += pieces
    return rows, places


def _visible(real_RL: torch.Tensor, prompt: int, new: int) -> torch.Tensor:
    """[R, 1, L, L] bool: tokens see those before them in the prompt and in their own completion, and always themselves."""
    column_L = torch.arange(real_RL.shape[1], device=real_RL.device)
    owner_L = torch.where(column_L < prompt, -1, (column_L - prompt) // new)
    earlier_LL = column_L[None, :] <= column_L[:, None]
    mine_LL = (owner_L[None, :] == -1) | (owner_L[None, :] == owner_L[:, None])
    itself_LL = column_L[None, :] == column_L[:, None]
    return ((earlier_LL & mine_LL) & real_RL[:, None, None, :]) | itself_LL
