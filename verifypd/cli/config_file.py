"""`--config FILE`: settings from a YAML file, by the names of the flags. What the command line says goes before it."""

from __future__ import annotations

import argparse
import re
import types
import typing
from pathlib import Path
from typing import Any

import yaml

from verifypd.cli.flags import Parser
from verifypd.errors import ConfigError
from verifypd.hints import advice

KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "null",
}


TAG = "tag:yaml.org,2002:"
MERGE = TAG + "merge"
# What YAML 1.2 takes for more than text, by the characters it may begin with; PyYAML knows 1.1.
SCALARS = (
    ("bool", "tf", r"true|false"),
    ("int", "-+0123456789", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    ("float", "-+.0123456789", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"),
)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads as YAML 1.2 does: `off` and `no` are words, 1e3 is a number, 010 is ten; a name stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; one that has a name twice is refused. What `<<` merges into it may have its names too."""
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode) and name.tag != MERGE]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"line {node.start_mark.line + 1}: {twice} is there twice: remove one")
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        """A whole number: one that begins with 0 is no octal."""
        base = {"0o": 8, "0x": 16}.get(node.value[:2], 10)
        return int(node.value, base)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in (MERGE, TAG + "null")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, _firsts, _pattern in SCALARS:
    _Loader.add_implicit_resolver(TAG + _name, re.compile(rf"(?:{_pattern})\Z"), list(_firsts))
_Loader.add_constructor(TAG + "int", _Loader.construct_whole)


def apply(args: argparse.Namespace, parser: Parser) -> None:
    """Add what the file of `--config` says to what the command line says."""
    path = Path(args.config)
    for name, value in read(path).items():
        setting = parser.settings.get(name) if isinstance(name, str) else None
        if setting is None:
            raise ConfigError(f"{path}: unknown setting {name!r}{advice(str(name), parser.settings)}")
        if not fits(value, setting.hint):
            shown = "something else" if name.endswith("key") else repr(value)  # a log is no place for secrets
            raise ConfigError(f"{path}: {name} is {shown}; give {describe(setting.hint)}")
        if not hasattr(args, setting.dest):
            setattr(args, setting.dest, value)


def read(path: Path) -> dict[Any, Any]:
    """The names and values of a file."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read ({error}): give a YAML file") from None
    except ConfigError as error:
        raise ConfigError(f"--config {path}, {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # the latter for `!!int x`
        raise ConfigError(f"--config {path} is not YAML ({error}): give one 'name: value' a line") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} is not a mapping: give one 'name: value' a line")
    return found


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of YAML is one of this type. A whole number is a number too, and true is neither."""
    if hint is typing.Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def describe(hint: Any) -> str:
    """A type in words."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    words = [KINDS[typing.get_origin(each) or each] for each in options]
    return " or ".join(dict.fromkeys(words))
