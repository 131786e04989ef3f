"""NeMo-RL recipes in and out: a YAML becomes a spec, a config, a number of ranks and an account of its every key; and back.

A recipe means here what it means in NeMo-RL, whose defaults are taken for the keys it leaves out. What the toolkit has and
NeMo-RL has no key for is in a section `toolkit:` under the field's name; NeMo-RL reads over it.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checks import check_file, check_whole
from toolkit.errors import SpecError
from toolkit.recipe_keys import WHOLE
from toolkit.recipe_mapping import GRPO_FIELDS, SPEC_FIELDS, RecipeKey, map_keys, written_keys
from toolkit.records import Report, model_name
from toolkit.spec import GRPOConfig, PolicySpec

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(repr=False, eq=False)
class Recipe(Report):
    """A recipe, understood. `tk.launch(recipe)` runs it.

    Attributes:
        name: the file's.
        spec: the policy's settings.
        config: the GRPO settings; its task is None where the recipe names a dataset of NeMo-RL's.
        ranks: `cluster.gpus_per_node`.
        keys: every key of the recipe, and those of NeMo-RL's defaults that differ from the toolkit's.
    """

    name: str
    spec: PolicySpec
    config: GRPOConfig
    ranks: int
    keys: list[RecipeKey] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any]:
        """The model, ranks and dtypes, and how many keys met which fate."""
        counts = {status: sum(row.status == status for row in self.keys) for status in ("mapped", "used", "ignored")}
        spec = self.spec
        return {
            "model": spec.model,
            "ranks": self.ranks,
            "output_dtype": spec.output_dtype,
            "precision": spec.precision,
            **counts,
        }

    @property
    def headline(self) -> str:
        s = self.summary
        return (
            f"{self.name}: {model_name(s['model'])} on {s['ranks']} rank{'s' if s['ranks'] > 1 else ''}, "
            f"{s['precision']} compute, {s['output_dtype']} outputs; of {len(self.keys)} keys "
            f"{s['mapped']} are mapped, {s['used']} used, {s['ignored']} ignored"
        )

    def to_frame(self) -> pd.DataFrame:
        """A row per key: key, value, status, maps_to, why."""
        import pandas as pd

        columns = [f.name for f in dataclasses.fields(RecipeKey)]
        return pd.DataFrame([[getattr(row, name) for name in columns] for row in self.keys], columns=columns)

    def figure(self) -> go.Figure:
        """The keys as a table."""
        from toolkit.figures import table_figure

        s = self.summary
        found = f"{s['mapped']} keys of {self.name} are mapped, {s['used']} used, {s['ignored']} ignored"
        return table_figure(self.to_frame(), found)

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The recipe as YAML that `load_recipe` reads back to the same spec, config and ranks; written to `path` if given.

        To run it in NeMo-RL, let it inherit from one of NeMo-RL's own: `defaults: grpo_math_1B.yaml`.
        """
        from omegaconf import OmegaConf

        text = OmegaConf.to_yaml(OmegaConf.create(_nested(written_keys(self.spec, self.config, self.ranks))))
        if path is not None:
            check_file("to_yaml", path).write_text(text)
        return text

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        taken, ignored = (
            frame[rows].to_html(index=False, border=0) for rows in (frame.status != "ignored", frame.status == "ignored")
        )
        return (
            f"<div><b>{html.escape(self.headline)}</b>{taken}"
            f"<details><summary>ignored keys, and why</summary>{ignored}</details></div>"
        )


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a NeMo-RL GRPO recipe.

    Args:
        path: its YAML; see `recipe_files.read_recipe` for inheritance, interpolation and relative models.
        overrides: Hydra's: "a.b=c" changes a key, "+a.b=c" adds one, "++a.b=c" does either, "~a.b" deletes one.

    Returns:
        A record with `.spec`, `.config`, `.ranks`, and `.to_frame()`: what became of every key. Give it to `tk.launch`.

    Raises:
        FileNotFoundError: no such recipe, or none that it inherits.
        SpecError: what cannot be read (see `read_recipe`), and everything the toolkit would do differently or not at all:
            Megatron, several nodes, output dtypes under DTensor v1, options it does not have that are switched on, unknown
            and contradictory keys. All are named at once, each with its way out.
    """
    from toolkit.recipe_files import flatten, read_recipe  # OmegaConf takes 0.2 s to import, and launch imports this module

    found = read_recipe(path, overrides)
    return _understood(Path(path).name, dict(flatten(found.values, WHOLE)), found.references)


def to_recipe(spec: PolicySpec, config: GRPOConfig | None = None, ranks: int = 1, name: str = "recipe") -> Recipe:
    """The recipe of a spec, a config and a number of ranks; `to_yaml` writes it.

    A task of your own has no place in a file: the recipe then names it under `data`, and it is given again at launch.
    """
    config = GRPOConfig() if config is None else config
    recipe = _understood(name, written_keys(spec, config, ranks), frozenset())
    return recipe if isinstance(config.task, str) else dataclasses.replace(recipe, config=config)


def launch_parts(
    recipe: Recipe, config: GRPOConfig | None, ranks: int | None, fields: Mapping[str, Any]
) -> tuple[PolicySpec, GRPOConfig, int]:
    """What `launch(recipe, ...)` starts from: the recipe's parts, or those given instead.

    Raises:
        SpecError: the recipe's dataset is not read here, and no task was given.
    """
    config = recipe.config if config is None else config
    if config.task is None and "task" not in fields:
        raise SpecError(
            f"{recipe.name} trains on a dataset that only NeMo-RL reads (section data). Give the problems: "
            "tk.launch(recipe, task=[(prompt, answer), ...]) or task='arithmetic'; or set toolkit.task in the recipe."
        )
    return recipe.spec, config, recipe.ranks if ranks is None else ranks


def _understood(name: str, keys: Mapping[str, Any], references: frozenset[str]) -> Recipe:
    """The recipe of flat keys; raises with all that stands against it."""
    found = map_keys(keys, references)
    problems, fields = found.problems, found.fields

    def made(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return make(*args, **kwargs)
        except SpecError as error:
            renamed = [f"{field} is {key}" for field, key in found.sources.items() if f"{field}=" in str(error)]
            problems.append(str(error) + (f" ({', '.join(renamed)} here.)" if renamed else ""))

    ranks = made(check_whole, "cluster.gpus_per_node", fields.get("ranks", 1))
    config = made(GRPOConfig, **{field: fields[field] for field in GRPO_FIELDS if field in fields})
    spec = None
    if "model" in fields:
        spec = made(PolicySpec, **{field: fields[field] for field in SPEC_FIELDS if field in fields})
    if problems or spec is None:
        listed = "".join(f"\n  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise SpecError(f"{name} is refused:{listed}")
    return Recipe(name, spec, config, ranks, found.rows)


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        section = nested
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return nested
