"""How far the parts of a work are; a module of its own, since its process then starts without PyTorch."""


class Tally:
    """Adds up how many victims the parts have done."""

    def __init__(self) -> None:
        self._done: dict[int, float] = {}

    def tell(self, part: int, done: float) -> None:
        """Note that ``part`` has done ``done`` victims."""
        self._done[part] = done

    def total(self) -> float:
        """Return the victims done by all."""
        return sum(self._done.values())
