"""Which service a request is for and who sent it: path, header, model, API key; and what is counted for whom."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_apps.gateway import service as gateway_service
from serve_apps.gateway.access import Access
from serve_apps.wire import KeyRoute
from tests.gateway_fakes import CHAT, TEXT, FakeEngines, Rig, plan, routed, variant

WEB, APP, OTHER = "sk-web-0001", "sk-app-0002", "sk-other-0003"


def key(unit: str, tenant: str, secret: str, service: str | None = None) -> KeyRoute:
    return KeyRoute(unit=unit, tenant=tenant, sha256=sha256(secret.encode()).hexdigest(), service=service)


def rig() -> Rig:
    """Unit u asks for a key, unit v for none; key APP belongs to the service u/t."""
    services = (routed("u/s", variant("s")), routed("u/t", variant("t")), routed("v/o", variant("o")))
    made = Rig(FakeEngines(s=1, t=1, o=1), *services)
    keys = (key("u", "web", WEB), key("u", "app", APP, "u/t"), key("w", "other", OTHER))
    made.gateway.apply(plan(*services, seq=2).model_copy(update={"keys": keys}))
    return made


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    ("case", "path", "headers", "model", "served"),
    [
        ("by model", TEXT, bearer(WEB), "u/s", "u/s"),
        ("by path", f"/u/s{TEXT}", bearer(WEB), "org/llama", "u/s"),
        ("by path, no model", f"/v/o{TEXT}", {}, None, "v/o"),
        ("by header", TEXT, bearer(WEB) | {"x-qm-service": "u/t"}, "org/llama", "u/t"),
        ("path before header", f"/u/s{TEXT}", bearer(WEB) | {"x-qm-service": "u/t"}, None, "u/s"),
        ("by key", TEXT, bearer(APP), "org/llama", "u/t"),
        ("by key, no model", TEXT, bearer(APP), None, "u/t"),
        ("a model that is a service goes before the key's", TEXT, bearer(APP), "u/s", "u/s"),
        ("an open unit takes any key", TEXT, bearer("none"), "o", "v/o"),
        ("and none", TEXT, {}, "o", "v/o"),
    ],
)
async def test_the_service_is_named_by(
    case: str, path: str, headers: dict[str, str], model: str | None, served: str
) -> None:
    made = rig()
    body = {"prompt": "a", "max_tokens": 2} | ({} if model is None else {"model": model})
    answer = await made.post(path, body, headers=headers)
    assert answer.status_code == 200, case
    assert answer.json()["model"] == (model or served)
    assert {name for name, service in made.gateway.services.items() if service.tally.completed} == {served}


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "invalid_api_key"),
        (bearer("sk-wrong"), 401, "invalid_api_key"),
        ({"Authorization": f"Basic {WEB}"}, 401, "invalid_api_key"),
        (bearer(OTHER), 403, "wrong_unit"),
    ],
)
async def test_a_unit_with_keys_refuses_others_and_repeats_no_key(
    headers: dict[str, str], status: int, code: str
) -> None:
    made = rig()
    for path, body in ((TEXT, {"model": "u/s", "prompt": "a"}), (CHAT, {"model": "u/s", "messages": []})):
        answer = await made.post(path, body, headers=headers)
        if path == TEXT:
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert not any(secret in answer.text for secret in (WEB, OTHER, "sk-wrong"))
    assert made.counters("u/s").arrivals == 0


async def test_each_caller_sees_the_models_it_may_call() -> None:
    made = rig()
    seen = {}
    for secret in ("none", WEB, OTHER):
        answer = await made.request("GET", "/v1/models", headers=bearer(secret))
        seen[secret] = [row["id"] for row in answer.json()["data"]]
    assert seen == {"none": ["v/o"], WEB: ["u/s", "u/t", "v/o"], OTHER: ["v/o"]}
    assert (await made.request("GET", "/v1/models/u/s")).status_code == 401


async def test_a_key_taken_back_is_refused_from_the_next_plan_on() -> None:
    made = rig()
    body = {"model": "u/s", "prompt": "a"}
    assert (await made.post(TEXT, body, headers=bearer(WEB))).status_code == 200
    services = tuple(made.gateway.services[name].policy for name in made.gateway.models())
    made.gateway.apply(plan(*services, seq=3).model_copy(update={"keys": (key("u", "app", APP),)}))
    assert (await made.post(TEXT, body, headers=bearer(WEB))).status_code == 401


def test_every_key_is_compared_whichever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(known: str, given: str) -> bool:
        compared.append(known)
        return known == given

    monkeypatch.setattr("serve_apps.gateway.access.compare_digest", compare)
    keys = [key("u", f"t{n}", f"secret{n}") for n in range(5)]
    access = Access(keys)
    for n in (0, 4):
        found = access.caller(f"Bearer secret{n}")
        assert found is not None
        assert found.tenant == f"t{n}"
    assert access.caller("Bearer nobody") is None
    assert compared == [one.sha256 for one in keys] * 3


async def tenants(made: Rig) -> dict[tuple[str, str], tuple[float, float]]:
    text = (await made.request("GET", "/metrics")).text
    found: dict[tuple[str, str], list[float]] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("qm_gateway_tenant_"):
            for sample in family.samples:
                found.setdefault((sample.labels["service"], sample.labels["tenant"]), []).append(sample.value)
    return {name: (values[0], values[1]) for name, values in found.items()}


async def test_tokens_are_counted_by_tenant_and_never_by_what_a_caller_says() -> None:
    made = rig()
    for secret, service, words in ((WEB, "u/s", 3), (WEB, "u/s", 2), (APP, "u/s", 1), ("x", "v/o", 1)):
        body: dict[str, Any] = {"model": service, "prompt": "a " * words, "max_tokens": 2, "user": "somebody"}
        await made.post(TEXT, body, headers=bearer(secret))
    assert await tenants(made) == {("u/s", "u/web"): (5, 4), ("u/s", "u/app"): (1, 2), ("v/o", "anonymous"): (1, 2)}


async def test_tenants_past_the_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_service, "MAX_TENANTS", 1)
    made = rig()
    for secret in (WEB, APP, WEB):
        await made.post(TEXT, {"model": "u/s", "prompt": "a", "max_tokens": 1}, headers=bearer(secret))
    assert await tenants(made) == {("u/s", "u/web"): (2, 2), ("u/s", "others"): (1, 1)}


async def test_no_message_of_the_board_holds_a_key() -> None:
    made = rig()
    text = json.dumps(made.gateway.plan.model_dump(mode="json")) if made.gateway.plan else ""
    assert text
    assert WEB not in text
