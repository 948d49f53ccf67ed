"""Templates to a page that needs nothing besides itself."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fl_privacy.report import numbers


class _Templates(PackageLoader):
    """Keeps ``NAME`` in the file ``NAME.md``: a Flower app bundle leaves out files of other kinds."""

    def get_source(self, environment: Environment, template: str) -> Any:
        return super().get_source(environment, f"{template}.md")


def render(template: str, **values: Any) -> str:
    """The page ``template`` with ``values``; whatever they hold is escaped."""
    environment = Environment(
        loader=_Templates("fl_privacy.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": numbers.percent,
        "points": numbers.points,
        "seconds": numbers.seconds,
        "size": numbers.size,
        "metric": numbers.metric,
        "ratio": numbers.ratio,
        "interval": numbers.interval,
        "title_of": numbers.title,
    }
    return environment.get_template(template).render(**values)
