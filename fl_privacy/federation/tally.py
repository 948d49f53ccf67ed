"""Progress counter of parts, in a module without PyTorch so that its process starts fast."""


class Tally:
    """Sum of finished victims over parts."""

    def __init__(self) -> None:
        self._done: dict[int, float] = {}

    def tell(self, part: int, done: float) -> None:
        self._done[part] = done

    def total(self) -> float:
        return sum(self._done.values())
