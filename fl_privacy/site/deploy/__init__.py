"""Deployment: keys, certificates, scripts and services of real nodes, and their trial on loopback."""

from fl_privacy.site.deploy.loopback import check_deployment
from fl_privacy.site.deploy.writing import write_deployment

__all__ = ["check_deployment", "write_deployment"]
