"""The config loader: a tree of dataclasses, a YAML preset, dotted overrides, `--help`, `--print-config`.

Rooms declare dataclasses with a docstring under each field, which gives its meaning and unit; an app
composes them and calls `parse`. The code's defaults are overlaid by one preset, the preset by the command
line. jsonargparse parses, merges and checks types; this file turns whatever goes wrong into one line that
names the key, the value, what is allowed and the remedy, because the library's own messages span many
lines and print the usage of every key. It also closes three gaps through which a slip would pass in
silence: null where a value is needed, a scalar where a section is needed, one key twice in a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import jsonargparse
import yaml

from forge.config_schema import (
    Leaf,
    Source,
    dataclass_in,
    describe,
    field_types,
    help_text,
    inline,
    leaves,
    to_yaml,
    type_at,
    unknown_key,
)
from forge.errors import ConfigError

__all__ = ["Leaf", "leaves", "parse", "to_yaml"]

T = TypeVar("T")
_COMMAND_LINE = "command line"


def parse(
    config_cls: type[T],
    argv: Sequence[str] | None = None,
    *,
    default_config: Path,
    prog: str,
    description: str,
    validate: Callable[[T], object] | None = None,
    resume_key: str = "",
    expand: Callable[[Sequence[str]], Sequence[str]] = list,
) -> T:
    """The configuration that `argv` (default: `sys.argv[1:]`) asks for.

    `--config F.yaml` replaces the preset `default_config`; every leaf of `config_cls` is an option, as
    `--a.b=1` or `--a.b 1`, a boolean also as `--a.b`, a list also as `--a.b+=ITEM`, which appends.
    `expand` may write out words of the app's own as options first. With `resume_key`, such as run.resume,
    `--resume DIR` sets that key, and DIR/config.yaml is the default preset. `--help` and `--print-config` print and
    exit with 0 without calling `validate`. What cannot be parsed, or for which `validate` raises ConfigError, ends with
    one line on stderr and exit code 2 (SystemExit).
    """
    try:
        flags = _read_flags(expand(sys.argv[1:] if argv is None else argv), config_cls, resume_key)
        resumed = dict(flags.overrides).get(resume_key)
        path = flags.config or (Path(resumed) / "config.yaml" if resumed else default_config)
        preset = _read_preset(path, default_config)
        _check_section(preset, config_cls, Source(config_cls, str(path)))
        config = _resolve(config_cls, preset, path, flags.overrides)
        if flags.help or flags.print_config:
            print(help_text(config, path, prog, description) if flags.help else to_yaml(config).rstrip())
            raise SystemExit(0)
        if validate is not None:
            validate(config)
    except ConfigError as error:
        print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    return config


# --- the command line


@dataclasses.dataclass
class _Flags:
    config: Path | None = None
    help: bool = False
    print_config: bool = False
    overrides: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def _read_flags(argv: Sequence[str], config_cls: type, resume_key: str) -> _Flags:
    """Both spellings to `(key, text)` pairs, each key known to exist."""
    flags, rest = _Flags(), list(argv)
    source = Source(config_cls, _COMMAND_LINE)
    while rest:
        word = rest.pop(0)
        if word in ("--help", "-h"):
            flags.help = True
        elif word == "--print-config":
            flags.print_config = True
        elif not word.startswith("--") or word == "--":
            raise ConfigError(f"unexpected argument {word!r}; options are written --key=value, --help lists them")
        else:
            key, equals, text = word[2:].partition("=")
            key = resume_key if key == "resume" and resume_key else key
            kind = Path if key == "config" else type_at(key, source)
            if not equals:
                text = _next_word(key, kind, rest)
            if key != "config":
                flags.overrides.append((key, text))
            elif flags.config is not None:
                raise ConfigError(f"--config is given twice, {flags.config} and {text}; give one preset")
            else:
                flags.config = Path(text)
    return flags


def _next_word(key: str, kind: Any, rest: list[str]) -> str:
    follows = bool(rest) and not rest[0].startswith("--")
    if kind is bool and not (follows and rest[0].lower() in ("true", "false")):
        return "true"
    if not follows:
        raise ConfigError(f"{key} has no value ({_COMMAND_LINE}), allowed: {describe(kind)}; write --{key}=VALUE")
    return rest.pop(0)


# --- the preset


def _read_preset(path: Path, default_config: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        presets = sorted(str(p) for p in default_config.parent.glob("*.yaml"))
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"config file {str(path)!r} cannot be read ({reason}); presets: {', '.join(presets) or 'none'}"
        ) from None
    try:
        _forbid_duplicates(yaml.compose(text, Loader=yaml.SafeLoader), path)
        loaded = jsonargparse.get_loader("yaml")(text)  # unlike PyYAML's own, reads 1e-5 as a number
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {str(path)!r} is not YAML: {error}; correct the line it names") from None
    if loaded is None or not text.strip():
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"config file {str(path)!r} holds {loaded!r}, allowed: a mapping of sections to keys")
    return loaded


def _forbid_duplicates(node: yaml.Node | None, path: Path) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _forbid_duplicates(item, path)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and name.value in seen:
                line = name.start_mark.line + 1
                raise ConfigError(f"{name.value!r} stands twice in {path}, again in line {line}; keep one of the two")
            seen.add(str(name.value))
            _forbid_duplicates(value, path)


def _check_section(values: dict[Any, Any], cls: type, source: Source, prefix: str = "") -> None:
    """Every key of `values` is a field of `cls`; sections left empty in the file are removed."""
    kinds = field_types(cls)
    for name in list(values):
        if name not in kinds:
            raise unknown_key(f"{prefix}{name}", source)
        if dataclasses.is_dataclass(kinds[name]) and values[name] is None:
            del values[name]
        else:
            _check_value(values[name], kinds[name], source, f"{prefix}{name}")


def _check_value(value: Any, kind: Any, source: Source, key: str) -> None:
    section = dataclass_in(kind)
    if section is None:
        return
    if isinstance(value, dict) and get_origin(kind) is not dict:
        _check_section(value, section, source, f"{key}.")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_value(item, section, source, f"{key}.{name}")
    elif isinstance(value, list) and get_origin(kind) is list:
        for index, item in enumerate(value):
            _check_value(item, section, source, f"{key}[{index}]")
    elif kind is section:
        raise ConfigError(f"{key} is {value!r} ({source.where}), allowed: {describe(kind)}; indent its keys below it")


# --- all three sources together


def _resolve(config_cls: type[T], preset: dict[str, Any], path: Path, overrides: list[tuple[str, str]]) -> T:
    parser = jsonargparse.ArgumentParser(exit_on_error=False, allow_abbrev=False, add_help=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(config_cls)
    words = [f"--config={yaml.safe_dump(preset)}", *(f"--{key}={text}" for key, text in overrides)]
    try:
        values = parser.instantiate(parser.parse_args(words))
    except argparse.ArgumentError as error:
        _raise_wrong_type(str(error), config_cls, preset, path, overrides)
    config = config_cls(**{name: values[name] for name in field_types(config_cls)})
    for key, kind in _nulls(config, ""):
        where = _COMMAND_LINE if key in dict(overrides) else str(path)
        raise ConfigError(
            f"{key} is null ({where}), allowed: {describe(kind)}; leave it out{_default(config_cls, key)}"
        )
    return config


def _nulls(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Fields that are None although their type has no None: the library lets those pass."""
    for name, kind in field_types(type(section)).items():
        value = getattr(section, name)
        if value is None and type(None) not in get_args(kind):
            yield prefix + name, kind
        elif dataclasses.is_dataclass(value):
            yield from _nulls(value, f"{prefix}{name}.")


