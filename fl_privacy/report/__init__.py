"""Pages and pictures for people, from what runs recorded."""

from fl_privacy.report.brief import write_brief
from fl_privacy.report.images import grid_picture
from fl_privacy.report.share import share_report
from fl_privacy.report.write import write_report, write_trade_off

__all__ = ["grid_picture", "share_report", "write_brief", "write_report", "write_trade_off"]
