"""A corpus of files that must be refused, each with exactly what the person who wrote it reads."""

# ruff: noqa: E501 - a table of file and message is read by the line
from __future__ import annotations

from pathlib import Path

import pytest

from policies.load import PolicyProblems, load

UNIT = "unit: support\nowner: a@example.com\nservices:\n"
CHAT = "  - name: chat\n    model: m\n    goal: cost\n    variants: [{id: v1, instance_type: g6.2xlarge}]\n"
GOOD = UNIT + CHAT  # seven lines; keys added to the service start in line 8


def with_keys(*keys: str) -> str:
    return GOOD + "".join(f"    {key}\n" for key in keys)


CORPUS: dict[str, tuple[str | bytes, list[str]]] = {
    # ---- not a policy at all
    "empty": ("", ["a.yaml:1: is empty; start with unit: NAME"]),
    "only a comment": ("# later\n", ["a.yaml:1: is empty; start with unit: NAME"]),
    "a list": ("- unit: x\n", ["a.yaml:1: holds a list instead of keys; start with unit: NAME"]),
    "a word": ("support\n", ['a.yaml:1: holds "support" instead of keys; start with unit: NAME']),
    "bytes": (b"unit: a\nowner: \xff\xfe\n", ["a.yaml:2: is not UTF-8 text; save it as UTF-8"]),
    "too large": ("# " + "x" * (1 << 20), ["a.yaml:1: is larger than 1 MiB; a file of this kind takes a few KiB, so check what it is"]),
    "two documents": (GOOD + "---\nunit: b\n", ["a.yaml:8: is not valid YAML: but found another document; mend the syntax"]),
    "broken indent": ("unit: a\n  owner: b\n", ["a.yaml:2: is not valid YAML: mapping values are not allowed in this context; mend the syntax"]),
    "tab": ("services:\n\t- name: a\n", ["a.yaml:2: is not valid YAML: found character that cannot start any token; indent with spaces, not with a tab"]),
    "tab after spaces": (UNIT + "  - name: chat\n  \t  model: m\n", ["a.yaml:5: is not valid YAML: found a tab character that violates indentation; indent with spaces, not with a tab"]),
    "open bracket": ("unit: [a\n", ["a.yaml:2: is not valid YAML: did not find expected ',' or ']'; mend the syntax"]),
    # ---- hostile
    "alias": ("unit: &u a\nowner: *u\n", ["a.yaml:2: uses a YAML alias (*name); write the value out"]),
    "alias bomb": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)),
        ["a.yaml:2: uses a YAML alias (*name); write the value out"],
    ),
    "python object": ("unit: !!python/object/apply:os.system [echo]\n", ["a.yaml:1: uses the YAML tag tag:yaml.org,2002:python/object/apply:os.system; write plain values"]),
    "custom tag": ("unit: !secret a\n", ["a.yaml:1: uses the YAML tag !secret; write plain values"]),
    "deep": ("[" * 500, ["a.yaml:1: is nested deeper than 24 levels; check the brackets"]),
    "too many values": ("unit: [" + "1," * 30_000 + "]\n", ["a.yaml:1: holds more than 20000 values; split it, or check what it is"]),
    "endless number": (with_keys("priority: " + "9" * 5000), [f'a.yaml:8: services[chat].priority: must be a whole number, not "{"9" * 56}...; correct it']),
    # ---- keys
    "key twice": (GOOD + "unit: b\n", ["a.yaml:8: unit: is given twice, first in line 1; keep one"]),
    "service key twice": (with_keys("goal: latency"), ["a.yaml:8: services[0].goal: is given twice, first in line 6; keep one"]),
    "key not text": (with_keys("7: x"), ["a.yaml:8: services[0]: the key 7 is not text; put it in quotes"]),
    "key is yes": (with_keys("yes: x"), ["a.yaml:8: services[0]: the key yes is not text; put it in quotes"]),
    "unknown key of the unit": (GOOD + "quota_gpu: 3\n", ["a.yaml:8: quota_gpu: is not a known key; did you mean quota_gpus?"]),
    "unknown key of a service": (with_keys("min_replica: 1"), ["a.yaml:8: services[chat].min_replica: is not a known key; did you mean min_replicas?"]),
    "unknown key of an slo": (with_keys("slo: {ttft: 1.0}"), ["a.yaml:8: services[chat].slo.ttft: is not a known key; did you mean ttft_s?"]),
    "unknown key of a variant": (UNIT + CHAT.replace("id: v1", "id: v1, gpus: 2"), ["a.yaml:7: services[chat].variants[v1].gpus: is not a known key; known: id, instance_type, tp, precision, nodes_per_replica, role"]),
    "unknown key of an overflow": (with_keys("overflow: {url: https://x, usd_per_1m_tokens: 1.0, rpm: 60, key: s}", "sacrifice: [overflow]"), ["a.yaml:8: services[chat].overflow.key: is not a known key; did you mean key_env?"]),
    "nothing but a unit": ("unit: support\n", ["a.yaml:1: owner: is missing; add it", "a.yaml:1: services: is missing; add it"]),
    "service of nothing": (UNIT + "  - {}\n", [f"a.yaml:4: services[0].{key}: is missing; add it" for key in ("goal", "model", "name", "variants")]),
    # ---- values
    "unit name": (GOOD.replace("unit: support", "unit: Support Desk"), ['a.yaml:1: unit: "Support Desk" is not a name; use lower-case letters, digits and inner hyphens']),
    "unit is a truth value": (GOOD.replace("unit: support", "unit: on"), ["a.yaml:1: unit: must be text, not true; put it in quotes"]),
    "name too long": (GOOD.replace("name: chat", "name: " + "c" * 41), [f"a.yaml:4: services[{'c' * 41}].name: is longer than 40 characters; shorten it"]),
    "goal": (GOOD.replace("goal: cost", "goal: latncy"), ['a.yaml:6: services[chat].goal: "latncy" is not allowed; did you mean latency?']),
    "goal far off": (GOOD.replace("goal: cost", "goal: speed"), ['a.yaml:6: services[chat].goal: "speed" is not allowed; known: latency, throughput, cost']),
    "priority too high": (with_keys("priority: 1001"), ["a.yaml:8: services[chat].priority: is 1001; it must be at most 1000"]),
    "priority negative": (with_keys("priority: -1"), ["a.yaml:8: services[chat].priority: is -1; it must be at least 0"]),
    "priority is text": (with_keys('priority: "9"'), ['a.yaml:8: services[chat].priority: must be a whole number, not "9"; correct it']),
    "priority is a time of day": (with_keys("priority: 12:30"), ['a.yaml:8: services[chat].priority: must be a whole number, not "12:30"; correct it']),
    "half a replica": (with_keys("min_replicas: 1.5"), ["a.yaml:8: services[chat].min_replicas: must be a whole number, not 1.5; correct it"]),
    "no replica at most": (with_keys("max_replicas: 0", "min_replicas: 0"), ["a.yaml:8: services[chat].max_replicas: is 0; it must be at least 1"]),
    "more replicas than there are machines": (
        with_keys("max_replicas: 99999999999999999999999999", "min_replicas: 10001", "warm_replicas: 20000", "on_demand_floor: 20000"),
        [
            "a.yaml:8: services[chat].max_replicas: is 99999999999999999999999999; it must be at most 10000",
            "a.yaml:9: services[chat].min_replicas: is 10001; it must be at most 10000",
            "a.yaml:10: services[chat].warm_replicas: is 20000; it must be at most 10000",
            "a.yaml:11: services[chat].on_demand_floor: is 20000; it must be at most 10000",
        ],
    ),
    "fraction of all": (with_keys("slo: {fraction: 1.0}"), ["a.yaml:8: services[chat].slo.fraction: is 1.0; it must be less than 1"]),
    "ttft of nothing": (with_keys("slo: {ttft_s: 0}"), ["a.yaml:8: services[chat].slo.ttft_s: is 0; it must be more than 0"]),
    "ttft infinite": (with_keys("slo: {ttft_s: .inf}"), ["a.yaml:8: services[chat].slo.ttft_s: must be a finite number; correct it"]),
    "ttft not a number": (with_keys("slo: {ttft_s: .nan}"), ["a.yaml:8: services[chat].slo.ttft_s: must be a finite number; correct it"]),
    "slo is a number": (with_keys("slo: 3"), ["a.yaml:8: services[chat].slo: must be a map of keys and values, not 3; correct it"]),
    "services is a map": (UNIT.replace("services:\n", "services: {chat: 1}\n"), ["a.yaml:3: services: must be a list, not a map; correct it"]),
    "a service is a word": (UNIT + "  - chat\n", ['a.yaml:4: services[0]: must be a map of keys and values, not "chat"; correct it']),
    "market": (with_keys("markets: [spot, ondemand]"), ['a.yaml:8: services[chat].markets[1]: "ondemand" is not allowed; did you mean on_demand?']),
    "markets is a word": (with_keys("markets: spot"), ['a.yaml:8: services[chat].markets: must be a list, not "spot"; correct it']),
    "scale_to_zero is text": (with_keys('scale_to_zero: "no"', "min_replicas: 0"), ['a.yaml:8: services[chat].scale_to_zero: must be true or false, not "no"; correct it']),
    "revision is a number": (with_keys("revision: 2"), ["a.yaml:8: services[chat].revision: must be text, not 2; put it in quotes"]),
    "precision": (UNIT + CHAT.replace("id: v1", "id: v1, precision: fp7"), ['a.yaml:7: services[chat].variants[v1].precision: "fp7" is not allowed; did you mean fp8?']),
    "overflow url": (with_keys("overflow: {url: api.example.com, usd_per_1m_tokens: 1.0, rpm: 60}", "sacrifice: [overflow]"), ['a.yaml:8: services[chat].overflow.url: "api.example.com" is not a web address; start it with http:// or https://']),
    "budget of nothing": (GOOD + "budget_usd_per_h: 0\n", ["a.yaml:8: budget_usd_per_h: is 0; it must be more than 0"]),
    # ---- contradictions
    "no services": (UNIT.replace("services:\n", "services: []\n"), ["a.yaml:3: services: is empty; give at least one service, or remove the file"]),
    "service twice": (GOOD + CHAT, ["a.yaml:8: services[chat].name: the service chat is named twice, also as item 1 of the list; rename or remove one"]),
    "min over max": (with_keys("min_replicas: 9"), ["a.yaml:8: services[chat].min_replicas: is 9, more than max_replicas 8; lower it, or raise max_replicas"]),
    "warm over max": (with_keys("max_replicas: 2", "warm_replicas: 3"), ["a.yaml:9: services[chat].warm_replicas: is 3, more than max_replicas 2; lower it, or raise max_replicas"]),
    "on-demand floor over max": (with_keys("on_demand_floor: 9"), ["a.yaml:8: services[chat].on_demand_floor: is 9, more than max_replicas 8; lower it, or raise max_replicas"]),
    "on-demand floor, spot only": (with_keys("on_demand_floor: 1", "markets: [spot]"), ["a.yaml:8: services[chat].on_demand_floor: is 1, but markets allow none of on_demand, odcr, block; add one, or set it to 0"]),
    "end to end before first token": (with_keys("slo: {ttft_s: 2, e2e_s: 1}"), ["a.yaml:8: services[chat].slo.e2e_s: is 1, less than ttft_s 2, which it includes; raise it, or lower ttft_s"]),
    "deadline before first token": (with_keys("slo: {ttft_s: 2, deadline_s: 1}"), ["a.yaml:8: services[chat].slo.deadline_s: is 1, less than ttft_s 2, which it includes; raise it, or lower ttft_s"]),
    "latency without a limit": (GOOD.replace("goal: cost", "goal: latency"), ["a.yaml:4: services[chat].slo: sets no limit although the goal is latency; give ttft_s, tpot_s or e2e_s"]),
    "scale to zero with a floor": (with_keys("scale_to_zero: true"), ["a.yaml:8: services[chat].scale_to_zero: is true, but min_replicas is 1; set min_replicas: 0, or scale_to_zero: false"]),
    "scale to zero while warm": (with_keys("scale_to_zero: true", "min_replicas: 0", "warm_replicas: 1"), ["a.yaml:8: services[chat].scale_to_zero: is true, but warm_replicas is 1; set warm_replicas: 0, or scale_to_zero: false"]),
    "overflow without a block": (with_keys("sacrifice: [overflow]"), ["a.yaml:8: services[chat].sacrifice: names overflow, but there is no overflow block; add one with its url, or drop it"]),
    "overflow market without a block": (with_keys("markets: [spot, overflow]"), ["a.yaml:8: services[chat].markets: names overflow, but there is no overflow block; add one with its url, or drop it"]),
    "overflow key as it is, which is not repeated": (with_keys("overflow: {url: https://x, usd_per_1m_tokens: 1.0, rpm: 60, key_env: sk-abc}", "sacrifice: [overflow]"), ['a.yaml:8: services[chat].overflow.key_env: is not the name of an environment variable (capitals, digits, underscores); never write the key itself']),
    "overflow key from two places": (with_keys("overflow: {url: https://x, usd_per_1m_tokens: 1.0, rpm: 60, key_env: K, key_file: /k}", "sacrifice: [overflow]"), ["a.yaml:8: services[chat].overflow.key_file: is given beside key_env; keep one of them"]),
    "an API key as it is, which is not repeated": (GOOD + "api_keys: [{tenant: t, sha256: sk-secret}]\n", ["a.yaml:8: api_keys[0].sha256: is not a SHA-256 in hex; write what `printf %s KEY | sha256sum` prints, never the key itself"]),
    "an API key of two tenants": (GOOD + f"api_keys: [{{tenant: t, sha256: {'a' * 64}}}, {{tenant: u, sha256: {'a' * 64}}}]\n", ["a.yaml:8: api_keys[1].sha256: is the key of item 1 of the list, too; one key belongs to one tenant"]),
    "an API key of another unit's service": (GOOD + f"api_keys: [{{tenant: t, sha256: {'a' * 64}, service: code}}]\n", ["a.yaml:8: api_keys[0].service: code is no service of this unit; known: chat"]),
    "overflow that nothing uses": (with_keys("overflow: {url: https://x, usd_per_1m_tokens: 1.0, rpm: 60}"), ["a.yaml:8: services[chat].overflow: is never used; add overflow to sacrifice or markets, or remove the block"]),
    "nothing smaller": (with_keys("sacrifice: [smaller_variant]"), ["a.yaml:8: services[chat].sacrifice: names smaller_variant, but there are not two variants; add a variant, or drop it"]),
    "no markets": (with_keys("markets: []"), ["a.yaml:8: services[chat].markets: is empty; name at least one market, or leave the key out"]),
    "market twice": (with_keys("markets: [spot, spot]"), ["a.yaml:8: services[chat].markets[1]: spot is listed twice; remove one"]),
    "no variants": (GOOD.replace("[{id: v1, instance_type: g6.2xlarge}]", "[]"), ["a.yaml:7: services[chat].variants: is empty; give at least one variant"]),
    "variant twice": (GOOD.replace("}]", "}, {id: v1, instance_type: g5.2xlarge}]"), ["a.yaml:7: services[chat].variants[v1].id: the variant v1 is named twice, also as item 1 of the list; rename or remove one"]),
    "type that no variant uses": (with_keys("instance_types: [g6.2xlarge, g5.2xlarge]"), ["a.yaml:8: services[chat].instance_types[1]: g5.2xlarge is used by no variant; add a variant for it, or remove it"]),
    "variant of a type left out": (with_keys("instance_types: [g5.2xlarge]"), ["a.yaml:7: services[chat].variants[v1].instance_type: g6.2xlarge is not in instance_types; add it there, or remove the variant", "a.yaml:8: services[chat].instance_types[0]: g5.2xlarge is used by no variant; add a variant for it, or remove it"]),
    "event without a date": (with_keys("events: [{name: sale, starts_at: soon, lasts_s: 60, expected_rps: 1}]"), ['a.yaml:8: services[chat].events[sale].starts_at: "soon" is not a date and time; write it like 2026-12-24T18:00:00+01:00']),
    "event without a zone": (with_keys("events: [{name: sale, starts_at: 2026-12-24T18:00:00, lasts_s: 60, expected_rps: 1}]"), ['a.yaml:8: services[chat].events[sale].starts_at: "2026-12-24T18:00:00" has no time zone; write it like 2026-12-24T18:00:00+01:00']),
    "event in no known zone": (with_keys("events: [{name: sale, starts_at: 2026-12-24T18:00:00+01:00, lasts_s: 60, repeats: daily, zone: Europe/Bonn}]"), ['a.yaml:8: services[chat].events[sale].zone: "Europe/Bonn" is no time zone; write one like Europe/Berlin, or leave it out']),
    "event with clock changes of its own": (with_keys("events: [{name: sale, starts_at: 2026-12-24T18:00:00+01:00, lasts_s: 60, clock_changes: [[0.0, 3600.0]]}]"), ['a.yaml:8: services[chat].events[sale].clock_changes: is worked out from zone; remove it']),
    "quota below the floor": (with_keys("min_replicas: 3") + "quota_gpus: 2\n", ["a.yaml:9: quota_gpus: is 2, but min_replicas of the services need 3 GPUs; raise it, or lower them"]),
    # ---- everything at once: one broken key hides no other
    "many at once": (
        with_keys("priority: 5000", "min_replicas: 9", "slo: {ttft_s: 0}", "on_demand_floor: 1", "markets: [spot]") + "quota_gpus: -1\n",
        [
            "a.yaml:8: services[chat].priority: is 5000; it must be at most 1000",
            "a.yaml:9: services[chat].min_replicas: is 9, more than max_replicas 8; lower it, or raise max_replicas",
            "a.yaml:10: services[chat].slo.ttft_s: is 0; it must be more than 0",
            "a.yaml:11: services[chat].on_demand_floor: is 1, but markets allow none of on_demand, odcr, block; add one, or set it to 0",
            "a.yaml:13: quota_gpus: is -1; it must be at least 0",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORPUS)
def test_the_person_reads_exactly(name: str, tmp_path: Path) -> None:
    content, expected = CORPUS[name]
    (tmp_path / "a.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PolicyProblems) as caught:
        load(tmp_path)
    assert [str(problem).removeprefix(f"{tmp_path}/") for problem in caught.value.problems] == expected


def test_the_base_of_the_corpus_is_itself_valid(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    assert [key for key, _, _ in load(tmp_path).services()] == ["support/chat"]
