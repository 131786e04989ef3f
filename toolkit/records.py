"""Records: the face all reports share (a line of text, an HTML table with units, a frame, a figure, JSON), and steps."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_UNITS = {"bytes": "B", "seconds": "s", "nats": "nats"}


class Report:
    """Base of the records a session returns; each is a dataclass.

    Subclasses give `summary` and `to_frame`, and say in `headline` what was found, in words.
    """

    @property
    def summary(self) -> dict[str, Any]:
        """The scalar results by name."""
        raise NotImplementedError

    @property
    def headline(self) -> str:
        """The finding in one sentence."""
        raise NotImplementedError

    def to_frame(self) -> pd.DataFrame:
        """The detailed results, a row each."""
        raise NotImplementedError

    def figure(self) -> go.Figure:
        """The results as a plotly figure."""
        raise NotImplementedError

    def to_json(self) -> str:
        """The whole record as JSON; NaN and infinities as null, as JSON has none."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return json.dumps(_plain({"type": type(self).__name__, "summary": self.summary, **fields}))

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.headline}"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td><td>{html.escape(format_value(name, value))}</td></tr>"
            for name, value in self.summary.items()
        )
        return f"<div><b>{html.escape(self.headline)}</b><table>{rows}</table></div>"


@dataclass(repr=False, eq=False)
class StepRecord(Report):
    """What one GRPO step did. Metric names are NeMo-RL's.

    Attributes:
        step: counted from 1.
        output_dtype: the FSDP output dtype it ran with.
        metrics: reward (mean), loss, grad_norm (before clipping), lr, the mismatch between the sampler's logprobs and the
            trainer's, probability ratios, token counts.
        seconds: wall time per phase on rank 0.
        examples: prompt, completion, answer and reward of the first completions of rank 0.
    """

    step: int
    output_dtype: str
    metrics: dict[str, float]
    seconds: dict[str, float]
    examples: list[tuple[str, str, str, float]] = field(default_factory=list)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> StepRecord:
        """The record that `to_json` wrote, parsed; a null metric is NaN again."""
        metrics = {name: math.nan if value is None else value for name, value in record["metrics"].items()}
        examples = [tuple(example) for example in record["examples"]]
        return cls(record["step"], record["output_dtype"], metrics, record["seconds"], examples)

    @property
    def summary(self) -> dict[str, Any]:
        total = sum(self.seconds.values())
        return {"step": self.step, "output_dtype": self.output_dtype, **self.metrics, "seconds": total}

    @property
    def headline(self) -> str:
        m = self.metrics
        step = f"step {self.step} ({self.output_dtype} outputs): reward {m['reward']:.3f}"
        if not m["global_valid_toks"]:
            return f"{step}, but every completion was filtered out: no token counted; only weight decay moves the weights"
        loss = f"loss {m['loss']:z.4f}, grad norm {m['grad_norm']:.3f}"
        return f"{step}, {loss}, sampler/trainer mismatch {m['token_mult_prob_error']:.4f}"

    def to_frame(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame([self.summary])

    def figure(self) -> go.Figure:
        return StepRecords([self]).figure()


class StepRecords(list[StepRecord]):
    """Records of consecutive steps; a list that shows itself as a table."""

    @property
    def summary(self) -> dict[str, Any]:
        """Mean reward at the start and at the end."""
        if not self:
            return {"steps": 0}
        few = min(5, len(self))
        start, end = (sum(r.metrics["reward"] for r in part) / few for part in (self[:few], self[-few:]))
        return {"steps": len(self), "reward_first_steps": start, "reward_last_steps": end}

    @property
    def headline(self) -> str:
        """The finding in one sentence."""
        if not self:
            return "no steps"
        few, summary = min(5, len(self)), self.summary
        return (
            f"steps {self[0].step} to {self[-1].step}, mean reward {summary['reward_first_steps']:.3f} in the first {few}, "
            f"{summary['reward_last_steps']:.3f} in the last {few}"
        )

    def to_json(self) -> str:
        """The records as one JSON list."""
        return json.dumps([json.loads(record.to_json()) for record in self])

    def to_frame(self) -> pd.DataFrame:
        """A row per step."""
        import pandas as pd

        return pd.DataFrame([record.summary for record in self])

    def figure(self) -> go.Figure:
        """Reward, loss and mismatch by step."""
        from toolkit.figures import steps_figure

        return steps_figure(self.to_frame())

    def __repr__(self) -> str:
        return f"StepRecords: {self.headline}"

    def _repr_html_(self) -> str:
        columns = ["step", "output_dtype", "reward", "loss", "grad_norm", "token_mult_prob_error", "seconds"]
        if not self:
            return repr(self)
        table = self.to_frame()[columns].to_html(index=False, float_format="{:.4g}".format, border=0, max_rows=8)
        return f"<div><b>{html.escape(self.headline)}</b>{table}</div>"


@dataclass(repr=False, eq=False)
class EvaluationRecord(Report):
    """Greedy completions of held-out problems, graded.

    Attributes:
        rewards: one per problem.
        completions: a row per problem: prompt, completion, answer, reward.
        output_dtype: the FSDP output dtype they were made with.
    """

    rewards: list[float]
    completions: list[dict[str, Any]]
    output_dtype: str

    @property
    def num_problems(self) -> int:
        """How many were graded."""
        return len(self.rewards)

    @property
    def mean_reward(self) -> float:
        """Over all problems."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def accuracy(self) -> float:
        """The share of problems solved.

        Raises:
            ValueError: the rewards are not all 0 or 1, so nothing says which count as solved.
        """
        if not set(self.rewards) <= {0.0, 1.0}:
            raise ValueError("these rewards are not all 0 or 1, so there is no accuracy; see mean_reward.")
        return self.mean_reward

    @property
    def summary(self) -> dict[str, Any]:
        name = "accuracy" if set(self.rewards) <= {0.0, 1.0} else "mean_reward"
        return {name: self.mean_reward, "num_problems": len(self.rewards), "output_dtype": self.output_dtype}

    @property
    def headline(self) -> str:
        name = "accuracy" if "accuracy" in self.summary else "mean reward"
        return f"greedy {name} {self.mean_reward:.3f} on {len(self.rewards)} held-out problems ({self.output_dtype} outputs)"

    def to_frame(self) -> pd.DataFrame:
        """A row per problem."""
        import pandas as pd

        return pd.DataFrame(self.completions)

    def figure(self) -> go.Figure:
        """How many problems got which reward."""
        from toolkit.figures import rewards_figure

        return rewards_figure(self)


def format_value(name: str, value: Any) -> str:
    """A value as text with the unit its name carries; sizes in KiB, MiB or GiB."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("bytes"):
        return format_bytes(value)
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    return f"{text} {unit}".rstrip()


def model_name(model: str) -> str:
    """A hub id as it is, a folder's own name without the path to it."""
    return Path(model).name if Path(model).expanduser().is_absolute() else model


def format_bytes(value: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1, e.g. `86.5 GiB`."""
    size, sign = abs(value), "-" if value < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{sign}{size:.0f} {unit}" if unit == "B" else f"{sign}{size:.2f} {unit}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Report):
        return json.loads(value.to_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    import pandas as pd

    return _plain(value.to_dict("list")) if isinstance(value, pd.DataFrame) else str(value)
