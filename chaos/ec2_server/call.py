"""What every action is given, and the parts that their answers share. Pure; may not do I/O or read a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.ec2_server.state import Refusal, Region

Params = Mapping[str, Any]
PAGE = 1000


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `at_s` is how old a truth a listing shows (describe lag)."""

    region: Region
    params: Params
    now_s: float
    at_s: float


Action = Callable[[Call], dict[str, Any]]


def page(rows: Sequence[Any], params: Params) -> tuple[Sequence[Any], dict[str, Any]]:
    """The part of `rows` asked for, and the token of the next. Raises Refusal."""
    size, token = int(params.get("MaxResults") or PAGE), str(params.get("NextToken") or "0")
    if not 1 <= size <= PAGE:
        raise Refusal("InvalidParameterValue", f"MaxResults {size}: need 1 to {PAGE}")
    if not token.isdigit():
        raise Refusal("InvalidNextToken", "The token is not valid.")
    start = int(token)
    more = {"NextToken": str(start + size)} if start + size < len(rows) else {}
    return rows[start : start + size], more


def tags_of(params: Params, kind: str) -> dict[str, str]:
    """The tags that a call gives to resources of a kind."""
    rows = (row for row in params.get("TagSpecifications", ()) if row.get("ResourceType") == kind)
    return {tag["Key"]: tag.get("Value", "") for row in rows for tag in row.get("Tags", ())}


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags as they are listed."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def passes(facts: Mapping[str, str], tags: Mapping[str, str], filters: Sequence[Params]) -> bool:
    """Whether a resource passes all filters. Raises Refusal for one that does not exist."""
    for row in filters:
        name = row["Name"]
        if name.startswith("tag:"):
            if tags.get(name[4:]) not in row["Values"]:
                return False
        elif name == "tag-key":
            if not set(row["Values"]) & set(tags):
                return False
        elif name not in facts:
            raise Refusal("InvalidParameterValue", f"The filter '{name}' is invalid")
        elif facts[name] not in row["Values"]:
            return False
    return True
