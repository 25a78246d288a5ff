"""YAML as plain values with the line of every key. Reads files; may not import yaml's constructors or build any object.

Hostile input is refused before anything is built from it: files over 1 MiB or 20,000 values, aliases (the root of
expansion bombs), tags (the root of code execution) and nesting over 24 levels. Keys must be text and unique.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from .problems import Path, Problem

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 24
MAX_NUMBER_LENGTH = 40
_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,3}$")
_SCALARS = yaml.constructor.SafeConstructor()


@dataclass(slots=True)
class Document:
    """One file's values, the line of each path in it, and what was wrong with it; `data` holds what could be read."""

    file: str
    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    replaced: dict[Path, str] = field(default_factory=dict)  # values that something else wrote, and what it was
    within: str = ""  # the key of a larger document whose part this is

    def line(self, path: Path) -> int:
        """The line of `path`, or of its nearest parent that was written."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def origin(self, path: Path) -> tuple[str, int]:
        """File and line that wrote `path`; what replaced it has no line."""
        by = next((self.replaced[path[:cut]] for cut in range(len(path), -1, -1) if path[:cut] in self.replaced), "")
        return (by, 0) if by else (self.file, self.line(path))

    def wrote(self, path: Path) -> bool:
        """Whether this document, or what replaced a part of it, holds `path`."""
        return path in self.lines or self.origin(path)[1] == 0

    def problem(self, path: Path, text: str) -> Problem:
        """A problem at `path`."""
        key = spell(path, self.data)
        inner = "." if self.within and key and not key.startswith("[") else ""
        return Problem(*self.origin(path), f"{self.within}{inner}{key}", text)

    def part(self, path: Path) -> Document:
        """The document below `path`, which is there; its problems are still spelt from the top."""
        size, data = len(path), self.data
        for step in path:
            data = data[step]
        lines = {key[size:]: line for key, line in self.lines.items() if key[:size] == path}
        replaced = {key[size:]: by for key, by in self.replaced.items() if key[:size] == path}
        file, _ = self.origin(path)
        above = {} if file == self.file else {(): file}
        return Document(self.file, data, lines, replaced=above | replaced, within=spell(path, self.data))


def spell(path: Path, data: Any) -> str:
    """``services[chat].slo.ttft_s``: list items by their name or id where they have one, else by index."""
    words = ""
    for step in path:
        item = data[step] if _has(data, step) else None
        if isinstance(step, int):
            label = next(
                (item[key] for key in ("name", "id") if isinstance(item, dict) and isinstance(item.get(key), str)), step
            )
            words += f"[{label}]"
        else:
            words += f".{step}" if words else step
        data = item
    return words


def read(path: FilePath) -> Document:
    """The document in `path`. Never raises for the content or for a file that cannot be read: see `problems`."""
    name = str(path)
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        return _broken(name, 0, "is not a regular file; remove it, or give it another name")
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        return _broken(name, 0, f"cannot be read ({error.strerror}); check the path and its permissions")
    if len(raw) > MAX_BYTES:
        return _broken(name, 1, "is larger than 1 MiB; a file of this kind takes a few KiB, so check what it is")
    try:
        return parse(raw.decode(), name)
    except UnicodeDecodeError as error:
        return _broken(name, raw.count(b"\n", 0, error.start) + 1, "is not UTF-8 text; save it as UTF-8")


def parse(text: str, file: str) -> Document:
    """The document in `text`; never raises."""
    try:
        refusal = next(_refusals(text), None)
        node = None if refusal else yaml.compose(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        line = _line_of(error)
        remedy = "indent with spaces, not with a tab" if _tab_indents(text, line) else "mend the syntax"
        return _broken(file, line, f"is not valid YAML: {_reason(error)}; {remedy}")
    if refusal:
        return _broken(file, *refusal)
    document = Document(file)
    if node is not None:
        document.data = _value(node, (), document)
    return document


def _refusals(text: str) -> Iterator[tuple[int, str]]:
    """Line and reason of everything in the event stream that is never built."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.CSafeLoader)):
        line = event.start_mark.line + 1 if event.start_mark else 1
        tag = getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent):
            yield line, "uses a YAML alias (*name); write the value out"
        elif tag:
            yield line, f"uses the YAML tag {tag}; write plain values"
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if number > MAX_VALUES:
            yield line, f"holds more than {MAX_VALUES} values; split it, or check what it is"
        if depth > MAX_DEPTH:
            yield line, f"is nested deeper than {MAX_DEPTH} levels; check the brackets"


def _value(node: yaml.Node, path: Path, document: Document) -> Any:
    document.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, document)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*path, index), document) for index, item in enumerate(node.value)]
    return _scalar(node)


def _mapping(node: yaml.MappingNode, path: Path, document: Document) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line, key = key_node.start_mark.line + 1, key_node.value
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_TAG}str":
            shown = key if isinstance(key, str) else "a list or a map"
            text = f"the key {shown} is not text; put it in quotes"
            document.problems.append(Problem(document.file, line, spell(path, None), text))
        elif key in values:
            first = document.lines[(*path, key)]
            text = f"is given twice, first in line {first}; keep one"
            document.problems.append(Problem(document.file, line, spell((*path, key), None), text))
        else:
            document.lines[(*path, key)] = line
            values[key] = _value(value_node, (*path, key), document)
    return values


def _scalar(node: yaml.Node) -> Any:
    """Text, number, truth value or null. Dates and YAML 1.1's base-60 numbers (12:30) stay text."""
    if not isinstance(node, yaml.ScalarNode):
        raise TypeError(f"not a YAML scalar: {node}")
    kind, text = node.tag.removeprefix(_TAG), node.value
    if len(text) > MAX_NUMBER_LENGTH:
        return text  # a number this long means something else, and takes quadratic time to read
    if kind == "int" and ":" not in text:
        return _SCALARS.construct_yaml_int(node)
    if kind == "float" and ":" not in text:
        return _SCALARS.construct_yaml_float(node)
    if kind == "bool":
        return _SCALARS.construct_yaml_bool(node)
    if kind == "str" and not node.style and _EXPONENT.match(text):
        value = float(text)  # 1e9 is a number to everybody but YAML 1.1, which wants 1.0e+9
        return int(value) if value.is_integer() and abs(value) < 2.0**53 else value
    return None if kind == "null" else text


def _has(data: Any, step: str | int) -> bool:
    if isinstance(data, list):
        return isinstance(step, int) and step < len(data)
    return isinstance(data, dict) and step in data


def _broken(file: str, line: int, text: str) -> Document:
    return Document(file, problems=[Problem(file, line, "", text)])


def _line_of(error: yaml.YAMLError) -> int:
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark else 1


def _tab_indents(text: str, line: int) -> bool:
    """Whether there is a tab before the first word of the line."""
    found = text.split("\n")[line - 1 : line]
    return any("\t" in row[: len(row) - len(row.lstrip())] for row in found)


def _reason(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable").strip()
