"""Read a NeMo-RL recipe: files that inherit from each other, overrides, interpolation, and values still missing.

NeMo-RL does this with Hydra. Hydra itself needs versions of OmegaConf and ANTLR that exclude current ones, so its override
syntax (the part recipes use: change, add, delete) is read here, and the rest is OmegaConf's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toolkit.checks import check_list, check_path
from toolkit.errors import SpecError
from toolkit.recipe_keys import RULES
from toolkit.recipe_values import as_yaml, near

Values = dict[str, Any]  # nested sections of a recipe

_SECTIONS = {".".join(key.split(".")[:depth]) for key in RULES for depth in range(1, key.count(".") + 1)} | {"toolkit"}
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=+~@\s]+)(?:=(?P<value>.*))?", re.DOTALL)
_REFERENCE = re.compile(r"\$\{\s*(?P<dots>\.*)(?P<key>[\w.]+)\s*\}")
_RESOLVERS = {  # those of NeMo-RL
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """What a recipe says once inheritance, overrides and interpolation are done.

    Attributes:
        values: the sections, nested, with every interpolation resolved.
        references: dotted keys that other values are interpolated from.
    """

    values: Values
    references: frozenset[str]


def read_recipe(path: str | Path, overrides: Iterable[str] = ()) -> RecipeFile:
    """Read a recipe, its ancestors and `overrides`.

    `defaults:` names one file or a list of them, relative to the file that names them; later ones win, and the file itself
    wins over all. A section with `_override_: true` replaces the inherited one instead of merging into it, at any depth
    (NeMo-RL looks for the mark at the top level only). A `policy.model_name` that starts with `./` or `../` is relative to
    the file that says it. The override syntax is Hydra's: `a.b=c` changes a key that exists, `+a.b=c` adds one, `++a.b=c`
    does either, `~a.b` deletes one.

    Raises:
        FileNotFoundError: no such file; names the one that asked for it.
        SpecError: no path, not YAML, a section that is none, a circle of `defaults:`, an override of no known form or for a
            key that is not there, an interpolation that leads nowhere, or values that are still `???`; names all of these.
    """
    overrides = check_list("overrides", overrides)
    path = check_path("load_recipe", path)
    values = _inherit(path, ())
    for override in overrides:
        _apply(values, override)
        _check_sections(f"override {override!r}", values)
    missing = [key for key, value in flatten(values) if value == "???" or (isinstance(value, list) and "???" in value)]
    if missing:
        ways = ", ".join(repr(f"{key}=...") for key in missing)
        raise SpecError(
            f"{path.name} leaves {len(missing)} mandatory value(s) open (???): {', '.join(missing)}. "
            f"Give them: tk.load_recipe(..., overrides=[{ways}])."
        )
    return RecipeFile(_resolve(path, values), frozenset(_references(values)))


def flatten(values: Mapping[str, Any], whole: Iterable[str] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested sections; those named in `whole` are not opened, nor are empty ones."""

    def walk(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in section.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and value and key not in whole:
                yield from walk(value, f"{key}.")
            else:
                yield key, value

    yield from walk(values, "")


def _inherit(path: Path, chain: tuple[Path, ...]) -> Values:
    if path in chain:
        circle = " -> ".join(p.name for p in (*chain[chain.index(path) :], path))
        raise SpecError(f"the recipes inherit from each other in a circle: {circle}. Remove one of these `defaults:`.")
    values = _load(path, chain[-1] if chain else None)
    parents = values.pop("defaults", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise SpecError(f"{path.name}: defaults={parents!r} must be a file name or a list of them.")
    merged: Values = {}
    for parent in parents:
        merged = _merge(merged, _inherit((path.parent / parent).resolve(), (*chain, path.resolve())))
    try:
        return _merge(merged, values)
    except (TypeError, OmegaConfBaseException) as error:
        raise SpecError(
            f"{path.name} does not fit what it inherits: {str(error).splitlines()[0]}. Where one has a list and "
            "the other a section, write `_override_: true` into the section."
        ) from None


def _load(path: Path, asked_by: Path | None) -> Values:
    if not path.is_file():
        raise FileNotFoundError(f"{str(path)!r}: no such recipe" + (f" ({asked_by.name} inherits it)." if asked_by else "."))
    try:
        loaded = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise SpecError(f"{path.name} cannot be read as a recipe: {error}") from None
    if not OmegaConf.is_dict(loaded):
        raise SpecError(f"{path.name} holds a list; a recipe is a mapping of sections (policy, grpo, loss_fn, ...).")
    values = cast(Values, OmegaConf.to_container(loaded, resolve=False))
    _check_sections(path.name, values)
    policy = values.get("policy")
    if isinstance(policy, dict) and str(policy.get("model_name")).startswith(("./", "../")):
        policy["model_name"] = str((path.parent / policy["model_name"]).resolve())
    return values


def _check_sections(where: str, values: Values) -> None:
    """Refuse a number, a text or a list where a section of keys belongs."""
    for key, value in flatten(values):
        if key in _SECTIONS - RULES.keys() and value not in (None, {}) and not str(value).startswith("${"):
            known = next((rule for rule in RULES if rule.startswith(f"{key}.")), f"{key}.task")
            raise SpecError(f"{where}: {key}={as_yaml(value)} is no section; {key} holds keys such as {known}.")


def _merge(base: Values, child: Values) -> Values:
    _replace_marked(base, child)
    return cast(Values, OmegaConf.to_container(OmegaConf.merge(base, child), resolve=False))


def _replace_marked(base: Values, child: Values) -> None:
    """Drop from `base` the sections that `child` marks `_override_: true`, and the marks."""
    for name, section in child.items():
        if isinstance(section, dict):
            if section.pop("_override_", False):
                base.pop(name, None)
            inherited = base.get(name)
            _replace_marked(inherited if isinstance(inherited, dict) else {}, section)


def _apply(values: Values, override: str) -> None:
    """Apply one override in place."""
    match = _OVERRIDE.fullmatch(override) if isinstance(override, str) else None
    if match is None or ((match["value"] is None) != (match["sign"] == "~")):
        raise SpecError(
            f"override {override!r} is not understood: 'a.b=value' changes a key, '+a.b=value' adds one, '++a.b=value' does "
            "either, '~a.b' deletes one."
        )
    sign, key = match["sign"], match["key"]
    *sections, name = key.split(".")
    parent: Any = values
    for section in sections:
        if isinstance(parent, dict) and sign in ("+", "++") and parent.get(section) is None:
            parent[section] = {}
        parent = parent.get(section) if isinstance(parent, dict) else None
    exists = isinstance(parent, dict) and name in parent
    if not isinstance(parent, dict) or (not exists and sign in (None, "~")):
        known = [known for known, _ in flatten(values)]
        add = "" if sign == "~" else f" To add it, write '+{override}'."
        raise SpecError(f"override {override!r}: the recipe has no key {key!r}.{near(key, known)}{add}")
    if sign == "~":
        del parent[name]
        return
    value = _parse(override, match["value"])
    if sign == "+" and exists and not isinstance(value, dict):
        raise SpecError(f"override {override!r}: the recipe has that key already; write {override[1:]!r} to change it.")
    both = isinstance(value, dict) and isinstance(parent.get(name), dict)
    parent[name] = _merge(parent[name], value) if both else value


def _parse(override: str, text: str) -> Any:
    """The value of an override: YAML as OmegaConf reads it, with Hydra's empty string."""
    if not text:
        return ""
    try:
        loaded = cast(Values, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False))["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise SpecError(f"override {override!r}: its value is not YAML ({error}).") from None
    if isinstance(loaded, str) and "," in loaded and loaded == text and "${" not in text:
        raise SpecError(f"override {override!r}: a list is written [a,b]; text with a comma is quoted. Sweeps are not run.")
    if isinstance(loaded, dict) and any(value is None and ":" in str(name) for name, value in loaded.items()):
        raise SpecError(f"override {override!r}: write a space after each colon, as in {{a: 1}}.")
    return loaded


def _resolve(path: Path, values: Values) -> Values:
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):  # NeMo-RL in the same process may have registered its own
            OmegaConf.register_resolver(name, function)
    try:
        return cast(Values, OmegaConf.to_container(OmegaConf.create(values), resolve=True))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        flat = dict(flatten(values))
        asked = _references({str(key): flat.get(str(key))})
        nulls = sorted({name for name in (_null(reference, flat) for reference in asked) if name is not None})
        what = f"it is taken from {', '.join(nulls)}, which is null" if nulls else str(error).splitlines()[0]
        raise SpecError(f"{path.name}: the interpolation of {key or 'a value'} leads nowhere: {what}.") from None


def _null(key: str, flat: Mapping[str, Any]) -> str | None:
    """The key, or the section around it, that is null."""
    parts = key.split(".")
    names = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return next((name for name in names if name in flat and flat[name] is None), None)


def _references(values: Values) -> Iterator[str]:
    for key, value in flatten(values):
        for text in value if isinstance(value, list) else [value]:
            for match in _REFERENCE.finditer(text) if isinstance(text, str) else ():
                around = key.split(".")[: -len(match["dots"])] if match["dots"] else []
                yield ".".join([*around, match["key"]])
