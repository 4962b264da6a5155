"""YAML in which ``1e-3`` is a number and a repeated key is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from raypfl.common.errors import ConfigError
from raypfl.common.packaged_yaml import is_file_name


class _WithoutRepeatedKeys:
    """What both loaders have in common."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)  # type: ignore[misc]


class _Loader(_WithoutRepeatedKeys, yaml.SafeLoader):
    """Loader for text by people: its error messages say what was expected where."""


# libyaml, which most installations of PyYAML have, takes a tenth of the time.
class _LoaderInC(_WithoutRepeatedKeys, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader for text by :func:`write`."""


# PyYAML follows YAML 1.1, which takes 1e-3 for text and wants 1.0e-3.
_EXPONENT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
for _loader in (_Loader, _LoaderInC):
    _loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    pass


_LIST = "tag:yaml.org,2002:seq"
_Dumper.add_representer(list, lambda dumper, items: dumper.represent_sequence(_LIST, items, flow_style=True))


def parse(text: str, where: str, is_record: bool = False) -> Any:
    """Parse a YAML text.

    Parameters
    ----------
    where : the name of the text in messages.
    is_record : whether :func:`write` has written it.

    Raises
    ------
    ConfigError : if the text is not valid YAML, or repeats a key.
    """
    try:
        # Both are safe loaders.
        value = yaml.load(text, Loader=_LoaderInC) if is_record else yaml.load(text, Loader=_Loader)
        _refuse_cycles(value)
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{where}{line} is not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is not valid YAML: it is nested too deeply.") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        # PyYAML does not convert these, for 2001-99-99 or !!int x.
        raise ConfigError(f"{where} is not valid YAML: a value is not of the type it looks like ({error}).") from None


def _refuse_cycles(value: Any, containers: tuple[Any, ...] = ()) -> None:
    """Raise a ValueError for a list or mapping that contains itself, as YAML allows: ``&a [*a]``."""
    if not isinstance(value, list | dict):
        return
    if any(value is container for container in containers):
        raise ValueError("a list or mapping contains itself")
    parts = value.values() if isinstance(value, dict) else value
    for part in parts:
        _refuse_cycles(part, (*containers, value))


def read(source: str | Path, is_record: bool = False) -> dict[str, Any]:
    """Read the mapping in a YAML file (a Path, or one line that ends in ``.yaml`` or ``.yml``) or in YAML text.

    `is_record` : as in :func:`parse`.
    """
    is_file = isinstance(source, Path) or ("\n" not in source and is_file_name(source))
    where = str(source) if is_file else "The experiment's text"
    text = _text(Path(source)) if is_file else str(source)

    values = parse(text, where, is_record)
    if values is None and not is_file:
        return {}
    if values is None:
        raise ConfigError(f"{where} is empty; write 'key: value' lines, such as 'method: ditto' and 'rounds: 30'.")
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is a {type(values).__name__}; it must be 'key: value' lines, such as 'rounds: 30'.")
    return values


def write(values: dict[str, Any]) -> str:
    """Return YAML text, one setting per line."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no file {str(path)!r}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}.") from None
