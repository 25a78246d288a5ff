"""The Serving port over a live Ray cluster. The only module that touches Ray's private parts.

Serve is read over the dashboard's REST interface, nodes are read and drained through the GCS, and the board is an actor
reached over one lazily made driver connection. Ray blocks for minutes when nobody answers, so every road is probed with
a plain TCP connection first and every wait is bounded. May not decide anything, and keeps no state but connections.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import httpx

from autoscaler.adapters.ray_auth import WANTS_TOKEN, auth_headers
from autoscaler.core.model import Node, Replica, ReplicaState, ServingView
from autoscaler.ports import Misconfigured, NotFound, PortError, Transient
from serve_apps.wire import BOARD_NAMESPACE, LABEL_INSTANCE_ID, LLM_DEPLOYMENT, PlanMessage, encode, split_app

T = TypeVar("T")
PROBE_TIMEOUT_S = 1.0
CALL_TIMEOUT_S = 5.0
BOARD_TIMEOUT_S = 3.0
NODE_REMEMBERED_S = 600.0  # a dead node is listed for so long; Ray itself remembers a thousand of them
CONTROLLER_AWAY_S = 60.0  # Serve's controller restarts within seconds; empty answers before this are not believed
STATES: Mapping[str, ReplicaState] = {
    "STARTING": "loading",
    "UPDATING": "loading",
    "RECOVERING": "loading",
    "RUNNING": "ready",
    "STOPPING": "draining",
    "PENDING_MIGRATION": "ready",  # on a draining node, and serving until its successor runs
}


class RayServe:
    """One cluster: `ray_address` is the GCS (``host:port``), `dashboard_url` its dashboard (``http://host:port``)."""

    def __init__(self, ray_address: str, dashboard_url: str) -> None:
        self._address = ray_address
        self._http = httpx.Client(
            base_url=dashboard_url, timeout=CALL_TIMEOUT_S, headers=auth_headers(), trust_env=False
        )
        self._gcs = _Gcs(ray_address)
        self._board = _Board(ray_address)
        self._controller = ControllerWatch()

    def probe(self) -> None:
        """Whether Ray and its dashboard answer. Raises Transient that says which does not, and what to do.

        Raises Misconfigured when the dashboard wants a token, or another one.
        """
        _reach(self._address)
        with _translated("Ray's dashboard"):
            reply = self._http.get("/api/version")
            if reply.status_code in (401, 403):
                raise Misconfigured(WANTS_TOKEN, "Unauthorized")
            reply.raise_for_status()

    def observe(self, now_s: float) -> ServingView:
        """Replicas, nodes and targets of our applications. Raises Transient."""
        with _translated("Serve"):
            reply = self._http.get("/api/serve/applications/")
            reply.raise_for_status()
            details = reply.json()
            self._controller.believe(details, now_s)
            nodes = self._gcs.nodes(now_s)
            return serving_view(now_s, details, nodes)

    def publish(self, message: PlanMessage) -> None:
        """Put the plan on the board. Raises Transient."""
        self._board.call("publish", encode(message))

    def reports(self) -> dict[str, tuple[float, bytes]]:
        """``{gateway_id: (age_s, GatewayReport bytes)}`` from the board. Raises Transient."""
        return cast("dict[str, tuple[float, bytes]]", self._board.call("reports"))

    def notes(self) -> dict[str, tuple[float, bytes]]:
        """``{instance_id: (age_s, NodeReport bytes)}`` from the board. Raises Transient."""
        return cast("dict[str, tuple[float, bytes]]", self._board.call("notes"))

    def drain(self, instance_id: str, deadline_at_s: float, reason: str) -> None:
        """Stop placing on the instance's node; no-op when it drains already. Raises NotFound, Transient."""
        with _translated("Ray's GCS"):
            self._gcs.drain(instance_id, deadline_at_s, reason)

    def metrics_urls(self) -> tuple[str, ...]:
        """Prometheus endpoints of all live nodes, the head's included. Raises Transient."""
        with _translated("Ray's GCS"):
            return self._gcs.metrics_urls()

    def close(self) -> None:
        """Leave the cluster."""
        self._http.close()
        self._board.close()


# ---- pure part ------------------------------------------------------------------------------------------------------
class ControllerWatch:
    """Tells a restarting controller of Serve, whose answers look as if nothing were served, from Serve shut down."""

    def __init__(self) -> None:
        self._seen_at_s: float | None = None

    def believe(self, details: Mapping[str, Any], now_s: float) -> None:
        """Raises Transient for an answer without a controller within CONTROLLER_AWAY_S of one that had it."""
        if details.get("controller_info"):
            self._seen_at_s = now_s
        elif self._seen_at_s is not None and now_s - self._seen_at_s < CONTROLLER_AWAY_S:
            raise Transient("Serve's controller is away", "ServeControllerAway")


def serving_view(now_s: float, details: Mapping[str, Any], nodes: tuple[Node, ...]) -> ServingView:
    """The view in Serve's instance `details` (the REST answer) over `nodes`; applications not ours are left out."""
    instance_of = {node.node_id: node.instance_id for node in nodes}
    replicas: list[Replica] = []
    targets: list[tuple[str, int]] = []
    for app, application in sorted(details["applications"].items()):
        deployment = application["deployments"].get(LLM_DEPLOYMENT)
        if split_app(app) is None or deployment is None:
            continue
        targets.append((app, int(deployment["target_num_replicas"])))
        seen = (_replica(app, raw, instance_of) for raw in deployment["replicas"])
        replicas.extend(replica for replica in seen if replica is not None)
    return ServingView(at_s=now_s, replicas=tuple(replicas), nodes=nodes, targets=tuple(targets))


def _replica(app: str, raw: Mapping[str, Any], instance_of: Mapping[str, str]) -> Replica | None:
    """None for a replica that is gone already."""
    state = STATES.get(raw["state"])
    parts = split_app(app)
    if state is None or parts is None:
        return None
    node_id = raw.get("node_id")
    if state == "loading" and not node_id:
        state = "pending"
    return Replica(
        replica_id=raw["replica_id"],
        service=parts[0],
        variant=parts[1],
        instance_id=(instance_of.get(node_id) or raw.get("node_instance_id") or "") if node_id else "",
        state=state,
        since_s=float(raw["start_time_s"]),
    )


# ---- edges ----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _translated(who: str) -> Iterator[None]:
    """Every failure inside becomes Transient with the original's name, unless it is a port error already."""
    try:
        yield
    except PortError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0][:300]
        raise Transient(f"{who}: {type(error).__name__}: {first}", type(error).__name__) from error


