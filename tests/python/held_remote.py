"""A remote in the test's process, which can withhold its answers, and fail, on demand."""

import threading


class Held:
    """A remote in this process, whose state all its objects share. `get` and `exists` wait while
    `released` is not set; all calls fail while `down`. `asked`: number of calls of `get` and
    `exists` while not `down`.
    """

    values: dict[str, bytes] = {}
    released = threading.Event()
    released.set()
    down = False
    asked = 0

    def _enter(self) -> None:
        if type(self).down:
            raise OSError("made by the test")

    def _wait(self) -> None:
        self._enter()
        type(self).asked += 1
        assert self.released.wait(60)

    def get(self, name: str, start: int, stop: int | None) -> bytes | None:
        self._wait()
        value = self.values.get(name)
        return None if value is None else value[start:stop]

    def exists(self, name: str) -> bool:
        self._wait()
        return name in self.values

    def set(self, name: str, value: bytes) -> None:
        self._enter()
        self.values[name] = bytes(value)
