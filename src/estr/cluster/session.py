"""A connection to Ray that leaves terminal and signals as they were."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import WorkerError
from ..options.run import RayOptions
from ..ray_head import require_head, unreachable

_SPARE_BYTES = 128 << 20
"""Of the object store of a local Ray, beside the weights: batches on their way to the trainer."""

# Nothing is sent home, and no advice is printed on every start.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}


class Session:
    """Connected to the cluster of options.address from its making until `close`. A program that
    has connected to Ray already keeps its own connection."""

    def __init__(self, options: RayOptions, *, num_cpus: int, weights_bytes: int) -> None:
        """num_cpus, weights_bytes: what a local Ray must have room for. Raises ConfigError where
        no cluster answers, WorkerError where a local Ray does not come up."""
        import ray

        self._ours = not ray.is_initialized()
        if not self._ours:
            return
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if options.address != "local":
            require_head(options.address)
        local = {
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "object_store_memory": weights_bytes + _SPARE_BYTES,
            # Each would be a whole interpreter that nobody uses.
            "_system_config": {"enable_worker_prestart": False},
        }
        deadline = time.monotonic() + options.start_timeout_s
        while True:
            try:
                _connect(options.address, local if options.address == "local" else {})
                return
            except Exception as error:
                self.close()
                if options.address != "local":
                    raise unreachable(options.address, str(error)) from error
                # A bare one: on busy processors Ray's own processes missed its limit of 15 s.
                if type(error) is not Exception or time.monotonic() > deadline:
                    raise WorkerError(f"no local Ray came up: {error}") from error

    def close(self) -> None:
        """Leave the cluster; a local Ray ends."""
        import ray

        if self._ours and ray.is_initialized():
            with _signals_kept():
                ray.shutdown()


def _connect(address: str, options: Mapping[str, Any]) -> None:
    import ray

    with _signals_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """ray.init takes SIGTERM, by which a run is asked to end after the step in progress."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, handler in before.items():
            signal.signal(number, handler)
