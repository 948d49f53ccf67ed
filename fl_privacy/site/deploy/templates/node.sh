#!/bin/sh
# SuperNode @{number}. DATA=/path/to/images trains on this machine's own folder, one folder a class.
set -eu
cd "$(dirname "$0")"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
umask 077
config="partition-id=@{number} num-partitions=@{nodes} fl-privacy-state='$PWD/state' fl-privacy-key='$PWD/state.key'"
[ -z "${DATA:-}" ] || config="$config data-path='$DATA'"
# The site's own policy, where there is one; without it the app decides what leaves.
[ ! -f site.yaml ] || set -- --policy site.yaml "$@@"
exec fl-privacy supernode --superlink "${SUPERLINK:-@{host}:@{port}}" --root-certificates ca.crt \
  --auth-supernode-private-key node.key --port "${RUNTIME_PORT:-@{runtime}}" --node-config "$config" "$@@"
