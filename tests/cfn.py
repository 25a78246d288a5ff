"""A strict reader of CloudFormation: short forms become long ones, anything else with a tag is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FUNCTIONS = ("Sub", "GetAtt", "Join", "If", "Equals", "Not", "And", "Select", "Split", "Base64")


class _Loader(yaml.SafeLoader):
    """Only the tags below exist."""


def _plain(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    raise yaml.YAMLError(f"a map under a tag: {node.start_mark}")


def _tagged(name: str) -> Any:
    return lambda loader, node: {name: _plain(loader, node)}


for _name in FUNCTIONS:
    _Loader.add_constructor(f"!{_name}", _tagged(f"Fn::{_name}"))
for _name in ("Ref", "Condition"):
    _Loader.add_constructor(f"!{_name}", _tagged(_name))


def template(path: Path) -> dict[str, Any]:
    """The template in `path`; a key given twice is an error."""
    node = yaml.compose(path.read_text(), Loader=_Loader)
    _unique(node)
    found: dict[str, Any] = yaml.load(path.read_text(), Loader=_Loader)  # noqa: S506 - a SafeLoader with our tags
    return found


def _unique(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"given twice: {twice}"
        for _, value in node.value:
            _unique(value)
    elif isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _unique(each)


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every map in `value`."""
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from nodes(each)
    elif isinstance(value, list):
        for each in value:
            yield from nodes(each)
