"""Pages and pictures of recorded runs."""

from fl_privacy.report.brief import write_brief
from fl_privacy.report.gallery import grid_picture
from fl_privacy.report.write import share_report, trade_off_in_words, write_report, write_trade_off

__all__ = ["grid_picture", "share_report", "trade_off_in_words", "write_brief", "write_report", "write_trade_off"]