def _raise_wrong_type(
    message: str, root: type, preset: dict[str, Any], path: Path, overrides: list[tuple[str, str]]
) -> NoReturn:
    """The library's text nests one `Parser key "..."` per level and ends with the value."""
    names = re.findall(r'Parser key "([^"]+)"', message)
    if not names:
        raise ConfigError(f"{message}; --help lists every key")
    key = names[0]
    typed = [(k, text) for k, text in overrides if k.removesuffix("+") == key or k.startswith(f"{key}.")]
    value: Any
    if typed:
        key, value = typed[-1]
    else:
        value = preset
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    source = Source(root, _COMMAND_LINE if typed else str(path))
    got = re.search(r"(?:Got|Given) value: (.*)", message)
    inner = f", in it {names[-1]} is {got.group(1)!r}" if got and len(names) > 1 else ""
    kind = type_at(key, source)
    item = dataclass_in(kind)
    if inner and item and names[-1] in field_types(item):
        kind = field_types(item)[names[-1]]
    raise ConfigError(f"{key} is {value!r} ({source.where}){inner}, allowed: {describe(kind)}{_default(root, key)}")


def _default(root: type, key: str) -> str:
    value: Any = None
    try:
        value = root()
        for name in key.removesuffix("+").split("."):
            value = getattr(value, name)
    except (TypeError, AttributeError):  # a field without a default, a name inside a mapping
        return "; --help describes it"
    return f"; the code's default is {inline(value)}"
