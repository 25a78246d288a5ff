"""cloud/ec2.yaml: what it amounts to, and every way to get it wrong, by file, line and key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autoscaler.adapters.ec2.load import load_ec2
from policies.problems import Problems

GOOD = """\
cluster: prod
region: us-east-1
sweep_regions: [us-west-2]
launch_template: qm-prod-node
subnets: {us-east-1a: subnet-0a, us-east-1b: subnet-0b}
instance_types: [g6e.12xlarge, p5.48xlarge]
reservations:
  - {id: cr-0a, market: odcr, instance_type: p5.48xlarge, zone: us-east-1a}
  - {id: cr-0b, market: block, instance_type: p5.48xlarge, zone: us-east-1b}
gangs:
  - {instance_type: p5.48xlarge, zone: us-east-1a, placement_group: qm-p5-a}
security_groups: [sg-0a]
notices_queue: https://sqs.us-east-1.amazonaws.com/1/qm-prod-notices
"""


def written(folder: Path, text: str) -> Path:
    (folder / "cloud").mkdir(exist_ok=True)
    (folder / "cloud" / "ec2.yaml").write_text(text)
    return folder


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(Problems) as wrong:
        load_ec2(written(folder, text))
    return [str(problem).removeprefix(f"{folder}/cloud/ec2.yaml") for problem in wrong.value.problems]


def test_types_zones_and_markets_multiply_and_the_catalogue_says_the_rest(tmp_path: Path) -> None:
    config = load_ec2(written(tmp_path, GOOD))
    offers = {row.offering: row for row in config.offerings}
    assert len(offers) == 2 * 2 * 2 + 2
    spot = offers["g6e.12xlarge/us-east-1b/spot"]
    assert (spot.subnet, spot.gpus, spot.vcpus, spot.efa_interfaces, spot.placement_group) == (
        "subnet-0b",
        4,
        48,
        0,
        "",
    )
    assert 0.0 < spot.price_usd_per_h < offers["g6e.12xlarge/us-east-1b/on_demand"].price_usd_per_h == 10.49264
    gang = offers["p5.48xlarge/us-east-1a/on_demand"]
    assert (gang.placement_group, gang.efa_interfaces, gang.gpus) == ("qm-p5-a", 32, 8)
    assert offers["p5.48xlarge/us-east-1b/on_demand"].efa_interfaces == 0
    odcr, block = offers["p5.48xlarge/us-east-1a/odcr/cr-0a"], offers["p5.48xlarge/us-east-1b/block/cr-0b"]
    assert (odcr.reservation, odcr.placement_group, odcr.pool) == ("cr-0a", "qm-p5-a", "cr-0a")
    assert block.price_usd_per_h != odcr.price_usd_per_h == gang.price_usd_per_h
    assert (config.cluster, config.launch_template, config.sweep_regions) == ("prod", "qm-prod-node", ("us-west-2",))
    assert config.notices_queue.endswith("/qm-prod-notices")


def test_prices_of_the_folder_win(tmp_path: Path) -> None:
    (tmp_path / "catalogue").mkdir()
    (tmp_path / "catalogue" / "prices.yaml").write_text(
        "sources: {ours: {what: our contract, date: 2026-11-01, licence: ours}}\n"
        "prices: [{instance_type: g6e.12xlarge, region: us-east-1, market: on_demand, since: 2026-11-01, "
        "usd_per_h: 7.0, source: [ours]}]\n"
    )
    offers = {row.offering: row for row in load_ec2(written(tmp_path, GOOD)).offerings}
    assert offers["g6e.12xlarge/us-east-1a/on_demand"].price_usd_per_h == 7.0


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("cluster: prod", "cluster: p rod", ':1: cluster: "p rod" has the wrong form; correct it'),
        ("region: us-east-1\n", "", ":1: region: is missing; add it"),
        ("launch_template: qm-prod-node", "launch_template: x", ':4: launch_template: "x" has the wrong form'),
        ("us-east-1b: subnet-0b", "us-west-2b: subnet-0b", ":5: subnets.us-west-2b: us-west-2b is no zone of"),
        ("{us-east-1a: subnet-0a, us-east-1b: subnet-0b}", "{}", ":5: subnets: is empty; give at least one"),
        ("subnet-0a", "sub-0a", ':5: subnets.us-east-1a: "sub-0a" has the wrong form; correct it'),
        ("[g6e.12xlarge, p5.48xlarge]", "[g6e.12xlarg]", ":6: instance_types[0]: g6e.12xlarg is not in the"),
        ("[g6e.12xlarge, p5.48xlarge]", "[g7e.12xlarge]", ":6: instance_types[0]: g7e.12xlarge has no price"),
        ("market: odcr", "market: spot", ':8: reservations[cr-0a].market: "spot" is not allowed; known: odcr, block'),
        ("id: cr-0b", "id: cr-0a", ":9: reservations[cr-0a].id: cr-0a is given twice; keep one"),
        ("zone: us-east-1b}", "zone: us-east-1c}", ":9: reservations[cr-0b].zone: us-east-1c has no subnet; did you"),
        ("security_groups: [sg-0a]\n", "", ":1: security_groups: is empty; launches with EFA"),
        ("{instance_type: p5.48xlarge, zone: us-east-1a, pl", "{instance_type: g6.xlarge, zone: us-east-1a, pl",
         ":11: gangs[0].instance_type: g6.xlarge has no EFA; name a type that has"),
        ("[us-west-2]", "[us-east-1]", ":3: sweep_regions[0]: us-east-1 acquires, so it is swept anyway; leave it out"),
        ("notices_queue: https", "notices_queue: arn", ":13: notices_queue: \"arn"),
        ("cluster: prod", "clustr: prod", ":1: clustr: is not a known key; did you mean cluster?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_line_and_key(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in GOOD
    found = problems(tmp_path, GOOD.replace(old, new, 1))
    assert any(each.startswith(problem) for each in found), found


def test_a_file_that_is_no_map_or_not_there_is_said(tmp_path: Path) -> None:
    assert problems(tmp_path, "- 1\n") == [":1: holds no keys; write it as docs/ec2.md shows"]
    assert problems(tmp_path, "a: [\n")[0].startswith(":2: is not valid YAML")
    with pytest.raises(Problems, match=r"cloud/ec2\.yaml: does not exist; write it as docs/ec2\.md shows"):
        load_ec2(tmp_path / "nowhere")


def test_the_file_that_the_documents_show_is_a_good_one(tmp_path: Path, root: Path) -> None:
    shown = re.search(r"^```yaml\n(cluster: .*?)^```", (root / "docs" / "ec2.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    config = load_ec2(written(tmp_path, shown[1]))
    assert (config.cluster, config.image, len(config.offerings)) == ("prod", "ami-0a", 10)
