"""What a tree of config dataclasses holds: keys, types in words, docstrings; as help and as YAML."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import shutil
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import docstring_parser
import yaml

from forge.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One key of a config tree that can be set."""

    key: str
    """Dotted path, as typed on the command line."""
    type: Any
    """Resolved type annotation."""
    doc: str
    """The docstring under the field; empty if it has none."""


def leaves(config_cls: type, prefix: str = "") -> Iterator[Leaf]:
    """Every key that can be set, in the order of declaration."""
    docs = field_docs(config_cls)
    for name, kind in field_types(config_cls).items():
        if dataclasses.is_dataclass(kind):
            yield from leaves(cast(type, kind), f"{prefix}{name}.")
        else:
            yield Leaf(prefix + name, kind, docs.get(name, ""))


def field_types(cls: Any) -> dict[str, Any]:
    """Name to resolved type of every field that the constructor takes."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def field_docs(cls: Any) -> dict[str, str]:
    """Name to docstring of every field that has one, inherited fields included."""
    docs: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        params = docstring_parser.parse_from_object(base).params
        docs.update({param.arg_name: " ".join((param.description or "").split()) for param in params})
    return docs


def dataclass_in(kind: Any) -> Any | None:
    """`kind` itself, or what its Optional, list or dict holds, where that is a dataclass."""
    candidates = (kind, *get_args(kind))
    return next((c for c in candidates if isinstance(c, type) and dataclasses.is_dataclass(c)), None)


@dataclasses.dataclass(frozen=True)
class Source:
    """The tree that a key belongs to and where the key was read, for the messages."""

    root: type
    where: str


def type_at(key: str, source: Source) -> Any:
    """The type of what `key` (`KEY+` appends to a list) names; ConfigError for no key, or a whole section."""
    kind: Any = source.root
    for name in key.removesuffix("+").split("."):
        section = dataclass_in(kind)
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif section is not None and get_origin(kind) is not list and name in field_types(section):
            kind = field_types(section)[name]
        else:
            raise unknown_key(key, source)
    if dataclasses.is_dataclass(kind):
        names = ", ".join(f"{key}.{name}" for name in field_types(kind))
        raise ConfigError(f"{key} is a section, not a key ({source.where}); set one of {names}")
    if key.endswith("+") and get_origin(kind) is not list:
        raise ConfigError(f"{key} appends to a list, but {key[:-1]} is {describe(kind)}; write --{key[:-1]}=VALUE")
    return kind


def unknown_key(key: str, source: Source) -> ConfigError:
    known = [leaf.key for leaf in leaves(source.root)]
    if key in known:
        return ConfigError(f"dotted key {key!r} ({source.where}); in a file indent the key below its section")
    section, _, name = key.rpartition(".")
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    near = near or [k for k in known if k.rpartition(".")[2] == name][:3]
    near = near or difflib.get_close_matches(key, known, n=1)
    beside = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == section]
    text = f"unknown key {key!r} ({source.where})"
    text += f", did you mean {' or '.join(map(repr, near))}?" if near else ";"
    text += f" {section} has the keys {', '.join(beside)};" if section and beside else ""
    return ConfigError(f"{text} --help lists every key")


def describe(kind: Any) -> str:
    """A type annotation in the words of an error message: `integer or null`, `one of a, b`."""
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return "{" + ", ".join(field_types(kind)) + "}"
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, args))
    if origin in (list, tuple, Sequence):
        return f"list of {describe(args[0])}"
    if origin in (dict, Mapping):
        return f"mapping of {describe(args[0])} to {describe(args[1])}"
    words = {
        int: "integer",
        float: "number",
        bool: "true or false",
        str: "text",
        Path: "path",
        type(None): "null",
    }
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def to_yaml(config: Any) -> str:
    """`config` (a dataclass instance) as YAML; `--config` reads it back to an equal instance."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def inline(value: Any) -> str:
    """`value` as it can be typed behind `--key=`."""
    plain = _plain(value)
    if isinstance(plain, list | dict):
        return f"'{json.dumps(plain)}'" if plain else json.dumps(plain)
    return plain if isinstance(plain, str) else json.dumps(plain)


def help_text(config: Any, preset: Path, prog: str, description: str) -> str:
    """Every key of `config` with its value, its type and its docstring."""
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    lines = [
        f"usage: {prog} [--config FILE.yaml] [--print-config] [--KEY=VALUE ...]",
        "",
        *_wrapped(description, "", width),
        *_wrapped(f"The values below are in force with the preset {preset} and the options given.", "", width),
        "",
        "  --config=FILE.yaml",
        *_wrapped("Preset to start from; the other options overlay it.", " " * 6, width),
        "  --print-config",
        *_wrapped("Print the configuration in force as YAML and exit; --config reads it back.", " " * 6, width),
        "  --help, -h",
        *_wrapped("Print this text and exit.", " " * 6, width),
        *_section_help(config, "", "", width),
    ]
    return "\n".join(lines)


def _section_help(section: Any, prefix: str, doc: str, width: int) -> Iterator[str]:
    docs, kinds = field_docs(type(section)), field_types(type(section))
    subsections = [name for name, kind in kinds.items() if dataclasses.is_dataclass(kind)]
    if len(subsections) < len(kinds):
        summary = doc or docstring_parser.parse(type(section).__doc__ or "").short_description or ""
        yield ""
        yield from _wrapped(f"{prefix.removesuffix('.') or 'general'}: {summary}", "", width)
    for name in (name for name in kinds if name not in subsections):
        yield f"  --{prefix}{name}={inline(getattr(section, name))}  ({describe(kinds[name])})"
        yield from _wrapped(docs.get(name, ""), " " * 6, width)
        item = dataclass_in(kinds[name])
        for key, text in (field_docs(item) if item else {}).items():
            yield from _wrapped(f"{key} ({describe(field_types(item)[key])}): {text}", " " * 8, width)
    for name in subsections:
        yield from _section_help(getattr(section, name), f"{prefix}{name}.", docs.get(name, ""), width)


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else copy.copy(value)
