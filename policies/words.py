"""Pydantic's errors in human words, with the line of the file they come from. May not do I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from .problems import Path, suggestion

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a map of keys and values",
    "model_type": "a map of keys and values",
    "model_attributes_type": "a map of keys and values",
}
_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_LOAN_KINDS = ("bool", "constrained-int")
_PATTERNS = {
    r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$": "is not a name; use lower-case letters, digits and inner hyphens",
    r"^https?://": "is not a web address; start it with http:// or https://",
    r"^/": "is not an absolute path; start it with /",
}
# Shown without the value: somebody may have written the secret itself.
_SECRETS = {
    r"^[A-Z_][A-Z0-9_]*$": (
        "is not the name of an environment variable (capitals, digits, underscores); never write the key itself"
    ),
    r"^[0-9a-f]{64}$": "is not a SHA-256 in hex; write what `printf %s KEY | sha256sum` prints, never the key itself",
}


def translate(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[Path, str]]:
    """Path and human text of every problem pydantic found while reading `model`."""
    for detail in error.errors(include_url=False):
        path = detail["loc"]
        if path and path[-1] in _LOAN_KINDS:  # pydantic names each kind that a value is not
            yield (
                path[:-1],
                f"must be true, false or a number of GPUs from 0 on, not {show(detail['input'])}; correct it",
            )
        else:
            yield path, _text(detail, model)


def _text(detail: Mapping[str, Any], model: type[BaseModel]) -> str:
    kind, given, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    if kind == "missing":
        return "is missing; add it"
    if kind == "extra_forbidden":
        return f"is not a known key; {suggestion(str(detail['loc'][-1]), _keys(model, detail['loc'][:-1]))}"
    if kind == "literal_error":
        words = [word.strip("'\"") for word in str(context["expected"]).replace(" or ", ", ").split(", ")]
        return f"{show(given)} is not allowed; {suggestion(str(given), words)}"
    if kind in _LIMITS:
        bound, phrase = _LIMITS[kind]
        return f"is {show(given)}; it must be {phrase} {context[bound]:g}"
    if kind in _KINDS:
        hint = "; put it in quotes" if kind == "string_type" and isinstance(given, int | float) else "; correct it"
        return f"must be {_KINDS[kind]}, not {show(given)}{hint}"
    return _other(kind, given, context, str(detail["msg"]))


def _other(kind: str, given: Any, context: Mapping[str, Any], message: str) -> str:
    if kind == "string_pattern_mismatch":
        if context["pattern"] in _SECRETS:
            return _SECRETS[context["pattern"]]
        return f"{show(given)} {_PATTERNS.get(str(context['pattern']), 'has the wrong form; correct it')}"
    if kind == "string_too_long":
        return f"is longer than {context['max_length']} characters; shorten it"
    if kind in ("string_too_short", "too_short"):
        return "is empty; give at least one"
    if kind == "finite_number":
        return "must be a finite number; correct it"
    if kind == "value_error":  # a check of ours, in our own words
        return message.removeprefix("Value error, ")
    if kind == "union_tag_not_found":
        return f"{context['discriminator']} is missing; add it"
    if kind == "union_tag_invalid":
        words = [word.strip("'") for word in str(context["expected_tags"]).split(", ")]
        return f"{show(context['tag'])} is not allowed; {suggestion(str(context['tag']), words)}"
    return f"{message[:1].lower()}{message[1:]}; correct it"


def show(value: Any) -> str:
    """A value as it would be written in YAML, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "nothing"
    if isinstance(value, dict | list | tuple):
        return "a list" if not isinstance(value, dict) else "a map"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _keys(model: type[BaseModel], path: Path) -> tuple[str, ...]:
    """Known keys of the model found at `path` below `model`."""
    found: Any = model
    for step in path:
        if (
            isinstance(step, str)
            and isinstance(found, type)
            and issubclass(found, BaseModel)
            and step in found.model_fields
        ):
            found = _inner(found.model_fields[step].annotation)
    return tuple(found.model_fields) if isinstance(found, type) and issubclass(found, BaseModel) else ()


def _inner(annotation: Any) -> Any:
    """The model inside ``tuple[Model, ...]``, ``dict[str, Model]`` or ``Model | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _inner(part)) is not None), None)
