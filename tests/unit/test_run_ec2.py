"""`qm run --cloud ec2` as a process sees it: bad input over a real socket, a journal in S3, and who may act."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoscaler.adapters import journals, s3_store
from autoscaler.commands.doctor import doctor_command
from autoscaler.commands.outcome import OK, VIOLATED, BadInput
from autoscaler.commands.run import connect_cluster, run_command
from autoscaler.commands.status import status_command
from autoscaler.core.events import Planned
from autoscaler.ports import Misconfigured
from chaos.ec2_server import Account, Ec2Server, Fault
from tests.ec2_rig import EAST, door, region
from tests.s3_fake import FakeS3
from tests.unit.test_ec2_doctor import DATA
from tests.unit.test_run import Stage, stage

FILE = """\
cluster: test
region: us-east-1
launch_template: qm-node
subnets: {us-east-1a: subnet-a, us-east-1b: subnet-b}
instance_types: [g6e.12xlarge]
markets: [on_demand]
"""


@pytest.fixture
def policies(tmp_path: Path, root: Path) -> Path:
    folder = tmp_path / "policies"
    shutil.copytree(root / "policies" / "local" / "sim", folder)
    (folder / "cloud").mkdir()
    (folder / "cloud" / "ec2.yaml").write_text(FILE)
    return folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Ec2Server:
    """EC2 on a socket, where boto3's own environment says that it is."""
    import time

    made = Ec2Server(Account({EAST: region(templates={"qm-node": DATA})}), time.time)
    door().core = made
    for name in ("EC2", "SQS", "SERVICE_QUOTAS"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", door().url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    return made


def refused(policies: Path, **changes: Any) -> list[str]:
    """What `qm run` says when it cannot begin."""
    stage = Stage(policies, policies.parent / "journal")
    given: dict[str, Any] = {"cloud": "ec2", "cloud_url": None, "cloud_token_file": None}
    options = replace(
        stage.options(), **(given | changes), ray_address="127.0.0.1:9", dashboard_url="http://127.0.0.1:9"
    )
    with pytest.raises(BadInput) as wrong:
        run_command(options, connect_cluster)
    assert not (policies.parent / "journal").exists()
    return list(wrong.value.problems)


# ---- bad input, over a socket ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("error", "*", 99, code="ExpiredToken", status=403), "(ExpiredToken); renew the credentials"),
        (Fault("error", "DescribeSubnets", 99, code="UnauthorizedOperation", status=403), "deploy/README.md lists"),
        (Fault("html", "*", 99), "check the route, the proxy"),
        (Fault("page", "*", 99), "(ResponseParserError); something else than AWS answered"),
        (Fault("garbled", "*", 99), "(ResponseParserError); something else than AWS answered"),
        (Fault("lost_before", "*", 99), "check the route, the proxy"),
    ],
)
def test_what_ec2_answers_is_one_line_with_the_file_and_a_remedy(
    policies: Path, server: Ec2Server, fault: Fault, words: str
) -> None:
    server.faults.append(fault)
    (problem,) = refused(policies)
    assert problem.startswith(f"{policies}/cloud/ec2.yaml: ")
    assert words in problem
    assert "\n" not in problem


