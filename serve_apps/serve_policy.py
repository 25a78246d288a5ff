"""The autoscaling policy that Serve's controller calls for each application: the plan, or the local rule without one.

Runs inside Serve's controller, where an exception of one application's policy stops the updates of all others and a
blocking call stops the controller. So nothing here may raise, block, or do I/O: `plan_reader` has the plan in memory,
`local_rule` decides. Serve copies this module by value per application; shared state belongs into a module it imports.

In a Serve config: ``autoscaling_policy: {policy_function: "serve_apps.serve_policy:PlanPolicy", policy_kwargs: {app: …,
local_rule: {target_ongoing_per_replica, min_replicas, max_replicas, downscale_hold_s}}}``, with zero delays in
`autoscaling_config`.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from serve_apps import local_rule, plan_reader, wire


class PlanPolicy:
    """Targets of one application. kwargs: `app` (its name) and `local_rule` (a LocalRule as a dict).

    Wrong kwargs are logged and leave the application's targets alone; they never reach Serve as an exception.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._held: local_rule.Held | None = None
        self._rule: wire.LocalRule | None = None
        self._said = ""
        try:
            self._app = str(kwargs["app"])
            self._rule = wire.LocalRule.model_validate(kwargs["local_rule"])
        except Exception as error:
            self._say(f"application {kwargs.get('app')!r} keeps its replicas: bad policy_kwargs: {error!r}")

    def __call__(self, contexts: dict[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """``({deployment id: replicas}, {})``; a deployment that should stay as it is, is left out."""
        try:
            return self._targets(contexts), {}
        except Exception as error:
            self._say(f"application keeps its replicas: {error!r}")
            return {}, {}

    def _targets(self, contexts: dict[Any, Any]) -> dict[Any, int]:
        if self._rule is None:
            return {}
        seen, now_s = plan_reader.latest(), time.monotonic()
        plan, age_s = (seen.plan, now_s - seen.published_at_s) if seen else (None, 0.0)
        targets: dict[Any, int] = {}
        for deployment, context in contexts.items():
            if context.deployment_name != wire.LLM_DEPLOYMENT:
                continue
            load = local_rule.Load(
                context.current_num_replicas, context.target_num_replicas, float(context.total_num_requests)
            )
            replicas, self._held = local_rule.choose(self._app, plan, age_s, self._rule, load, self._held, now_s)
            if replicas is not None:
                targets[deployment] = replicas
                _disarm_cold_start(context)
        self._say(f"application {self._app} follows {'its local rule' if self._held else 'the plan'}")
        return targets

    def _say(self, text: str) -> None:
        if text != self._said:
            logging.getLogger("ray.serve").warning("Quartermaster: %s", text)
        self._said = text


def _disarm_cold_start(context: Any) -> None:
    """Keep Serve from overruling the target while nothing runs.

    With no running replica and any request waiting, Serve replaces the policy's number by max(1, old target): zero
    could not be kept, nor could more than one be started. It looks at the same context after us: show it no requests.
    """
    if context.current_num_replicas == 0:
        context.total_num_requests = 0.0
