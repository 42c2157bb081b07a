#!/bin/bash
# Slurm epilog: after a job, every GPU of the node is as it was found. Add it to Epilog= in slurm.conf; it runs as root.
#
# A living daemon gives clocks back when the job's processes end, whether Slurm killed them or not. Where none answers,
# what its journal still lists is put back without it. A GPU that cannot be put back is a reason to drain the node:
# Slurm does so when this ends with another status than 0.
#
# GPUENERGYD_PREFIX: where it is installed. GPUENERGYD_JOURNAL: what is to be put back, if it lies elsewhere.

set -u
prefix=${GPUENERGYD_PREFIX:-/opt/gpuenergyd}
[ -x "$prefix/bin/python" ] || exit 0 # not installed on this node

# 0: it answers, 4: it answers and something is degraded; anything else is no daemon that could be relied on.
timeout 5 "$prefix/bin/gpuenergyd" status --json >/dev/null 2>&1
case $? in 0 | 4) exit 0 ;; esac

status=0
for journal in ${GPUENERGYD_JOURNAL:-/run/gpuenergyd-gpu/journal.json /run/gpuenergyd/journal.json}; do
    [ -e "$journal" ] || continue
    timeout 30 "$prefix/bin/python" -I -m gpuenergyd.gpu.restore.command --journal "$journal" || status=1
done
exit $status
