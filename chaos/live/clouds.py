"""Where a run on this machine gets its instances: the `local` cloud, or the test EC2 that boto3 is pointed to.

Each says which process to start, how `qm run` is told of it, and how the weather is made there. May not start anything.
With EC2 the controller runs as in production: its ``cloud/ec2.yaml``, boto3's own environment, notices from a queue.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from autoscaler.adapters.aws_codes import port_error
from autoscaler.adapters.local import LocalCloud
from autoscaler.core.model import CloudInstance, CloudView, Offering
from autoscaler.ports import PortError, Transient

from .processes import HOST
from .script import Weather

CloudKind = Literal["local", "ec2-server"]
CLUSTER = "qm-up"
TEMPLATE, IMAGE, QUEUE = "quartermaster", "ami-0123456789abcdef0", "qm-events"
MARKETS = {"on_demand": "on-demand", "spot": "spot"}


@dataclass(frozen=True, slots=True)
class Place:
    """What every cloud is told: the run's folder, its supply, where nodes join and with which environment."""

    folder: Path
    policies: Path
    offerings: Sequence[Mapping[str, Any]]
    ray_address: str
    env: Mapping[str, str]
    port: int
    keep: bool
    launch_s: float

    @property
    def url(self) -> str:
        """Where the cloud answers."""
        return f"http://{HOST}:{self.port}"

    @property
    def token_file(self) -> Path:
        """Where its token is; readable by this user only."""
        return self.folder / "cloud.token"

    @property
    def token(self) -> str:
        """Its token."""
        return self.token_file.read_text().strip()

    def process(self, module: str, config: Mapping[str, Any]) -> list[str]:
        """The command of a cloud's process, with its config and token written."""
        path = self.folder / "cloud.json"
        write_secret(self.token_file)
        write_private(path, json.dumps(config))
        command = [sys.executable, "-m", module, "--config", str(path), "--port", str(self.port)]
        return [*command, "--token-file", str(self.token_file), *["--outlive-parent"] * self.keep]


class CloudPart(Protocol):
    """A cloud as part of a run."""

    def command(self) -> list[str]:
        """What to start; writes its files."""
        ...

    def run_options(self) -> dict[str, object]:
        """`qm run`'s options about the cloud and the policies; writes what they name."""
        ...

    def environment(self) -> dict[str, str]:
        """What `qm run` has in its environment besides the run's own."""
        ...

    def weather(self) -> Weather:
        """Whoever makes pools dry and instances go."""
        ...


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The `local` cloud."""

    place: Place

    def command(self) -> list[str]:
        """See CloudPart."""
        config = {
            "cluster": CLUSTER,
            "ray_address": self.place.ray_address,
            "offerings": [dict(row) for row in self.place.offerings],
            "node_env": dict(self.place.env),
            "launch_s": self.place.launch_s,
        }
        return self.place.process("autoscaler.adapters.local_server", config)

    def run_options(self) -> dict[str, object]:
        """See CloudPart."""
        place = self.place
        return {
            "cloud": "local",
            "cloud-url": place.url,
            "cloud-token-file": place.token_file,
            "policies": place.policies,
        }

    def environment(self) -> dict[str, str]:
        """See CloudPart."""
        return {}

    def weather(self) -> Weather:
        """See CloudPart."""
        return LocalCloud(self.place.url, self.place.token)


@dataclass
class Ec2Part:
    """The test EC2. `blocks` are Capacity Blocks for sale there; `reservations` are what ``ec2.yaml`` may use."""

    place: Place
    blocks: Sequence[Mapping[str, Any]] = ()
    reservations: list[dict[str, str]] = field(default_factory=list)
    secret: str = field(default_factory=lambda: secrets.token_hex(20), repr=False)

    @property
    def region(self) -> str:
        """The one region of the supply."""
        return str(self.place.offerings[0]["region"])

    @property
    def policies(self) -> Path:
        """The run's policies with the cloud's file."""
        return self.place.folder / "policies-ec2"

    def command(self) -> list[str]:
        """See CloudPart."""
        rows = self.place.offerings
        region = {
            "name": self.region,
            "pools": [
                {
                    "instance_type": row["instance_type"],
                    "zone": row["zone"],
                    "market": MARKETS[row["market"]],
                    "count": row["count"],
                    "boot_s": row["boot_s"],
                }
                for row in rows
            ],
            "subnets": [{"subnet": subnet, "zone": zone} for zone, subnet in self._subnets().items()],
            "templates": {TEMPLATE: {"ImageId": IMAGE}},
            "images": [IMAGE],
            "blocks": [dict(row) for row in self.blocks],
            "queue": QUEUE,
        }
        gpus = {row["instance_type"]: row["gpus"] for row in rows}
        nodes = {"ray_address": self.place.ray_address, "gpus": gpus, "env": dict(self.place.env)}
        keys = [{"key": CLUSTER, "secret": self.secret}]
        return self.place.process("chaos.ec2_server", {"regions": [region], "keys": keys, "nodes": nodes})

    def run_options(self) -> dict[str, object]:
        """See CloudPart. The policies' folder is the given one with ``cloud/ec2.yaml`` laid beside, by links."""
        cloud = self.policies / "cloud"
        cloud.mkdir(parents=True)
        for path in self.place.policies.iterdir():
            if path.name != cloud.name:
                (self.policies / path.name).symlink_to(path.resolve())
        write_private(cloud / "ec2.yaml", json.dumps(self._file(), indent=2))
        return {"cloud": "ec2", "policies": self.policies}

    def environment(self) -> dict[str, str]:
        """See CloudPart. Nothing of the user's own AWS settings is looked at."""
        nowhere = str(self.place.folder / "no-such-file")
        return {
            "AWS_ENDPOINT_URL": self.place.url,
            "AWS_ACCESS_KEY_ID": CLUSTER,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_CONFIG_FILE": nowhere,
            "AWS_SHARED_CREDENTIALS_FILE": nowhere,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": HOST,
            "no_proxy": HOST,
        }

    def weather(self) -> Weather:
        """See CloudPart."""
        return Ec2Weather(self.place)

    def _subnets(self) -> dict[str, str]:
        zones = sorted({str(row["zone"]) for row in (*self.place.offerings, *self.blocks)})
        return {zone: f"subnet-{number:08x}" for number, zone in enumerate(zones, start=1)}

    def _file(self) -> dict[str, Any]:
        rows = self.place.offerings
        return {
            "cluster": CLUSTER,
            "region": self.region,
            "launch_template": TEMPLATE,
            "subnets": self._subnets(),
            "instance_types": sorted({row["instance_type"] for row in rows}),
            "markets": sorted({row["market"] for row in rows}),
            "reservations": self.reservations,
            "notices_queue": f"{self.place.url}/000000000001/{QUEUE}",
        }


