#!/bin/bash
# Slurm prolog: restores GPUs that a crash left changed, and lifts those that are lowered for idleness, before a job
# starts. Add it to Prolog= in slurm.conf; it runs as root.
#
# It does the same as the epilog but always exits with status 0: a failing prolog would drain the node and requeue the
# job.

set -u
"$(dirname "$0")/epilog.sh" || logger -t gpuenergyd "prolog of job ${SLURM_JOB_ID:-?}: a GPU could not be restored" || true
timeout 5 "${GPUENERGYD_PREFIX:-/opt/gpuenergyd}/bin/gpuenergyd" idle lift >/dev/null 2>&1 || true
exit 0