def test_a_wrong_secret_is_told_from_a_wrong_clock(policies: Path, server: Ec2Server, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    (problem,) = refused(policies)
    assert "(SignatureDoesNotMatch); renew the credentials" in problem


def test_no_credentials_at_all_are_said_to_be_missing(policies: Path, server: Ec2Server, monkeypatch: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    (problem,) = refused(policies)
    assert "NoCredentialsError" in problem


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_PROFILE", "nosuch", "the config profile (nosuch) could not be found; renew the credentials"),
        ("AWS_SECRET_ACCESS_KEY", "", "partial credentials found in env, missing: AWS_SECRET_ACCESS_KEY; renew the"),
        ("AWS_ENDPOINT_URL_EC2", "no address", "invalid endpoint: no address; correct AWS_ENDPOINT_URL, or unset it"),
    ],
)
def test_settings_that_boto3_does_not_take_are_said_with_a_remedy(
    policies: Path, server: Ec2Server, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    for look in (lambda: doctor_command(policies, None, None), lambda: refused(policies)):
        with pytest.raises(Misconfigured) as wrong:
            look()
        assert words.lower() in str(wrong.value).lower()


def test_a_region_that_is_none_is_named(policies: Path, monkeypatch: Any) -> None:
    (policies / "cloud" / "ec2.yaml").write_text(FILE.replace("us-east-1", "us east"))
    with pytest.raises(Exception, match=r"us easta is no zone|has no price in us east") as wrong:
        run_command(replace(Stage(policies, policies.parent / "j").options(), cloud="ec2", cloud_url=None,
                            cloud_token_file=None), connect_cluster)  # fmt: skip
    assert "Traceback" not in str(wrong.value)


def test_where_nothing_can_be_launched_each_offering_says_why(policies: Path, server: Ec2Server) -> None:
    server.account.regions[EAST].subnets.clear()
    problems = refused(policies)
    assert len(problems) == 2
    assert all("does not exist; correct it" in problem for problem in problems)


def test_options_of_the_other_cloud_are_refused(policies: Path) -> None:
    assert "takes no --cloud-url" in refused(policies, cloud_url="http://127.0.0.1:1")[0]
    assert refused(policies, cloud="local") == ["--cloud local: give --cloud-url and --cloud-token-file"]
    assert refused(policies, cloud="moon") == ["--cloud moon: unknown; this version has: local, ec2"]


def test_a_good_file_gets_as_far_as_ray(policies: Path, server: Ec2Server) -> None:
    (problem,) = refused(policies)
    assert problem.startswith("--ray-address 127.0.0.1:9: no Ray at 127.0.0.1:9")
    assert server.requests[EAST] > 0


def test_the_doctor_prints_what_it_found_and_exits_by_it(
    policies: Path, server: Ec2Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert doctor_command(policies, tmp_path / "journal", str(tmp_path / "found.json")) == OK
    said = capsys.readouterr().out
    assert "0 broken" in said
    assert "written by nobody yet" in (tmp_path / "found.json").read_text()
    server.account.regions[EAST].images.clear()
    assert doctor_command(policies, None, "-") == VIOLATED
    assert '"level":"bad"' in capsys.readouterr().out


# ---- a journal in S3 ------------------------------------------------------------------------------------------------
@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> FakeS3:
    import time

    made = FakeS3(time.time)
    monkeypatch.setattr(s3_store, "connect", lambda place: made.store(s3_store.parse(place)[1]))
    return made


__all__ = ["stage"]
PLACE = "s3://journals/prod"


def test_a_run_keeps_its_journal_in_s3_and_gives_it_back(
    stage: Stage, s3: FakeS3, capsys: pytest.CaptureFixture[str]
) -> None:
    held: list[int] = []

    def connect(options: Any) -> Any:
        return replace(stage.connect(options), hold=lambda tenure: held.append(tenure.epoch))

    assert run_command(replace(stage.options(), journal=PLACE, once=True), connect) == OK
    assert held == [1]
    assert any(isinstance(record.event, Planned) for record in journals.read_journal(PLACE))
    assert status_command(PLACE, None) == OK
    assert "journal written by nobody; process " in " ".join(capsys.readouterr().out.split())


def test_a_second_run_is_told_who_runs(stage: Stage, s3: FakeS3) -> None:
    journals.open_journal(PLACE)
    with pytest.raises(Exception, match=r"another controller writes this journal: process \d+ on .*\(epoch 1"):
        run_command(replace(stage.options(), journal=PLACE, once=True), stage.connect)
    assert stage.left


def test_a_run_that_was_superseded_ends_with_the_name_of_its_successor(stage: Stage, s3: FakeS3) -> None:
    def takes_over() -> None:
        body, etag, at_s = s3.objects["prod/lease.json"]
        s3.objects["prod/lease.json"] = (body, etag, at_s - 100.0)
        journals.open_journal(PLACE).read()

    stage.script[3] = takes_over
    with pytest.raises(BadInput, match=r"epoch 1 is over: .* written by process .*epoch 2.*; this controller ends"):
        run_command(replace(stage.options(), journal=PLACE), _renewing(stage))


def _renewing(stage: Stage) -> Any:
    """A lease that is looked at before every act, as after a long pause."""

    def connect(options: Any) -> Any:
        def hold(tenure: Any) -> None:
            minutes = itertools.count(10)
            tenure._lease.elapsed_s = lambda: 60.0 * next(minutes)

        return replace(stage.connect(options), hold=hold)

    return connect


def test_a_run_whose_write_was_done_though_its_answer_was_lost_reads_again_and_goes_on(
    stage: Stage, s3: FakeS3, capsys: pytest.CaptureFixture[str]
) -> None:
    import os
    import signal

    stage.script[2] = lambda: s3.lost.append("PUT")
    stage.script[6] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert run_command(replace(stage.options(), journal=PLACE), stage.connect) == OK
    said = capsys.readouterr().err
    assert "error=journal_reread: " in said
    kinds = [record.event.kind for record in journals.read_journal(PLACE)]
    assert kinds.count("opened") == 2
    assert [record.seq for record in journals.read_journal(PLACE)] == list(range(1, len(kinds) + 1))


def test_a_bucket_that_does_not_answer_is_said_before_the_first_tick(stage: Stage, s3: FakeS3) -> None:
    s3.refuse = {"GET": (503, "SlowDown")}
    with pytest.raises(BadInput, match=r"--journal s3://journals/prod: .*SlowDown.*; check that it can be reached"):
        run_command(replace(stage.options(), journal=PLACE, once=True), stage.connect)
    assert stage.ticks == 0
