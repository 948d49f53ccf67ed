#!/bin/sh
# The SuperLink, on this machine's loopback interface; BIND=0.0.0.0 lets nodes elsewhere reach it.
set -eu
cd "$(dirname "$0")"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
umask 077
exec flower-superlink --host "${BIND:-127.0.0.1}" --port @{port} \
  --ssl-ca-certfile ca.crt --ssl-certfile superlink.crt --ssl-keyfile superlink.key \
  --enable-supernode-auth --database superlink.db --disable-runtime-dependency-installation "$@@"
