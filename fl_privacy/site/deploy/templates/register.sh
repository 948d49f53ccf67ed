#!/bin/sh
# Tells the SuperLink, which is running, the public keys of its nodes: others are refused.
set -eu
cd "$(dirname "$0")"
export FLWR_HOME="${FLWR_HOME:-$PWD/flwr}" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
for key in node-*/node.pub; do
  flwr supernode register "$key" deployment
done
