#!/usr/bin/env bash
# Succeeds where tests can make hosts out of network namespaces: root, iproute2,
# and a kernel with bridges, veth pairs and token buckets. Leaves nothing behind.
set -euo pipefail

probe="segue-probe-$$"
trap 'ip netns del "$probe" 2>/dev/null || true' EXIT

ip netns add "$probe"
ip netns exec "$probe" true
ip -n "$probe" link add br0 type bridge
ip -n "$probe" link add left type veth peer name right
tc -n "$probe" qdisc add dev left root tbf rate 10mbit burst 32kb latency 50ms
