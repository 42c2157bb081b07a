#!/bin/bash
# Slurm epilog: restores every GPU of the node after a job. Add it to Epilog= in slurm.conf; it runs as root.
#
# A running daemon restores the GPUs when the processes of the job end, also if Slurm killed them. If no daemon answers,
# this script restores the GPUs that are still in its journal. If a GPU cannot be restored, the exit status is not 0 and
# Slurm drains the node.
#
# GPUENERGYD_PREFIX: installation prefix. GPUENERGYD_JOURNAL: path of the restore journal, if not the default.

set -u
prefix=${GPUENERGYD_PREFIX:-/opt/gpuenergyd}
[ -x "$prefix/bin/python" ] || exit 0 # not installed on this node

# Exit status 0: the daemon answers; 4: it answers and is degraded; others: no usable daemon.
timeout 5 "$prefix/bin/gpuenergyd" status --json >/dev/null 2>&1
case $? in 0 | 4) exit 0 ;; esac

status=0
for journal in ${GPUENERGYD_JOURNAL:-/run/gpuenergyd-gpu/journal.json /run/gpuenergyd/journal.json}; do
    [ -e "$journal" ] || continue
    timeout 30 "$prefix/bin/python" -I -m gpuenergyd.gpu.restore.command --journal "$journal" || status=1
done
exit $status
