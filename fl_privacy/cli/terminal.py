"""The terminal, on which untrusted text has no control characters."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fl_privacy.errors import neutral


class Terminal(Console):
    """Rich's console, on which text can't move the cursor, nor color or reorder other text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render ``renderable``; only Rich's own controls stay."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else neutral(text), style, control)