class Ec2Weather:
    """The test EC2's weather door in the words of the script. An offering is named as ``cloud/ec2.yaml`` names it."""

    def __init__(self, place: Place) -> None:
        self._offers = {"/".join((row["instance_type"], row["zone"], row["market"])): row for row in place.offerings}
        self._client = httpx.Client(
            base_url=f"{place.url}/weather",
            headers={"Authorization": f"Bearer {place.token}"},
            timeout=5.0,
            trust_env=False,
        )

    def describe(self, now_s: float) -> CloudView:
        """Offerings and instances as they are."""
        offerings = tuple(
            Offering(
                offering=name,
                pool=name,
                instance_type=row["instance_type"],
                zone=row["zone"],
                market=row["market"],
                gpus=row["gpus"],
                price_usd_per_h=row["price_usd_per_h"],
                region=row["region"],
            )
            for name, row in self._offers.items()
        )
        rows = self._do("instances")["instances"]
        return CloudView(at_s=now_s, offerings=offerings, instances=tuple(CloudInstance(**row) for row in rows))

    def set_supply(self, offering: str, count: int) -> None:
        """What the offering's pool can hold in all from now on."""
        row = self._offers[offering]
        place = {"instance_type": row["instance_type"], "zone": row["zone"], "market": MARKETS[row["market"]]}
        self._do("pool", place | {"count": count})

    def reclaim(self, instance_id: str, notice_s: float | None = None) -> float:
        """Give notice; returns the deadline."""
        given = {"instance_id": instance_id} | ({} if notice_s is None else {"notice_s": notice_s})
        return float(self._do("interrupt", given)["at_s"])

    def _do(self, act: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = self._client.post(f"/{act}", json=given or {})
            answer: dict[str, Any] = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Transient(f"the test EC2: {type(error).__name__} on {act}: {error}", type(error).__name__) from error
        if reply.is_success:
            return answer
        failed: PortError = port_error(answer["code"], answer["message"], status=reply.status_code)
        raise failed


def write_secret(path: Path) -> None:
    """A new random token in a file that only this user can read."""
    write_private(path, secrets.token_hex(32))


def write_private(path: Path, text: str) -> None:
    """A file that only this user can read."""
    path.touch(mode=0o600)
    path.write_text(text)