def _reach(address: str) -> None:
    """Raises Transient within PROBE_TIMEOUT_S when nothing listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise Transient(f"{address!r} is no Ray address; give host:port, such as 127.0.0.1:6379", "BadAddress")
    try:
        socket.create_connection((host, int(port)), PROBE_TIMEOUT_S).close()
    except OSError as error:
        hint = "start one with `ray start --head`, or name another address"
        raise Transient(f"no Ray at {address} ({error.strerror or error}); {hint}", "NoRay") from error


class _Gcs:
    """Ray's node table and drains. A failed call drops the connection; the next makes one, to a new cluster too."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client: Any = None

    def nodes(self, now_s: float) -> tuple[Node, ...]:
        """Nodes of our instances: live ones, and those that died within NODE_REMEMBERED_S."""
        with self._connected() as client:
            infos = client.get_all_node_info(timeout=CALL_TIMEOUT_S).values()
            draining = client.get_draining_nodes(timeout=CALL_TIMEOUT_S)
        ours = [info for info in infos if info.labels.get(LABEL_INSTANCE_ID)]
        rows = [
            Node(
                node_id=info.node_id.hex(),
                instance_id=info.labels[LABEL_INSTANCE_ID],
                alive=_is_alive(info),
                draining=info.node_id.hex() in draining,
            )
            for info in ours
            if _is_alive(info) or now_s - info.end_time_ms / 1000.0 < NODE_REMEMBERED_S
        ]
        return tuple(sorted(rows, key=lambda node: node.node_id))

    def drain(self, instance_id: str, deadline_at_s: float, reason: str) -> None:
        """Drain the live node of an instance as if it were about to be preempted."""
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        live = [node for node in self.nodes(time.time()) if node.instance_id == instance_id and node.alive]
        if not live:
            raise NotFound(f"no live Ray node of instance {instance_id!r}")
        deadline_ms = int(1000 * max(deadline_at_s, time.time() + 1.0))
        for node in (node for node in live if not node.draining):
            with self._connected() as client:
                kind = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
                accepted, why = client.drain_node(node.node_id, kind, reason, deadline_ms)
            if not accepted:
                raise Transient(f"Ray refused to drain {instance_id}: {why}", "DrainRefused")

    def metrics_urls(self) -> tuple[str, ...]:
        """Where live nodes export metrics."""
        with self._connected() as client:
            infos = client.get_all_node_info(timeout=CALL_TIMEOUT_S).values()
        rows = {(info.node_manager_address, info.metrics_export_port) for info in infos if _is_alive(info)}
        return tuple(f"http://{host}:{port}/metrics" for host, port in sorted(rows) if port)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Any]:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # absent from Ray's stub

        try:
            if self._client is None:
                _reach(self._address)
                self._client = GcsClient(address=self._address)
            yield self._client
        except Exception:
            self._client = None
            raise


def _is_alive(info: Any) -> bool:
    return bool(info.state == 0)  # GcsNodeInfo.ALIVE


class _Board:
    """The board actor over a driver connection, which is made when first needed and again when the cluster was lost."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._handle: Any = None
        self._joined = False

    def call(self, method: str, *arguments: Any) -> Any:
        """Result of a method of the board. Raises Transient."""
        import ray

        with _translated("the board"):
            try:
                _reach(self._address)
                handle = self._connect()
                return ray.get(getattr(handle, method).remote(*arguments), timeout=BOARD_TIMEOUT_S)
            except Exception:
                self._drop()
                raise

    def close(self) -> None:
        """Disconnect the driver, if this made one."""
        with self._lock:
            self._leave()

    def _connect(self) -> Any:
        import ray

        from serve_apps.board import get_board

        with self._lock:
            if self._handle is None:
                if not ray.is_initialized():
                    _join(self._address)
                    self._joined = True
                self._handle = get_board(create=True)
            return self._handle

    def _drop(self) -> None:
        """Forget the board. When its cluster is gone, leave that too, so that the next call joins the new one."""
        with self._lock:
            self._handle = None
            if self._joined and _lost(self._address):
                self._leave()

    def _leave(self) -> None:
        self._handle = None
        if self._joined:
            import ray

            ray.shutdown()
            self._joined = False


def _join(address: str) -> None:
    """Become a driver. Ray would take SIGTERM's handler with it; whoever runs the controller keeps theirs."""
    import ray

    # Without this a driver whose head node stays away for a minute is ended by Ray, and the controller with it.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "31536000")
    before = signal.getsignal(signal.SIGTERM)
    ray.init(address, namespace=BOARD_NAMESPACE, log_to_driver=False, configure_logging=False)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _lost(address: str) -> bool:
    """Whether the cluster this driver joined is not the one at `address` any more."""
    import ray
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # absent from Ray's stub

    try:
        _reach(address)
        here = GcsClient(address=address).cluster_id
        return bool(here != ray._private.worker.global_worker.gcs_client.cluster_id)
    except Exception:
        return True
