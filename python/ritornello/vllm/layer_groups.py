"""The groups of layers that a load delivers in order, and the groups that a step has reached."""

from collections.abc import Mapping


class LayerGroups:
    """The groups of one worker's layers. A load may arrive layer by layer only if the worker has
    several groups, and the engine announces every layer (`StepLoads.await_layer`) before it runs
    the layer: a layer that runs unannounced would read unfilled blocks.
    """

    def __init__(self) -> None:
        self._group_of: dict[str, int] = {}
        # Layers that were never announced, and layers that this step has not announced yet.
        self._unannounced: set[str] = set()
        self._due: set[str] = set()
        # Number of leading groups that this step no longer waits for.
        self._arrived = 0

    def set(self, group_of: Mapping[str, int]) -> None:
        """Sets the number of each layer's group, by the layer's name. With a single group, loads do
        not arrive layer by layer.
        """
        self._group_of = dict(group_of) if len({*group_of.values()}) > 1 else {}
        self._unannounced = set(self._group_of)

    @property
    def announced(self) -> bool:
        """Whether loads may arrive layer by layer."""
        return bool(self._group_of) and not self._unannounced

    def begin_step(self) -> None:
        self._arrived, self._due = 0, set(self._group_of)

    def note(self, name: str) -> None:
        """Notes that the engine announced a layer while its step waits for no loads."""
        self._unannounced.discard(name)

    def reach(self, name: str) -> int | None:
        """Returns the number of the group that must have arrived before a layer runs; None if this
        step has waited for this group already. For an unknown layer the number is above the numbers
        of all groups, so that the step waits for all of them.
        """
        self._due.discard(name)
        group = self._group_of.get(name, len(self._group_of))
        return group if group >= self._arrived else None

    def set_arrived(self, group: int) -> None:
        self._arrived = group + 1

    @property
    def skipped(self) -> bool:
        """Whether layers of this step ran unannounced. Valid after the last layer of a step whose
        loads arrive layer by layer.
        """
        return bool(self._due)

    def disable(self) -> str:
        """Makes later synchronous loads end before the first layer of their step runs. Returns a
        layer that ran unannounced; "" if an earlier call has disabled loads layer by layer.
        """
        name = min(self._due) if self._group_of else ""
        self._group_of = {}
        return name
