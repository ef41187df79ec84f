"""The WeightStore over Ray's object store.

    trainer --ray.put(flat)--> object store of its node ----ray.get----> engines, evaluator
            --publish--------> Board: version -> manifest, reference --find-->

A version lives as long as the board refers to it. Where the trainer ends, its objects end with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import WeightsError
from ..weights import State
from .flat import Manifest, pack, unpack

if TYPE_CHECKING:
    from torch import Tensor

_BOARD_TIMEOUT_S = 60.0
_TRANSFER_TIMEOUT_S = 600.0


class Board:
    """What runs inside an actor of its own: which versions there are, and where."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._known: dict[int, tuple[Manifest, list[Any]]] = {}

    def publish(self, manifest: Manifest, boxed: list[Any]) -> None:
        """boxed: the reference to the buffer, in a list, so that Ray does not fetch it here."""
        self._known = {v: k for v, k in self._known.items() if v < manifest.version}
        self._known[manifest.version] = (manifest, boxed)
        for old in sorted(self._known)[: -self._keep]:
            del self._known[old]

    def find(self, version: int) -> tuple[Manifest, list[Any]] | None:
        """Manifest and boxed reference of a version; None: there is no such version."""
        return self._known.get(version)

    def versions(self) -> list[int]:
        """Oldest first."""
        return sorted(self._known)


class RayWeightStore:
    """Keeps the newest `keep` versions. Can be sent to any process of the cluster. board: a handle
    of the actor (`start_board`). All waits end after transfer_timeout_s with WeightsError."""

    def __init__(self, board: Any, *, transfer_timeout_s: float = _TRANSFER_TIMEOUT_S) -> None:
        self._board = board
        self._transfer_timeout_s = transfer_timeout_s

    def publish(self, version: int, state: State) -> str:
        import ray
        from ray.exceptions import RayError

        manifest, flat = pack(version, state)
        try:
            reference = ray.put(flat)
            self._ask(self._board.publish.remote(manifest, [reference]))
        except RayError as error:
            raise WeightsError(f"version {version} cannot be published: {_said(error)}") from error
        return manifest.sha256

    def fetch(self, version: int) -> dict[str, Tensor]:
        import ray
        from ray.exceptions import RayError

        try:
            found = self._ask(self._board.find.remote(version))
            if found is None:
                held = self._ask(self._board.versions.remote())
                raise WeightsError(f"version {version} is not in the store, which holds {held}")
            manifest, (reference,) = found
            flat = ray.get(reference, timeout=self._transfer_timeout_s)
        except RayError as error:
            raise WeightsError(f"version {version} cannot be fetched: {_said(error)}") from error
        return unpack(manifest, version, flat)

    def latest(self) -> int | None:
        from ray.exceptions import RayError

        try:
            versions: list[int] = self._ask(self._board.versions.remote())
        except RayError as error:
            raise WeightsError(f"the board of weights does not answer: {_said(error)}") from error
        return versions[-1] if versions else None

    def _ask(self, reference: Any) -> Any:
        import ray

        return ray.get(reference, timeout=_BOARD_TIMEOUT_S)


def start_board(keep: int) -> Any:
    """The actor, on the node of the caller, whose end is the end of the run in any case."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote(keep)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
